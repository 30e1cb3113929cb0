//! `StreamingLlm`: the first rows and the newest (Xiao et al., arXiv 2309.17453, section 3).

use burn::tensor::Tensor;

use crate::{
    cache::{
        Budget, CacheError, Entry, KeysValues, ModelShape, Span, State,
        evicting::{Evicting, Policy, Turn},
        forward::backend,
        keep::{by_layer_and_row, select},
        layered::Layered,
        rows::Rows,
        state::wrong,
    },
    memory::MemoryReport,
    positions::Positions,
};

/// Keeps the first `sinks` rows and the newest `recent` between steps, in every layer that shows all keys.
///
/// With [`Indexing::CacheIndex`] a row's position is its place in the cache, as in the paper: however
/// long the text, sinks and newest rows stay as near to each other as they stand in the cache. Rotary
/// attention knows distances alone, so it is the sinks that are turned, forward by the number of rows
/// dropped, and each time from the key as it came in. [`Indexing::Original`] leaves them where they were.
/// Either way a text ends where the decoder's positions do.
///
/// A step sees the rows held and its own, so once something was dropped the result depends on how tokens
/// were split into calls, and a truncation is refused with [`Irreversible`](CacheError::Irreversible),
/// except to nothing. Until then the bits are those of [`FullKv`](crate::cache::FullKv).
///
/// # Cost
/// `sinks + recent` rows, in whole pieces of 512 slots that also hold the rows of the step; with
/// `CacheIndex` the keys of the sinks once more, and their rotation in every layer and step.
///
/// ```
/// use burn::tensor::DType;
/// use kv_direct::cache::{Indexing, ModelShape, StreamingLlm, StreamingLlmConfig};
/// use kv_direct::exact::conformance::KernelShapes;
///
/// let mut shape = ModelShape::new(2, 64, DType::F32, KernelShapes::new(4, 2, 16));
/// let config = StreamingLlmConfig::new(508);
/// assert!(StreamingLlm::new(&shape, config.clone()).is_ok());
///
/// shape.windows[1] = std::num::NonZeroUsize::new(512);
/// assert!(StreamingLlm::new(&shape, config.clone()).is_err(), "a window counts original positions");
/// assert!(StreamingLlm::new(&shape, config.with_indexing(Indexing::Original)).is_ok());
/// ```
#[derive(Debug)]
pub struct StreamingLlm(Evicting<Sinks>);

/// What the position of a row is once others were dropped.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Indexing {
    /// Its place in the cache.
    #[default]
    CacheIndex,
    /// Its place in the text.
    Original,
}

/// How a [`StreamingLlm`] is built.
#[derive(Debug, Clone)]
pub struct StreamingLlmConfig {
    sinks: usize,
    recent: Budget,
    indexing: Indexing,
}

impl StreamingLlmConfig {
    /// The first 4 rows and the newest `recent`, re-indexed.
    #[must_use]
    pub fn new(recent: impl Into<Budget>) -> Self {
        Self {
            sinks: 4,
            recent: recent.into(),
            indexing: Indexing::default(),
        }
    }

    /// How many of the first rows are kept.
    #[must_use]
    pub const fn with_sinks(mut self, sinks: usize) -> Self {
        self.sinks = sinks;
        self
    }

    /// What the position of a row is.
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
    /// [`Indexing::CacheIndex`] where a layer has a window.
    pub fn new(shape: &ModelShape, config: StreamingLlmConfig) -> Result<Self, CacheError> {
        config.recent.holds(1)?;
        if config.indexing == Indexing::CacheIndex {
            let layer = (0..shape.layers()).find(|&layer| shape.slides(layer));
            if let Some(layer) = layer {
                return Err(CacheError::Reindexing { layer });
            }
        }
        let keys = vec![Vec::new(); shape.layers()];
        Ok(Self(Evicting::new(shape, Sinks { config, keys })))
    }
}

backend!(StreamingLlm);

#[derive(Clone)]
struct Sinks {
    config: StreamingLlmConfig,
    /// By layer and batch row: the keys of the sinks as they came in, `[1, kv_heads, sinks, head_dim]`,
    /// once they had to be turned.
    keys: Vec<Vec<Option<Tensor<4>>>>,
}

impl std::fmt::Debug for Sinks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.config.fmt(f)
    }
}

impl Sinks {
    /// The entry of a state for a layer and batch row.
    fn name(layer: usize, row: usize) -> String {
        format!("layer.{layer}.sinks.{row}")
    }
}

impl Policy for Sinks {
    const NAME: &'static str = "streaming_llm";
    const BY_POSITION: bool = true;

    fn options(&self) -> String {
        let StreamingLlmConfig {
            sinks,
            recent,
            indexing,
        } = &self.config;
        let indexing = match indexing {
            Indexing::CacheIndex => "the cache",
            Indexing::Original => "the text",
        };
        format!("sinks {sinks}, recent {recent}, positions in {indexing}")
    }

    fn stays(&self, position: usize, length: usize, prompt: Option<usize>) -> bool {
        let recent = self.config.recent.of(prompt).unwrap_or(length);
        position < self.config.sinks || position >= length.saturating_sub(recent)
    }

    fn read(
        &mut self,
        layer: usize,
        rows: &mut Rows,
        span: &Span<'_>,
        turn: &Turn,
    ) -> Result<KeysValues, CacheError> {
        let sinks = self.config.sinks;
        if self.config.indexing == Indexing::CacheIndex && sinks > 0 {
            let keys = &mut self.keys[layer];
            keys.resize(turn.after.len(), None);
            for (row, keys) in keys.iter_mut().enumerate() {
                let dropped = turn.after[row] - rows.used(row);
                if dropped == 0 {
                    continue;
                }
                let keys = keys.get_or_insert_with(|| rows.first_keys(row, sinks));
                let [from, to] =
                    [0, dropped].map(|start| Positions::contiguous(&[start], &[sinks]));
                rows.set_first_keys(row, span.replay.rotate(keys.clone(), &from, &to)?);
            }
        }
        rows.read()
    }

    fn truncate(&mut self, _: &[usize], to: &[usize]) {
        for keys in &mut self.keys {
            for (keys, _) in keys.iter_mut().zip(to).filter(|(_, to)| **to == 0) {
                *keys = None;
            }
        }
    }

    fn select_rows(&mut self, rows: &[usize]) {
        self.keys.iter_mut().for_each(|keys| select(keys, rows));
    }

    fn write(&self, state: &mut State) {
        for (layer, keys) in self.keys.iter().enumerate() {
            for (row, keys) in keys.iter().enumerate() {
                if let Some(keys) = keys {
                    state.insert(Self::name(layer, row), Entry::Tensor(keys.clone()));
                }
            }
        }
    }

    fn restored(&self, state: &State, held: &Layered) -> Result<Self, CacheError> {
        let (sinks, kernels) = (self.config.sinks, &held.shape.kernels);
        let lengths = held.progress.lengths();
        let dims = [1, kernels.kv_heads, sinks, kernels.head_dim];
        let turns = self.config.indexing == Indexing::CacheIndex && sinks > 0;
        let read = |layer: usize, row: usize| {
            let (name, rows) = (Self::name(layer, row), &held.layers[layer]);
            if turns && rows.used(row) < lengths[row] && !rows.starts_with(row, sinks) {
                return Err(wrong(
                    &name,
                    "rows were dropped, but the first ones are not there",
                ));
            }
            let keys = || state.tensor(&name, dims, held.shape.dtype);
            state.contains(&name).then(keys).transpose()
        };
        Ok(Self {
            config: self.config.clone(),
            keys: by_layer_and_row(self.keys.len(), lengths.len(), read)?,
        })
    }

    fn report(&self, report: &mut MemoryReport) {
        let held = self.keys.iter().flatten().flatten();
        let bytes = |keys: &Tensor<4>| keys.dims().iter().product::<usize>() * keys.dtype().size();
        report.reserved += held.map(bytes).sum::<usize>();
    }

    fn clear(&mut self) {
        self.keys.iter_mut().for_each(Vec::clear);
    }
}
