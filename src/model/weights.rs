//! Builds the layers of a decoder from checkpoint tensors.

use std::{num::NonZeroUsize, sync::OnceLock};

use burn::tensor::{DType, Device, Tensor};

use super::{
    ConfigError, Decoder, DecoderConfig, RopeConfig,
    attention::Attention,
    block::{Block, FeedForward},
    rope::RopeTable,
    source::{Iterators, Source, WeightSource},
};
use crate::exact::{AttentionParams, Linear, Norm};

/// Why a decoder could not be built.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError<E>
where
    E: std::error::Error + 'static,
{
    /// The fields of the configuration do not fit one another.
    #[error("the configuration does not fit")]
    Config(#[from] ConfigError),
    /// A weight could not be read from its source.
    #[error("weight {name} could not be read")]
    Weight {
        /// The neutral name.
        name: String,
        /// The error of the source.
        source: E,
    },
    /// The source has another number of elements than the shape of the weight.
    #[error("weight {name} has {found} elements, its shape {shape:?} asks for {}", shape.iter().product::<usize>())]
    Elements {
        /// The neutral name.
        name: String,
        /// The expected shape.
        shape: Vec<usize>,
        /// Elements found; a lower bound if there are too many.
        found: usize,
    },
}

impl Decoder {
    /// Builds a decoder in f32 on `device`.
    ///
    /// `weights` is called with the neutral name of each tensor and the shape that it must have in Hugging Face's
    /// orientation, `[out, in]`. It returns the elements, row by row. [`DecoderConfig::weights`] lists the names and
    /// shapes. Elements are read one by one and put in their place, so a source that computes them never holds a
    /// whole weight.
    ///
    /// # Errors
    /// [`BuildError`] if the fields of the configuration do not fit one another, if a weight has too few or too many
    /// elements, or if `weights` fails.
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
    pub fn from_weights<E, I>(
        config: DecoderConfig,
        device: &Device,
        weights: impl FnMut(&str, &[usize]) -> Result<I, E>,
    ) -> Result<Self, BuildError<E>>
    where
        E: std::error::Error + 'static,
        I: IntoIterator<Item = f32>,
    {
        Self::from_stored_weights(config, device, |_| DType::F32, weights)
    }

    /// As [`from_weights`](Self::from_weights), with matrices held in the dtype that `stored` names for each: bf16 and
    /// f16 take half the bytes.
    ///
    /// The decoder computes in f32 all the same. Its results have the bits of one that holds the same numbers in f32.
    /// Only `flex` has layouts for other dtypes than f32; other devices hold f32. Elements are rounded to the dtype:
    /// numbers that were read from it stay what they are.
    ///
    /// # Errors
    /// As [`from_weights`](Self::from_weights).
    ///
    /// ```
    /// use burn::tensor::{DType, Device};
    /// use kv_direct::model::{Decoder, DecoderConfig};
    ///
    /// let config = DecoderConfig::new(97, 64, 3, 4, 2);
    /// let device = Device::flex();
    /// let decoder = Decoder::from_stored_weights(config, &device, |_| DType::BF16, |_, shape| {
    ///     Ok::<_, std::convert::Infallible>(vec![0.25; shape.iter().product()])
    /// })?;
    /// assert_eq!(decoder.shape().dtype, DType::F32);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn from_stored_weights<E, I>(
        config: DecoderConfig,
        device: &Device,
        stored: impl Fn(&str) -> DType,
        weights: impl FnMut(&str, &[usize]) -> Result<I, E>,
    ) -> Result<Self, BuildError<E>>
    where
        E: std::error::Error + 'static,
        I: IntoIterator<Item = f32>,
    {
        Self::from_source(config, device, Iterators { weights, stored })
    }

    /// Builds a decoder from a source of weights.
    pub(crate) fn from_source<S: WeightSource>(
        config: DecoderConfig,
        device: &Device,
        weights: S,
    ) -> Result<Self, BuildError<S::Error>> {
        config.validate()?;
        let mut source = Source { weights, device };
        let hidden = config.hidden;
        let mut columns = |name: &str| source.weight(&[(name.into(), config.vocab)], hidden);
        let embedding = columns("embedding")?;
        let head = match config.tied_head {
            true => embedding.clone(),
            false => columns("head")?,
        };

        let mut tables: Vec<(RopeConfig, RopeTable)> = Vec::new();
        let mut blocks = Vec::with_capacity(config.layers.len());
        let shapes = config.block_weights();
        for (index, layer) in config.layers.iter().enumerate() {
            let table = tables
                .iter()
                .position(|(rope, _)| *rope == layer.rope)
                .unwrap_or_else(|| {
                    let table = RopeTable::new(&layer.rope, config.head_dim, config.max_positions);
                    tables.push((layer.rope, table));
                    tables.len() - 1
                });
            let mut parts = Parts {
                source: &mut source,
                layer: index,
                shapes: &shapes,
            };
            blocks.push(parts.block(&config, table, layer.window)?);
        }
        let final_norm = norm(source.vector(&[("final_norm".into(), hidden)])?, &config);
        Ok(Self {
            config,
            tables: tables.into_iter().map(|(_, table)| table).collect(),
            embedding,
            blocks,
            final_norm,
            head: Linear {
                weight: head,
                bias: None,
            },
            device: device.clone(),
            cache_dtype: DType::F32,
            conformance: OnceLock::new(),
        })
    }
}

fn norm(weight: Tensor<1>, config: &DecoderConfig) -> Norm {
    Norm {
        weight,
        epsilon: config.norm_epsilon,
        plus_one: config.norm_plus_one,
    }
}

fn attention_params(config: &DecoderConfig, window: Option<NonZeroUsize>) -> AttentionParams {
    let mut params = AttentionParams::new(config.query_scale);
    (params.window, params.softcap) = (window, config.attention_softcap);
    params
}

/// The weights of one block.
struct Parts<'s, 'a, S> {
    source: &'s mut Source<'a, S>,
    layer: usize,
    /// The shapes by neutral name, without the biases and norms that the configuration lacks.
    shapes: &'s [(&'static str, Vec<usize>)],
}

impl<S: WeightSource> Parts<'_, '_, S> {
    fn block(
        &mut self,
        config: &DecoderConfig,
        table: usize,
        window: Option<NonZeroUsize>,
    ) -> Result<Block, BuildError<S::Error>> {
        let always = "the configuration lists this norm for every block";
        Ok(Block {
            attention: Attention {
                norm: self.norm("attention_norm", config)?.expect(always),
                query: self.linear(&["query"])?,
                key_value: self.linear(&["key", "value"])?,
                output: self.linear(&["output"])?,
                query_norm: self.norm("query_norm", config)?,
                key_norm: self.norm("key_norm", config)?,
                params: attention_params(config, window),
                post_norm: self.norm("post_attention_norm", config)?,
            },
            feed_forward: FeedForward {
                norm: self.norm("feed_forward_norm", config)?.expect(always),
                gate_up: self.linear(&["gate", "up"])?,
                down: self.linear(&["down"])?,
                activation: config.activation,
                post_norm: self.norm("post_feed_forward_norm", config)?,
            },
            table,
        })
    }

    fn norm(
        &mut self,
        name: &str,
        config: &DecoderConfig,
    ) -> Result<Option<Norm>, BuildError<S::Error>> {
        let weight = self.vector(&[name.to_owned()])?;
        Ok(weight.map(|weight| norm(weight, config)))
    }

    /// Linear layers with the same input, side by side.
    fn linear(&mut self, names: &[&str]) -> Result<Linear, BuildError<S::Error>> {
        let shape = |name: &&str| self.shape(name).expect("every block has its linear layers");
        let width = shape(&names[0])[1];
        let parts: Vec<_> = names
            .iter()
            .map(|name| (self.full(name), shape(name)[0]))
            .collect();
        let weight = self.source.weight(&parts, width)?;
        let biases: Vec<String> = names.iter().map(|name| format!("{name}.bias")).collect();
        Ok(Linear {
            weight,
            bias: self.vector(&biases)?,
        })
    }

    /// Vectors, joined; `None` if the configuration has none of them.
    fn vector(&mut self, names: &[String]) -> Result<Option<Tensor<1>>, BuildError<S::Error>> {
        let parts: Vec<_> = names
            .iter()
            .filter_map(|name| Some((self.full(name), self.shape(name)?[0])))
            .collect();
        (!parts.is_empty())
            .then(|| self.source.vector(&parts))
            .transpose()
    }

    fn shape(&self, name: &str) -> Option<&[usize]> {
        let (_, shape) = self.shapes.iter().find(|(own, _)| *own == name)?;
        Some(shape)
    }

    fn full(&self, name: &str) -> String {
        format!("layers.{}.{name}", self.layer)
    }
}
