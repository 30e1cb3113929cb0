//! `StreamingLlm`: keeps the first entries and the newest (Xiao et al., arXiv 2309.17453, section 3).

use super::{Attention, Entries, Evicting, Policy, Sequence, TokenBudget};
use crate::cache::{CacheError, ModelShape, forward_to_field};

/// Keeps the first `sinks` entries and the newest `recent` between steps, in every full-attention layer.
///
/// With [`Indexing::CacheIndex`] the position of an entry is its index in the cache, as in the paper. However long the
/// text is, sinks and newest entries stay as close as they are in the cache. Rotary attention depends on distances
/// alone, so only the sinks are rotated: forward by the number of evicted entries, each time from the key as it came
/// in. A text may then be longer than the decoder's context: only the entries held and those of a step must fit.
/// [`Indexing::Original`] leaves them in place, and a text ends where the decoder's positions end.
///
/// Attention reads the entries held and those of the step. So once something was evicted, the result depends on how
/// tokens were split into steps, and any truncation but to nothing is refused with
/// [`Irreversible`](CacheError::Irreversible). Until then the bits are those of [`FullKv`](crate::FullKv).
///
/// # Cost
/// `sinks + recent` entries, in panels of 32 slots that also hold those of the step. With `CacheIndex` also the keys
/// of the sinks once more, and their rotation in every layer and step.
///
/// ```
/// use burn::tensor::DType;
/// use kv_direct::policy::{Indexing, StreamingLlm, StreamingLlmConfig};
/// use kv_direct::{cache::ModelShape, exact::KernelShapes};
///
/// let mut shape = ModelShape::new(2, 64, DType::F32, KernelShapes::new(4, 2, 16));
/// let config = StreamingLlmConfig::new(508);
/// assert!(StreamingLlm::new(&shape, config.clone()).is_ok());
///
/// shape.windows[1] = std::num::NonZeroUsize::new(512);
/// assert!(StreamingLlm::new(&shape, config.clone()).is_err(), "a window counts original positions");
/// assert!(StreamingLlm::new(&shape, config.with_indexing(Indexing::Original)).is_ok());
/// ```
#[derive(Debug, Clone)]
pub struct StreamingLlm(Evicting<SinksAndNewest>);

/// What the position of an entry is once others were evicted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Indexing {
    /// Its index in the cache.
    #[default]
    CacheIndex,
    /// Its index in the text.
    Original,
}

/// Options of [`StreamingLlm`].
#[derive(Debug, Clone)]
pub struct StreamingLlmConfig {
    sinks: usize,
    recent: TokenBudget,
    indexing: Indexing,
}

impl StreamingLlmConfig {
    /// Keeps the first 4 entries and the newest `recent`, re-indexed.
    #[must_use]
    pub fn new(recent: impl Into<TokenBudget>) -> Self {
        Self {
            sinks: 4,
            recent: recent.into(),
            indexing: Indexing::default(),
        }
    }

    /// How many of the first entries are kept.
    #[must_use]
    pub const fn with_sinks(mut self, sinks: usize) -> Self {
        self.sinks = sinks;
        self
    }

    /// What the position of an entry is.
    #[must_use]
    pub const fn with_indexing(mut self, indexing: Indexing) -> Self {
        self.indexing = indexing;
        self
    }
}

impl StreamingLlm {
    /// An empty cache for a model of this shape.
    ///
    /// # Errors
    /// [`Budget`](CacheError::Budget) if `recent` is 0, [`Reindexing`](CacheError::Reindexing) for
    /// [`Indexing::CacheIndex`] if a layer has a sliding window, [`NotRotary`](CacheError::NotRotary) if keys are not
    /// [rotated](ModelShape::rotary).
    pub fn new(shape: &ModelShape, config: StreamingLlmConfig) -> Result<Self, CacheError> {
        config.recent.at_least(1)?;
        if config.indexing == Indexing::CacheIndex {
            if !shape.rotary {
                return Err(CacheError::NotRotary);
            }
            let layer = (0..shape.layers()).find(|&layer| shape.slides(layer));
            if let Some(layer) = layer {
                return Err(CacheError::Reindexing { layer });
            }
        }
        Ok(Self(Evicting::new(shape, SinksAndNewest(config))))
    }
}

forward_to_field!(StreamingLlm);

#[derive(Debug, Clone)]
struct SinksAndNewest(StreamingLlmConfig);

impl Policy for SinksAndNewest {
    const NAME: &'static str = "streaming_llm";

    fn options(&self) -> Vec<(&'static str, String)> {
        let indexing = match self.0.indexing {
            Indexing::CacheIndex => "cache_index",
            Indexing::Original => "original",
        };
        vec![
            ("sinks", self.0.sinks.to_string()),
            ("recent", self.0.recent.as_option()),
            ("indexing", indexing.into()),
        ]
    }

    fn evict(&self, entries: &mut Entries<'_>, _: &Attention<'_>, sequence: &Sequence) {
        if let Some(recent) = self.0.recent.of(sequence) {
            let newest = sequence.length.saturating_sub(recent);
            entries.evict_where(|position| position >= self.0.sinks && position < newest);
        }
    }

    fn rotated_sinks(&self) -> Option<usize> {
        match self.0.indexing {
            Indexing::CacheIndex => Some(self.0.sinks),
            Indexing::Original => None,
        }
    }
}
