//! A store for every layer, and one tracker for all.

use super::{layer::LayerStore, steps::StepTracker};
use crate::{
    cache::{
        CacheBackend, CacheError, CachedPositions, Draft, KeysValues, LayerIndex, ModelShape,
        Observation, Observed, Span, State, Step, wrong,
    },
    memory::MemoryReport,
};

/// The keys and values of every layer, one [`StepTracker`], and the bytes of all.
///
/// It is a [`CacheBackend`] that evicts nothing by itself: a backend around it forwards to it and calls
/// [`retain`](Self::retain) when it evicts. All KV heads of a layer hold the same entries. Sliding-window layers keep
/// what their window needs. It requests no reports. A backend that needs reports is a
/// [`Policy`](crate::policy::Policy).
///
/// In a full-attention layer a new entry takes the lowest free slot. So until something is evicted, the slot of an
/// entry is its position. Each sequence has buffers of its own. Appends happen in place, unless these must grow; they
/// grow by an eighth, in panels of 32 slots.
///
/// ```
/// use burn::tensor::DType;
/// use kv_direct::cache::{CacheBackend, LayerIndex, ModelShape};
/// use kv_direct::{exact::KernelShapes, storage::LayerStores};
///
/// let shape = ModelShape::new(2, 64, DType::F32, KernelShapes::new(4, 2, 16));
/// let mut stores = LayerStores::new(&shape);
/// stores.retain(|_sequence, position| position % 2 == 0);
/// assert_eq!(stores.memory().total(), 0);
/// assert_eq!(stores.cached(LayerIndex::new(0)).sequences(), 0);
/// ```
#[derive(Debug, Clone)]
pub struct LayerStores {
    pub(crate) tracker: StepTracker,
    pub(crate) layers: Vec<LayerStore>,
    /// The most bytes held at any time of the last step.
    peak: usize,
}

impl LayerStores {
    /// Empty stores for a model of this shape. All KV heads of a layer hold the same entries.
    #[must_use]
    pub fn new(shape: &ModelShape) -> Self {
        Self::with_heads(shape, false)
    }

    /// As [`new`](Self::new). With `per_head`, each KV head of a full-attention layer may hold different entries.
    pub(crate) fn with_heads(shape: &ModelShape, per_head: bool) -> Self {
        let layers = shape.windows.iter().map(|&window| match window {
            None if per_head => LayerStore::per_head(shape.kernels.kv_heads),
            window => LayerStore::new(window),
        });
        Self {
            tracker: StepTracker::new(shape, Vec::new()),
            layers: layers.collect(),
            peak: 0,
        }
    }

    pub(crate) const fn tracker(&self) -> &StepTracker {
        &self.tracker
    }

    pub(crate) const fn shape(&self) -> &ModelShape {
        self.tracker.shape()
    }

    /// Stores the span in the layer that is due. `wanted` is what attention must report of it.
    pub(crate) fn store(
        &mut self,
        layer: LayerIndex,
        span: &Span<'_>,
        wanted: Observation,
    ) -> Result<(), CacheError> {
        self.tracker.enter(layer, span, wanted)?;
        let moved = self.layers[layer.index()].append(span.projection, span.positions);
        self.hold(moved);
        Ok(())
    }

    /// Checks a report of attention about the layer that was just stored.
    pub(crate) fn check_report(
        &mut self,
        layer: LayerIndex,
        observed: &Observed,
    ) -> Result<(), CacheError> {
        let store = self.layers.get(layer.index());
        let slots = store.map_or(0, LayerStore::capacity);
        self.tracker.observe(layer, observed, slots)
    }

    /// In full-attention layers, evicts the entries for which `keep(sequence, position)` is false, and frees the
    /// buffers' slack.
    ///
    /// Call it after [`commit`](CacheBackend::commit), outside of drafts. Attention must still read the entries of an
    /// open step, and a draft must be reversible.
    ///
    /// # Cost
    /// One pass over the slots, and a copy of the sequences of which a panel becomes free.
    pub fn retain(&mut self, keep: impl Fn(usize, usize) -> bool) {
        for layer in 0..self.layers.len() {
            if !self.shape().slides(layer) {
                self.evict(layer, 0, |store| store.retain(&keep));
            }
        }
    }

    /// Lets `evict` free slots of a layer, then frees the slack of its buffers. `beside` bytes are held meanwhile
    /// beside the entries.
    pub(crate) fn evict(
        &mut self,
        layer: usize,
        beside: usize,
        evict: impl FnOnce(&mut LayerStore),
    ) {
        let used = self.layers[layer].bytes();
        evict(&mut self.layers[layer]);
        if used == self.layers[layer].bytes() {
            self.hold(beside);
            return;
        }
        // Freed slots are held until the buffers shrink.
        let held = self.memory().total() + beside;
        let moved = self.layers[layer].shrink();
        self.peak = self.peak.max(held + moved);
    }

    /// Checks a truncation. `shortest(sequence, length)` is the shortest length that is possible after what was evicted
    /// from full-attention layers; 0 if nothing was.
    pub(crate) fn can_truncate(
        &self,
        to: &[usize],
        shortest: impl Fn(usize, usize) -> usize,
    ) -> Result<(), CacheError> {
        self.tracker.can_truncate(to)?;
        if self.tracker.is_draft() {
            return Ok(());
        }
        LayerStore::can_truncate(&self.layers, self.tracker.lengths(), to, shortest)
    }

    /// Whether entries of a sequence are missing in a full-attention layer.
    pub(crate) fn has_evicted(&self, sequence: usize) -> bool {
        let length = self.tracker.lengths().get(sequence).copied().unwrap_or(0);
        let mut full = self.layers.iter().filter(|store| !store.slides());
        full.any(|store| !store.holds(sequence, length))
    }

    /// Carries out a truncation that was checked.
    pub(crate) fn shorten(&mut self, to: &[usize]) {
        for store in &mut self.layers {
            store.truncate(self.tracker.lengths(), to);
        }
        self.tracker.truncate(to);
        self.peak = 0;
        // Within a draft slots stay in place: observed probabilities are stored by slot.
        if !self.tracker.is_draft() {
            self.settle();
        }
    }

    /// Frees buffers of which less than half is needed.
    pub(crate) fn settle(&mut self) {
        for layer in 0..self.layers.len() {
            let held = self.memory().total();
            let moved = self.layers[layer].settle();
            self.peak = self.peak.max(held + moved);
        }
    }

    /// Counts bytes that are held now beside the entries. Entries alone are in every report, so 0 costs nothing.
    pub(crate) fn hold(&mut self, beside: usize) {
        if beside == 0 {
            return;
        }
        self.peak = self.peak.max(self.memory().total() + beside);
    }

    /// Adds lengths and entries to a state.
    pub(crate) fn write(&self, state: &mut State) {
        state.insert_positions("lengths", self.tracker.lengths().iter().copied());
        for (layer, store) in self.layers.iter().enumerate() {
            store.write(layer, state);
        }
    }

    /// The same kind of stores with lengths and entries of a state. Nothing in the state is trusted.
    pub(crate) fn restored(&self, state: &State) -> Result<Self, CacheError> {
        let lengths = state.lengths()?;
        let layers = self.layers.iter().enumerate();
        let layers = layers.map(|(layer, store)| {
            let store = store.restored(layer, &lengths, self.shape(), state)?;
            match store.holds_some(&lengths) {
                true => Ok(store),
                false => Err(wrong(
                    &format!("layer.{layer}.positions"),
                    "no entry is held",
                )),
            }
        });
        Ok(Self {
            layers: layers.collect::<Result<_, _>>()?,
            tracker: StepTracker::new(self.shape(), lengths),
            peak: 0,
        })
    }

    /// Checks that no entry is missing in a full-attention layer.
    pub(crate) fn check_complete(&self) -> Result<(), CacheError> {
        let lengths = self.tracker.lengths();
        let missing = |(layer, store): &(usize, &LayerStore)| {
            !self.shape().slides(*layer) && !store.holds_newest(lengths, |i| lengths[i])
        };
        match self.layers.iter().enumerate().find(missing) {
            Some((layer, _)) => Err(wrong(
                &format!("layer.{layer}.positions"),
                "an entry is missing",
            )),
            None => Ok(()),
        }
    }

    /// A state of this kind without entries.
    fn kind(&self) -> State {
        State::new("layer_stores", [], self.shape())
    }
}

impl CacheBackend for LayerStores {
    fn begin(&mut self, step: &Step) -> Result<(), CacheError> {
        self.tracker.begin(step)?;
        self.peak = 0;
        for layer in 0..self.layers.len() {
            let moved = self.layers[layer].slide(&self.tracker.anchor());
            self.hold(moved);
        }
        Ok(())
    }

    fn keys_values(&mut self, layer: LayerIndex, span: Span<'_>) -> Result<KeysValues, CacheError> {
        self.store(layer, &span, Observation::Nothing)?;
        self.layers[layer.index()].read()
    }

    fn observe(&mut self, layer: LayerIndex, observed: Observed) -> Result<(), CacheError> {
        self.check_report(layer, &observed)
    }

    fn commit(&mut self) -> Result<(), CacheError> {
        self.tracker.commit()
    }

    fn lengths(&self) -> &[usize] {
        self.tracker.lengths()
    }

    fn cached(&self, layer: LayerIndex) -> CachedPositions {
        let store = self.layers.get(layer.index());
        let held = store.map_or_else(Vec::new, LayerStore::cached);
        self.shape().readable(layer, self.tracker.lengths(), held)
    }

    fn memory(&self) -> MemoryReport {
        let mut report = LayerStore::report(&self.layers);
        report.scratch_peak = self.peak.saturating_sub(report.total());
        report
    }

    /// As [`CacheBackend::truncate`]. A sequence of which entries were evicted keeps its length, or becomes empty.
    fn truncate(&mut self, to: &[usize]) -> Result<(), CacheError> {
        let shortest = |i: usize, length: usize| if self.has_evicted(i) { length } else { 0 };
        self.can_truncate(to, shortest)?;
        if to.iter().all(|&to| to == 0) {
            self.clear();
        } else {
            self.shorten(to);
        }
        Ok(())
    }

    fn begin_draft(&mut self) -> Result<(), CacheError> {
        self.tracker.begin_draft()
    }

    fn end_draft(&mut self, draft: Draft) -> Result<(), CacheError> {
        match (draft, self.tracker.end_draft()?) {
            (Draft::Accept, _) => self.settle(),
            (Draft::Discard, None) => self.clear(),
            (Draft::Discard, Some(start)) => self.shorten(&start),
        }
        Ok(())
    }

    fn select_sequences(&mut self, sequences: &[usize]) -> Result<(), CacheError> {
        self.tracker.can_select(sequences)?;
        if sequences.is_empty() {
            self.clear();
        } else if !sequences.iter().copied().eq(0..self.lengths().len()) {
            let layers = self.layers.iter_mut();
            layers.for_each(|store| store.select(sequences));
            self.tracker.select(sequences)?;
            self.peak = 0;
        }
        Ok(())
    }

    fn state(&self) -> Result<State, CacheError> {
        self.tracker.check_no_draft()?;
        let mut state = self.kind();
        self.write(&mut state);
        Ok(state)
    }

    fn set_state(&mut self, state: &State) -> Result<(), CacheError> {
        state.check(&self.kind())?;
        *self = self.restored(state)?;
        Ok(())
    }

    fn clear(&mut self) {
        self.tracker = StepTracker::new(self.shape(), Vec::new());
        let layers = self.layers.iter_mut();
        layers.for_each(|store| *store = store.emptied());
        self.peak = 0;
    }

    fn fork(&self) -> Box<dyn CacheBackend> {
        Box::new(self.clone())
    }
}
