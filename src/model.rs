//! The one generic decoder: Llama and its relatives, driven by [`DecoderConfig`].
//!
//! The decoder is immutable and holds no cache: one decoder serves any number of sequences, each
//! with a [`CacheBackend`] of its own.

mod attention;
mod block;
mod config;
mod feed_forward;
#[cfg(feature = "session")]
mod fingerprint;
mod input;
mod rope;
mod source;
mod weights;

use std::{fmt, ops::Range};

use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use self::{
    block::{Block, BlockView, Shared},
    rope::Angles,
};
pub use self::{
    config::{Activation, ConfigError, DecoderConfig, LayerConfig},
    input::{ForwardError, Input},
    rope::{RopeConfig, RopeScaling, yarn_attention_factor},
    weights::BuildError,
};
use crate::{
    cache::{CacheBackend, CacheError, LayerIndex, ModelShape, Replay, Step, TokenIds},
    exact::{in_pool, linear, rms_norm},
    positions::Positions,
};

/// A decoder-only transformer.
///
/// ```
/// use burn::tensor::Device;
/// use kv_direct::cache::FullKv;
/// use kv_direct::model::{Decoder, DecoderConfig, Input};
///
/// # let device = Device::flex();
/// # let decoder = Decoder::from_weights(DecoderConfig::new(97, 64, 3, 4, 2), &device, |_, shape| {
/// #     Ok::<_, std::convert::Infallible>(vec![0.01; shape.iter().product()])
/// # })?;
/// let mut cache = FullKv::new(&decoder.shape());
/// let logits = decoder.forward(&[3, 1, 4][..], &mut cache)?;
/// assert_eq!(logits.dims(), [1, 3, 97]);
/// let last = decoder.forward(Input::from(&[1, 5][..]).last_only(), &mut cache)?;
/// assert_eq!(last.dims(), [1, 1, 97]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Decoder {
    shared: Shared,
    /// `[vocab, hidden]`; `None` where the head is the embedding.
    embedding: Option<Tensor<2>>,
    blocks: Vec<Block>,
    final_norm: Tensor<1>,
    /// `[hidden, vocab]`.
    head: Tensor<2>,
    device: Device,
}

impl fmt::Debug for Decoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Decoder")
            .field("config", self.config())
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}

impl Decoder {
    /// The configuration it was built from.
    #[must_use]
    pub const fn config(&self) -> &DecoderConfig {
        &self.shared.config
    }

    /// The device its weights are on.
    #[must_use]
    pub const fn device(&self) -> &Device {
        &self.device
    }

    /// What a cache must know to serve this decoder.
    #[must_use]
    pub fn shape(&self) -> ModelShape {
        self.config().shape(self.dtype())
    }

    /// The decoder at a layer, for a cache that rebuilds rows outside a step
    /// ([`ResidualCheckpoint::resume`](crate::cache::ResidualCheckpoint::resume)).
    ///
    /// # Panics
    /// If there is no such layer.
    #[must_use]
    pub fn at(&self, layer: LayerIndex) -> impl Replay {
        assert!(layer.index() < self.blocks.len(), "a layer of the decoder");
        BlockView {
            decoder: self,
            layer: layer.index(),
        }
    }

    fn dtype(&self) -> DType {
        self.head.dtype()
    }

    /// Runs one step and answers its logits, `[batch, tokens, vocab]`, or `[batch, 1, vocab]` where
    /// only each row's last are asked for. Logits of pads, and of rows without tokens, mean nothing.
    ///
    /// Rows go on where the cache stands.
    ///
    /// # Errors
    /// [`ForwardError`]. Unless a layer of the cache failed, the cache is as it was.
    pub fn forward<C>(
        &self,
        input: impl Into<Input>,
        cache: &mut C,
    ) -> Result<Tensor<3>, ForwardError>
    where
        C: CacheBackend + ?Sized,
    {
        let Input {
            tokens,
            last_only,
            more_follows,
        } = input.into();
        let starts: Vec<usize> = (0..tokens.rows()).map(|row| cache.position(row)).collect();
        let step = Step::new(tokens, &starts)?.with_more_follows(more_follows);
        self.check_positions(step.positions())?;
        let residual = self.embed(step.tokens())?;
        let rows = step.positions().rows() * step.positions().width();
        in_pool(&self.device, rows, || {
            cache.begin(&step)?;
            let mut residual = self.run(0..self.blocks.len(), residual, &step, cache)?;
            cache.commit()?;
            if last_only {
                residual = last_rows(residual, &step);
            }
            Ok(self.logits(residual))
        })
    }

    /// Residual rows entering the first block: `[rows, longest, hidden]`, shorter rows padded.
    ///
    /// # Errors
    /// [`Vocabulary`](ForwardError::Vocabulary) for an id the vocabulary does not have,
    /// [`EmptyStep`](CacheError::EmptyStep) if there is no token.
    pub fn embed(&self, tokens: &TokenIds) -> Result<Tensor<3>, ForwardError> {
        let config = self.config();
        let (rows, width) = (tokens.rows(), tokens.longest());
        if width == 0 {
            return Err(CacheError::EmptyStep { rows }.into());
        }
        let mut ids: Vec<i64> = Vec::with_capacity(rows * width);
        for (row, tokens) in tokens.iter().enumerate() {
            if let Some(index) = tokens
                .iter()
                .position(|&token| token as usize >= config.vocab)
            {
                return Err(ForwardError::Vocabulary {
                    row,
                    index,
                    token: tokens[index],
                    vocab: config.vocab,
                });
            }
            ids.extend(tokens.iter().map(|&token| i64::from(token)));
            ids.resize((row + 1) * width, 0);
        }
        let ids = Tensor::<1, Int>::from_data(TensorData::new(ids, [rows * width]), &self.device);
        let embedded = match &self.embedding {
            Some(embedding) => embedding.clone().select(0, ids),
            None => self.head.clone().select(1, ids).transpose(),
        };
        let embedded = embedded.reshape([rows, width, config.hidden]);
        Ok(match config.embedding_scale {
            Some(scale) => embedded.mul_scalar(scale),
            None => embedded,
        })
    }

    /// Runs the blocks `layers` of a step that was begun and is not yet committed, the residual
    /// `[batch, tokens, hidden]` in and out. [`forward`](Self::forward) is `begin`, `run` over all
    /// layers, `commit` and [`logits`](Self::logits); between two calls the residual may be looked
    /// at, moved or replaced.
    ///
    /// # Errors
    /// [`Layers`](ForwardError::Layers) for layers the decoder does not have,
    /// [`Residual`](ForwardError::Residual) for rows of another shape than the step's,
    /// [`ContextFull`](ForwardError::ContextFull), and whatever the cache fails with.
    pub fn run<C>(
        &self,
        layers: Range<usize>,
        mut residual: Tensor<3>,
        step: &Step,
        cache: &mut C,
    ) -> Result<Tensor<3>, ForwardError>
    where
        C: CacheBackend + ?Sized,
    {
        let Some(blocks) = self.blocks.get(layers.clone()) else {
            return Err(ForwardError::Layers {
                found: layers,
                layers: self.blocks.len(),
            });
        };
        let expected = [
            step.positions().rows(),
            step.positions().width(),
            self.config().hidden,
        ];
        if residual.dims() != expected {
            return Err(ForwardError::Residual {
                expected,
                found: residual.dims(),
            });
        }
        let tables = 0..self.shared.tables.len();
        let angles: Vec<Angles> = tables
            .map(|table| self.angles(table, step.positions()))
            .collect::<Result<_, _>>()?;
        for (layer, block) in layers.zip(blocks) {
            let view = BlockView {
                decoder: self,
                layer,
            };
            residual = block.step(&view, residual, &angles[block.table], step, cache)?;
        }
        Ok(residual)
    }

    /// Final norm and head over residual rows `[batch, tokens, hidden]`.
    ///
    /// # Panics
    /// If the rows have another width than the decoder.
    #[must_use]
    pub fn logits(&self, residual: Tensor<3>) -> Tensor<3> {
        let config = self.config();
        let normed = rms_norm(
            residual,
            &self.final_norm,
            config.norm_epsilon,
            config.norm_plus_one,
        );
        let logits = linear(normed, &self.head);
        match config.final_softcap {
            Some(cap) => logits.div_scalar(cap).tanh().mul_scalar(cap),
            None => logits,
        }
    }

    fn angles(&self, table: usize, positions: &Positions) -> Result<Angles, ForwardError> {
        self.check_positions(positions)?;
        Ok(self.shared.tables[table].angles(positions, &self.device, self.dtype()))
    }

    fn check_positions(&self, positions: &Positions) -> Result<(), ForwardError> {
        let max_positions = self.config().max_positions;
        match positions.last() {
            Some(position) if position >= max_positions => Err(ForwardError::ContextFull {
                position,
                max_positions,
            }),
            _ => Ok(()),
        }
    }
}

/// The last real row of every batch row: `[batch, 1, hidden]`.
fn last_rows(residual: Tensor<3>, step: &Step) -> Tensor<3> {
    let last = |length: usize| length.saturating_sub(1)..length.max(1);
    let lengths = step.tokens().lengths();
    if lengths.iter().all(|&length| length == lengths[0]) {
        return residual.slice_dim(1, last(lengths[0]));
    }
    let rows = lengths.into_iter().enumerate();
    let rows = rows.map(|(row, length)| {
        residual
            .clone()
            .slice_dim(0, row..row + 1)
            .slice_dim(1, last(length))
    });
    Tensor::cat(rows.collect(), 0)
}
