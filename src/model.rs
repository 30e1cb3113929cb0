//! The one generic decoder: Llama and its relatives, driven by [`DecoderConfig`].
//!
//! The decoder is immutable and holds no cache: one decoder serves any number of caches, and each [`CacheBackend`]
//! any number of sequences.

mod attention;
mod block;
mod config;
mod fields;
mod fingerprint;
mod input;
mod ragged;
mod replay;
mod rope;
mod source;
mod weights;

use std::{fmt, ops::Range, sync::OnceLock};

use burn::tensor::{DType, Device, Tensor};

#[cfg(feature = "pretrained")]
pub(crate) use self::source::WeightSource;
use self::{
    attention::StepAt,
    block::Block,
    ragged::{by_sequence, last_tokens},
    replay::BlockView,
    rope::{Angles, RopeTable},
};
pub use self::{
    config::{ConfigError, DecoderConfig, LayerConfig},
    input::{ForwardError, Input},
    rope::{RopeConfig, RopeScaling, yarn_attention_factor},
    weights::BuildError,
};
pub use crate::exact::Activation;
use crate::{
    cache::{CacheBackend, CacheError, LayerIndex, ModelShape, Replay, Step, TokenIds},
    exact::{Conformance, Linear, Norm, Weight, caches, in_pool, normed_linears, softcap},
    positions::Positions,
};

/// A decoder-only transformer.
///
/// ```
/// use burn::tensor::Device;
/// use kv_direct::FullKv;
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
    config: DecoderConfig,
    /// Rotary tables; layers with the same base and scaling share one.
    tables: Vec<RopeTable>,
    /// `[hidden, vocab]`: a column for each token. The same as `head` where the two are tied.
    embedding: Weight,
    blocks: Vec<Block>,
    final_norm: Norm,
    /// `[hidden, vocab]`.
    head: Linear,
    device: Device,
    /// The dtype in which keys and values are handed to a cache.
    cache_dtype: DType,
    /// Measured on first use.
    conformance: OnceLock<Conformance>,
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
        &self.config
    }

    /// The device its weights are on.
    #[must_use]
    pub const fn device(&self) -> &Device {
        &self.device
    }

    /// The sizes that a cache needs to serve this decoder.
    #[must_use]
    pub fn shape(&self) -> ModelShape {
        let shape = self.config().shape(self.dtype());
        shape.with_cache_dtype(self.cache_dtype).on(&self.device)
    }

    /// Hands keys and values to caches in another dtype: bf16 and f16 take half the bytes.
    ///
    /// They are rounded once, when they are projected. A rebuilt entry is rounded in the same way, so a cache stays
    /// exact: it has the bits of [`FullKv`](crate::FullKv) with the same dtype. Attention widens entries to f32. An f16
    /// ends at 65,504: larger numbers become infinite.
    ///
    /// # Panics
    /// If the dtype is none of f32, bf16 and f16.
    ///
    /// ```
    /// use burn::tensor::{DType, Device};
    /// use kv_direct::model::{Decoder, DecoderConfig};
    ///
    /// # let device = Device::flex();
    /// # let decoder = Decoder::from_weights(DecoderConfig::new(97, 64, 3, 4, 2), &device, |_, shape| {
    /// #     Ok::<_, std::convert::Infallible>(vec![0.01; shape.iter().product()])
    /// # })?;
    /// let bytes = decoder.shape().keys_values_per_token();
    /// let decoder = decoder.with_cache_dtype(DType::BF16);
    /// assert_eq!(decoder.shape().keys_values_per_token(), bytes / 2);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn with_cache_dtype(mut self, dtype: DType) -> Self {
        assert!(
            caches(dtype),
            "keys and values cannot be cached in {dtype:?}"
        );
        self.cache_dtype = dtype;
        self
    }

    /// Whether the kernels repeat bits for this decoder, on its device. A
    /// [`ResidualCheckpoint`](crate::ResidualCheckpoint) is built with this report.
    ///
    /// # Cost
    /// Nothing on `flex`, where bits repeat by construction. Elsewhere the first call measures
    /// ([`Conformance::probe`]), and later calls return the same report.
    #[must_use]
    pub fn conformance(&self) -> &Conformance {
        let report = || {
            let routines = Conformance::of(&self.shape().kernels, &self.device, self.dtype());
            routines.covering_decoder()
        };
        self.conformance.get_or_init(report)
    }

    /// The decoder at a layer, for a cache that rebuilds entries outside a step
    /// ([`ResidualCheckpoint::resume`](crate::ResidualCheckpoint::resume)).
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

    /// The dtype in which it computes, whatever its weights are stored as.
    fn dtype(&self) -> DType {
        self.final_norm.weight.dtype()
    }

    /// Runs one step and returns its logits: `[batch, tokens, vocab]`, or `[batch, 1, vocab]` if only those of each
    /// sequence's last token are asked for. Where sequences bring different numbers of tokens, the logits of shorter
    /// ones end in zeros. Those of a sequence without tokens have no meaning.
    ///
    /// Every sequence continues at its length in the cache.
    ///
    /// # Errors
    /// [`ForwardError`]. Unless a layer of the cache failed, the cache is unchanged.
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
        let mut starts = cache.lengths().to_vec();
        starts.resize(tokens.sequences(), 0);
        let step = Step::new(tokens, &starts)?.with_more_follows(more_follows);
        self.check_context(&step, &cache.reach())?;
        let residual = self.embed(step.tokens())?;
        in_pool(&self.device, || {
            cache.begin(&step)?;
            let mut residual = self.run(0..self.blocks.len(), residual, &step, cache)?;
            cache.commit()?;
            if last_only {
                residual = last_tokens(residual, step.positions());
                return Ok(self.logits(residual).swap_dims(0, 1));
            }
            Ok(by_sequence(self.logits(residual), step.positions()))
        })
    }

    /// The residual entering the first block: `[1, tokens, hidden]`, the tokens of all sequences one after another.
    ///
    /// # Errors
    /// [`Vocabulary`](ForwardError::Vocabulary) for an id the vocabulary does not have,
    /// [`EmptyStep`](CacheError::EmptyStep) if there is no token.
    pub fn embed(&self, tokens: &TokenIds) -> Result<Tensor<3>, ForwardError> {
        let config = self.config();
        if tokens.longest() == 0 {
            let sequences = tokens.sequences();
            return Err(CacheError::EmptyStep { sequences }.into());
        }
        let mut ids: Vec<u32> = Vec::new();
        for (sequence, tokens) in tokens.iter().enumerate() {
            let unknown = |&token: &u32| token as usize >= config.vocab;
            if let Some(index) = tokens.iter().position(unknown) {
                return Err(ForwardError::Vocabulary {
                    sequence,
                    index,
                    token: tokens[index],
                    vocab: config.vocab,
                });
            }
            ids.extend_from_slice(tokens);
        }
        let embedded = self.embedding.columns(&ids);
        let embedded = embedded.reshape([1, ids.len(), config.hidden]);
        Ok(match config.embedding_scale {
            Some(scale) => embedded.mul_scalar(scale),
            None => embedded,
        })
    }

    /// Runs the blocks `layers` of a step that was begun and is not yet committed, the residual
    /// `[1, tokens, hidden]` in and out, as [`embed`](Self::embed) has it. [`forward`](Self::forward) is `begin`, `run` over all layers, `commit`
    /// and [`logits`](Self::logits). Between two calls the residual may be read, moved or replaced.
    ///
    /// # Errors
    /// [`Layers`](ForwardError::Layers) for layers the decoder does not have, [`Residual`](ForwardError::Residual)
    /// for a residual of another shape than the step's, [`ContextFull`](ForwardError::ContextFull), and the errors of
    /// the cache.
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
        let expected = [1, step.positions().tokens(), self.config().hidden];
        if residual.dims() != expected {
            return Err(ForwardError::Residual {
                expected,
                found: residual.dims(),
            });
        }
        self.check_context(step, &cache.reach())?;
        let tables = 0..self.tables.len();
        let angles: Vec<Angles> = tables
            .map(|table| self.angles(table, step.positions()))
            .collect();
        for (layer, block) in layers.zip(blocks) {
            let view = BlockView {
                decoder: self,
                layer,
            };
            let at = StepAt {
                layer: LayerIndex::new(layer),
                step,
                angles: &angles[block.table],
                cache_dtype: self.cache_dtype,
                replay: &view,
            };
            residual = block.step(residual, &at, self.config(), cache)?;
        }
        Ok(residual)
    }

    /// Final norm and head over the residual `[batch, tokens, hidden]`.
    ///
    /// # Panics
    /// If `hidden` is not that of the decoder.
    #[must_use]
    pub fn logits(&self, residual: Tensor<3>) -> Tensor<3> {
        let config = self.config();
        let logits = normed_linears(residual, &self.final_norm, &[&self.head]);
        match config.final_softcap {
            Some(cap) => softcap(logits, cap),
            None => logits,
        }
    }

    fn angles(&self, table: usize, positions: &Positions) -> Angles {
        self.tables[table].angles(positions, &self.device, self.dtype())
    }

    /// Checks that a step ends within the context, where `reach` positions lie before it.
    fn check_context(&self, step: &Step, reach: &[usize]) -> Result<(), ForwardError> {
        let max_positions = self.config().max_positions;
        let reach = reach.iter().copied().chain(std::iter::repeat(0));
        let ends = step.tokens().lengths().into_iter().zip(reach);
        let longest = ends
            .map(|(tokens, reach)| reach.saturating_add(tokens))
            .max();
        match longest {
            Some(end) if end > max_positions => Err(ForwardError::ContextFull {
                position: end - 1,
                max_positions,
            }),
            _ => Ok(()),
        }
    }
}
