//! From checkpoint tensors to the layers of a decoder.

use std::{collections::BTreeMap, num::NonZeroUsize};

use burn::tensor::{DType, Device, Tensor, TensorData};

use super::{
    ConfigError, Decoder, DecoderConfig, RopeConfig,
    attention::Attention,
    block::{Block, Shared},
    feed_forward::FeedForward,
    rope::RopeTable,
};
use crate::exact::linear;

/// Why a decoder could not be built.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError<E>
where
    E: std::error::Error + 'static,
{
    /// The configuration does not fit itself.
    #[error("the configuration does not fit")]
    Config(#[from] ConfigError),
    /// The source of weights failed to hand one over.
    #[error("weight {name} could not be read")]
    Weight {
        /// The neutral name.
        name: String,
        /// What the source says.
        source: E,
    },
    /// The source handed over another number of elements than the shape asks for.
    #[error("weight {name} has {found} elements, its shape {shape:?} asks for {}", shape.iter().product::<usize>())]
    Elements {
        /// The neutral name.
        name: String,
        /// The shape asked for.
        shape: Vec<usize>,
        /// Elements handed over.
        found: usize,
    },
}

/// A linear layer: its weight as `[in, out]`, contiguous, and a bias.
pub(super) struct Linear {
    pub(super) weight: Tensor<2>,
    bias: Option<Tensor<1>>,
}

impl Linear {
    pub(super) fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let y = linear(x, &self.weight);
        match &self.bias {
            Some(bias) => y + bias.clone().unsqueeze::<3>(),
            None => y,
        }
    }
}

impl Decoder {
    /// Builds a decoder in f32 on `device`, asking `weights` for each tensor by a neutral name and
    /// the shape it must have in Hugging Face's orientation, `[out, in]`, row by row.
    ///
    /// [`DecoderConfig::weights`] lists the names and shapes.
    ///
    /// # Errors
    /// [`BuildError`]: a configuration that does not fit, or whatever `weights` fails with.
    ///
    /// ```
    /// use burn::tensor::Device;
    /// use kv_direct::model::{Decoder, DecoderConfig};
    ///
    /// let config = DecoderConfig::new(97, 64, 3, 4, 2);
    /// let decoder = Decoder::from_weights(config, &Device::flex(), |_name, shape| {
    ///     Ok::<_, std::convert::Infallible>(vec![0.01; shape.iter().product()])
    /// })?;
    /// assert_eq!(decoder.shape().layers(), 3);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn from_weights<E>(
        config: DecoderConfig,
        device: &Device,
        mut weights: impl FnMut(&str, &[usize]) -> Result<Vec<f32>, E>,
    ) -> Result<Self, BuildError<E>>
    where
        E: std::error::Error + 'static,
    {
        config.validate()?;
        let mut read = |name: &str, shape: &[usize]| {
            let data = weights(name, shape).map_err(|source| BuildError::Weight {
                name: name.into(),
                source,
            })?;
            if data.len() == shape.iter().product::<usize>() {
                return Ok(data);
            }
            Err(BuildError::Elements {
                name: name.into(),
                shape: shape.to_vec(),
                found: data.len(),
            })
        };
        let hidden = config.hidden;
        let embedding = read("embedding", &[config.vocab, hidden])?;
        let (embedding, head) = if config.tied_head {
            (
                None,
                transposed([(&embedding[..], config.vocab)], hidden, device),
            )
        } else {
            let head = read("head", &[config.vocab, hidden])?;
            let head = transposed([(&head[..], config.vocab)], hidden, device);
            (
                Some(tensor(embedding, [config.vocab, hidden], device)),
                head,
            )
        };

        let mut tables: Vec<(RopeConfig, RopeTable)> = Vec::new();
        let mut blocks = Vec::with_capacity(config.layers.len());
        for (index, layer) in config.layers.iter().enumerate() {
            let table = tables
                .iter()
                .position(|(rope, _)| *rope == layer.rope)
                .unwrap_or_else(|| {
                    let table = RopeTable::new(&layer.rope, config.head_dim, config.max_positions);
                    tables.push((layer.rope, table));
                    tables.len() - 1
                });
            let mut loader = Loader {
                device,
                tensors: BTreeMap::new(),
            };
            for (name, shape) in config.block_weights() {
                let data = read(&format!("layers.{index}.{name}"), &shape)?;
                loader.tensors.insert(name, (data, shape));
            }
            blocks.push(loader.block(&config, table, layer.window));
        }
        let final_norm = tensor(read("final_norm", &[hidden])?, [hidden], device);
        let shared = Shared {
            config,
            tables: tables.into_iter().map(|(_, table)| table).collect(),
        };
        Ok(Self {
            shared,
            embedding,
            blocks,
            final_norm,
            head,
            device: device.clone(),
        })
    }
}

/// The tensors of one block by neutral name, and the device they go to.
struct Loader<'a> {
    device: &'a Device,
    tensors: BTreeMap<&'static str, (Vec<f32>, Vec<usize>)>,
}

impl Loader<'_> {
    /// The block made of the tensors read; a bias or norm that was not asked for is not there.
    fn block(
        mut self,
        config: &DecoderConfig,
        table: usize,
        window: Option<NonZeroUsize>,
    ) -> Block {
        let always = "the configuration lists this norm for every block";
        Block {
            attention_norm: self.norm("attention_norm").expect(always),
            attention: Attention {
                query: self.linear(&["query"], &["query.bias"]),
                key_value: self.linear(&["key", "value"], &["key.bias", "value.bias"]),
                output: self.linear(&["output"], &["output.bias"]),
                query_norm: self.norm("query_norm"),
                key_norm: self.norm("key_norm"),
            },
            post_attention_norm: self.norm("post_attention_norm"),
            feed_forward_norm: self.norm("feed_forward_norm").expect(always),
            feed_forward: FeedForward {
                gate_up: self.linear(&["gate", "up"], &["gate.bias", "up.bias"]),
                down: self.linear(&["down"], &["down.bias"]),
                activation: config.activation,
            },
            post_feed_forward_norm: self.norm("post_feed_forward_norm"),
            table,
            window,
        }
    }

    fn norm(&mut self, name: &str) -> Option<Tensor<1>> {
        let (data, shape) = self.tensors.remove(name)?;
        Some(tensor(data, [shape[0]], self.device))
    }

    /// Linear layers of one input side by side.
    fn linear(&mut self, names: &[&'static str], biases: &[&'static str]) -> Linear {
        let parts: Vec<_> = names
            .iter()
            .filter_map(|name| self.tensors.remove(name))
            .collect();
        let bias: Vec<f32> = biases
            .iter()
            .filter_map(|name| self.tensors.remove(name))
            .flat_map(|(b, _)| b)
            .collect();
        let width = parts[0].1[1];
        let weight = transposed(
            parts.iter().map(|(data, shape)| (&data[..], shape[0])),
            width,
            self.device,
        );
        let out = bias.len();
        Linear {
            weight,
            bias: (out > 0).then(|| tensor(bias, [out], self.device)),
        }
    }
}

fn tensor<const D: usize>(data: Vec<f32>, shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::from_data(TensorData::new(data, shape), (device, DType::F32))
}

/// Row-major `[out, width]` matrices side by side as one contiguous `[width, sum of out]`.
fn transposed<'d>(
    parts: impl IntoIterator<Item = (&'d [f32], usize)>,
    width: usize,
    device: &Device,
) -> Tensor<2> {
    let parts: Vec<_> = parts.into_iter().collect();
    let total: usize = parts.iter().map(|(_, out)| out).sum();
    let mut data = vec![0.0; width * total];
    let mut left = 0;
    for (matrix, out) in parts {
        // Tiles that fit a cache: a plain double loop would touch a new line at every element.
        for rows in (0..out).step_by(TILE) {
            for columns in (0..width).step_by(TILE) {
                for row in rows..(rows + TILE).min(out) {
                    for column in columns..(columns + TILE).min(width) {
                        data[column * total + left + row] = matrix[row * width + column];
                    }
                }
            }
        }
        left += out;
    }
    tensor(data, [width, total], device)
}

const TILE: usize = 32;
