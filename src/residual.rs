//! `ResidualCheckpoint`: a window of stored entries, and everything older rebuilt from what determines it.
//!
//! The idea is that of KV-Direct (arXiv 2603.19664, Algorithm 1), corrected. The paper stores one residual a token,
//! but rebuilding needs one for every layer. Here a [`Plan`] says what each layer retains of old tokens: keys and
//! values, the residual, or nothing. Token ids, 4 bytes each, are retained wherever a replay starts from them.
//!
//! # Reading order
//! `residual.rs` has the backend in three parts: what is held between steps (`resident`), what the open step will do
//! (`step_plan`), and the old entries on their way through the layers (`replay`). `begin` decides the second from the
//! first. `keys_values` adds the new entries and reads (`replay`, `fill`). `commit` makes what was decided what is
//! held. Beside that, `need` bounds the bytes of a step, `park` has `resume`, and `saved` has states.

mod certify;
mod config;
mod decoder_probe;
mod fill;
pub(crate) mod need;
mod park;
mod plan;
mod prefix;
mod replay;
mod resident;
mod retained;
mod saved;
mod setup;
mod step_plan;

use std::{ops::ControlFlow, sync::Arc};

pub(crate) use self::plan::Flow;
use self::{
    certify::Blocks, replay::Rebuilding, resident::Resident, setup::Setup, step_plan::StepPlan,
};
pub use self::{
    config::ResidualConfig,
    plan::{Plan, Retain},
};
pub use crate::cache::ResumeProgress;
use crate::{
    cache::{
        CacheBackend, CacheError, CachedPositions, Draft, KeysValues, LayerIndex, ModelShape,
        Observation, ReplayAt, Span, State, Step,
    },
    exact::Conformance,
    memory::MemoryReport,
    storage::{LayerStore, StepTracker},
};

/// Stores the newest entries of every layer and rebuilds the older ones in every step, as far as its [`Plan`] does not
/// retain them: the bits of [`FullKv`](crate::FullKv) in a fraction of its memory.
///
/// What is dropped is always a prefix. An entry depends only on the tokens before it, so ids or residuals from the
/// start of the text are enough to rebuild it. At each layer the residual of the old tokens is projected to keys and
/// values. Attention reads them together with the stored entries, and the block carries the residual to the next layer.
/// Only one layer's old entries exist at a time. Bits repeat if the decoder computes with the routines of
/// [`exact`](crate::exact), and if these repeat bits on the device. The [`Conformance`] report says whether both were
/// measured. Otherwise, entries are rebuilt and compared before they are dropped, and stay where a bit differs
/// ([`ResidualConfig::with_certified_eviction`]).
///
/// A sliding-window layer keeps its window, as in every backend. A replay passes through it chunk by chunk, if a
/// full-attention layer comes after it.
///
/// # Cost
/// For `T` tokens of which `E = T - hot` are old, `L` full-attention layers, and elements of `b` bytes. A residual has
/// `d = hidden` elements, the keys of a token at a layer have `kv = kv_heads · head_dim`.
///
/// * Between steps `hot · 2 · kv · L · b` for the hot entries, and what the [`Plan`] retains:
///   * Ids: 4 bytes a token.
///   * Keys and values: `2 · kv · b` bytes an old token and layer.
///   * Residuals: `d · b` bytes a token and layer. A residual is stored from the step of its token on, because it
///     cannot be computed later.
/// * Buffers are whole panels of 32 slots. Those of layers that hold every entry grow by an eighth.
/// * Within a step, in addition, about `E · (d + 2 · kv) · b` and a block of scores,
///   which a smaller [chunk](Plan::with_chunk) shrinks.
/// * A step replays the `E` old tokens. From token ids that is a prefill of them, up to the last full-attention layer;
///   from residuals it is one norm and two projections a layer. While `T <= hot` a step costs what it costs with
///   `FullKv`.
///
/// ```
/// # #[cfg(feature = "model")]
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use kv_direct::cache::{CacheBackend, CacheError};
/// use kv_direct::residual::{Plan, ResidualCheckpoint};
/// # use kv_direct::{burn::tensor::Device, model::{Decoder, DecoderConfig}};
/// # let decoder = Decoder::from_weights(DecoderConfig::new(97, 64, 3, 4, 2), &Device::flex(), |_, shape| {
/// #     Ok::<_, std::convert::Infallible>(vec![0.01; shape.iter().product()])
/// # })?;
///
/// // Two hot tokens in every layer, and token ids for the others.
/// let shape = decoder.shape();
/// let plan = Plan::tokens(&shape).with_hot(2);
/// let mut cache = ResidualCheckpoint::new(&shape, decoder.conformance(), plan)?;
/// decoder.forward(&[3, 1, 4, 1, 5][..], &mut cache)?;
/// assert_eq!(cache.memory().keys_values, 2 * shape.keys_values_per_token());
///
/// // Four query heads share two KV heads: a residual (64) is as wide as keys and values (2 · 32).
/// let refused = ResidualCheckpoint::new(&shape, decoder.conformance(), Plan::residuals(&shape));
/// assert!(matches!(refused, Err(CacheError::Larger { residuals: 768, keys_values: 768 })));
/// # Ok(())
/// # }
/// # #[cfg(not(feature = "model"))]
/// # fn main() {}
/// ```
#[derive(Debug, Clone)]
pub struct ResidualCheckpoint {
    /// What it was built with. Never changes.
    setup: Arc<Setup>,
    tracker: StepTracker,
    /// What is held between steps.
    resident: Resident,
    /// What the open step does with old entries.
    step: StepPlan,
    /// Old entries on their way through the layers, while a step runs.
    rebuilding: Rebuilding,
    /// How many blocks were rebuilt and compared before they were dropped.
    blocks: Blocks,
    peak: Peak,
}

/// The most bytes held within the last step.
#[derive(Debug, Clone, Copy, Default)]
struct Peak {
    /// On top of what is held between steps.
    beside: usize,
    /// In all, while entries were moved before the first layer.
    total: usize,
}

impl Peak {
    /// What was held on top of `total` bytes.
    fn scratch(self, total: usize) -> usize {
        self.beside.max(self.total.saturating_sub(total))
    }
}

impl ResidualCheckpoint {
    /// An empty cache for a model of this shape, on the device of the conformance report.
    ///
    /// The report is measured once for a decoder and shared by its caches: `Decoder::conformance`, or
    /// [`Conformance::probe_decoder`] for a decoder of your own. With a report that does not cover the decoder
    /// ([`Conformance::probe`], [`Conformance::of`]) entries are certified before they are dropped.
    ///
    /// # Errors
    /// * [`ModelShape`](CacheError::ModelShape) for a size of 0.
    /// * [`Conformance`](CacheError::Conformance) if the report is about something else.
    /// * [`NotExact`](CacheError::NotExact) if the device does not repeat bits and certified eviction was declined.
    /// * [`Larger`](CacheError::Larger) if the plan retains residuals and saves nothing.
    /// * [`PlanLayers`](CacheError::PlanLayers), [`PlanWindow`](CacheError::PlanWindow) for a plan of another model.
    /// * [`UnknownSize`](CacheError::UnknownSize) for a byte budget if the shape does not say
    ///   [`intermediate`](ModelShape::intermediate).
    pub fn new(
        shape: &ModelShape,
        conformance: &Conformance,
        config: impl Into<ResidualConfig>,
    ) -> Result<Self, CacheError> {
        let setup = Setup::new(shape, conformance, config.into())?;
        Ok(Self::empty(&Arc::new(setup)))
    }

    fn empty(setup: &Arc<Setup>) -> Self {
        Self {
            tracker: StepTracker::new(&setup.shape, Vec::new()),
            resident: Resident::new(setup),
            step: StepPlan::default(),
            rebuilding: Rebuilding::default(),
            blocks: Blocks::default(),
            peak: Peak::default(),
            setup: Arc::clone(setup),
        }
    }
}

impl CacheBackend for ResidualCheckpoint {
    fn begin(&mut self, step: &Step) -> Result<(), CacheError> {
        // Everything that can be refused is refused here; nothing has changed yet.
        self.tracker.can_begin(step)?;
        self.setup.can_certify(step.starts().len())?;
        // The layers that may hold every entry after this step; none without a byte budget.
        let complete = self.affordable_after(step)?;

        self.tracker.begin(step)?;
        self.peak = Peak::default();
        // Sliding windows move on. Layers that can no longer hold every entry drop the old ones, so that their room
        // is free while the step runs.
        let moved = self.resident.slide(&self.tracker);
        let made_room = self.resident.make_room(&complete, self.tracker.lengths());
        self.peak.total = moved.max(made_room);

        let after = self.tracker.lengths_after();
        self.step = StepPlan::new(&self.setup, &self.resident, &after, complete);
        self.resident.limit(&self.step.complete);
        self.resident.add_tokens(step.tokens());
        Ok(())
    }

    fn keys_values(&mut self, layer: LayerIndex, span: Span<'_>) -> Result<KeysValues, CacheError> {
        self.tracker.enter(layer, &span, Observation::Nothing)?;
        let layer = layer.index();
        self.resident
            .add_residual(layer, span.residual, span.positions);
        let new = Some((span.projection, span.positions));
        let read = self.read(layer, new, span.replay);
        if read.is_err() {
            self.tracker.fail();
        }
        read.map(|keys_values| keys_values.expect("the entries of the step are among them"))
    }

    fn commit(&mut self) -> Result<(), CacheError> {
        self.tracker.commit()?;
        self.finish();
        Ok(())
    }

    fn lengths(&self) -> &[usize] {
        self.tracker.lengths()
    }

    /// Every position within the layer's window. What is not stored is rebuilt.
    fn cached(&self, layer: LayerIndex) -> CachedPositions {
        let shape = &self.setup.shape;
        let lengths = match layer.index() < shape.layers() {
            true => self.lengths(),
            false => &[],
        };
        let window = shape.windows.get(layer.index()).copied().flatten();
        let first = |length: usize| window.map_or(0, |w| (length + 1).saturating_sub(w.get()));
        let all = lengths.iter().map(|&n| vec![(first(n)..n).collect()]);
        shape.readable(layer, lengths, all.collect())
    }

    fn memory(&self) -> MemoryReport {
        let mut report = self.resident.memory(self.lengths());
        report.scratch_peak = self.peak.scratch(report.total());
        (report.blocks_certified, report.blocks_kept) = self.blocks.counted();
        report
    }

    /// As [`CacheBackend::truncate`]. Every length can be reached. Where a sliding window has freed entries that are
    /// needed there, the next step rebuilds them; not so with certified eviction.
    fn truncate(&mut self, to: &[usize]) -> Result<(), CacheError> {
        self.tracker.can_truncate(to)?;
        if to.iter().all(|&to| to == 0) {
            self.clear();
            return Ok(());
        }
        if self.setup.certified && !self.tracker.is_draft() {
            // What a window has freed was not compared with anything.
            LayerStore::can_truncate(&self.resident.layers, self.lengths(), to, |_, _| 0)?;
        }
        self.shorten(to);
        Ok(())
    }

    fn begin_draft(&mut self) -> Result<(), CacheError> {
        self.tracker.begin_draft()
    }

    fn end_draft(&mut self, draft: Draft) -> Result<(), CacheError> {
        match (draft, self.tracker.end_draft()?) {
            (Draft::Discard, None) => self.clear(),
            (Draft::Discard, Some(start)) => self.shorten(&start),
            (Draft::Accept, _) => self.settle(),
        }
        Ok(())
    }

    /// As [`CacheBackend::select_sequences`]. More sequences than before may be refused with
    /// [`StepBytes`](CacheError::StepBytes). With certified eviction, more than one is refused with
    /// [`Sequences`](CacheError::Sequences).
    fn select_sequences(&mut self, sequences: &[usize]) -> Result<(), CacheError> {
        self.tracker.can_select(sequences)?;
        self.setup.can_certify(sequences.len())?;
        if sequences.is_empty() {
            self.clear();
            return Ok(());
        }
        let held = self.lengths().len();
        if sequences.iter().copied().eq(0..held) {
            return Ok(());
        }
        if sequences.len() > held {
            let lengths: Vec<usize> = sequences.iter().map(|&i| self.lengths()[i]).collect();
            let complete = self.affordable_for(&lengths)?;
            self.resident.make_room(&complete, self.tracker.lengths());
        }
        self.tracker.select(sequences)?;
        self.resident.select(sequences, self.tracker.lengths());
        self.peak = Peak::default();
        Ok(())
    }

    /// Drops everything that the plan does not retain, of all tokens, until the next step or
    /// [`resume`](Self::resume). With [`Plan::tokens`] nothing but ids is left.
    fn park(&mut self) -> Result<(), CacheError> {
        self.tracker.check_idle()?;
        self.setup
            .refuse_certified("be parked: it certifies entries before they are dropped")?;
        self.resident.drop_all(self.tracker.lengths());
        self.resident.tokens.shrink();
        self.peak = Peak::default();
        Ok(())
    }

    fn resume(
        &mut self,
        at: &ReplayAt<'_>,
        progress: &mut (dyn FnMut(ResumeProgress) -> ControlFlow<()> + Send),
    ) -> Result<ControlFlow<()>, CacheError> {
        Self::resume(self, at, progress)
    }

    fn state(&self) -> Result<State, CacheError> {
        self.tracker.check_no_draft()?;
        self.setup
            .refuse_certified("return its state: certificates are of this process")?;
        Ok(self.written())
    }

    fn set_state(&mut self, state: &State) -> Result<(), CacheError> {
        self.setup
            .refuse_certified("continue from a state: certificates are of one process")?;
        *self = self.restored(state)?;
        Ok(())
    }

    fn join(&mut self, other: &State) -> Result<(), CacheError> {
        let mut joined = self.state()?;
        self.join_written(&mut joined, other)?;
        let mut cache = self.restored(&joined)?;
        let lengths = cache.lengths().to_vec();
        let complete = cache.affordable_for(&lengths)?;
        cache.resident.make_room(&complete, &lengths);
        *self = cache;
        Ok(())
    }

    fn clear(&mut self) {
        *self = Self::empty(&self.setup);
    }

    fn fork(&self) -> Box<dyn CacheBackend> {
        Box::new(self.clone())
    }
}

impl ResidualCheckpoint {
    /// Shortens every sequence to its length in `to`, which was checked.
    fn shorten(&mut self, to: &[usize]) {
        self.resident.shorten(self.tracker.lengths(), to);
        self.tracker.truncate(to);
        self.settle();
    }

    /// Frees buffers that are no longer needed.
    fn settle(&mut self) {
        let total = self
            .resident
            .settle(self.tracker.is_draft(), self.tracker.lengths());
        self.peak = Peak { beside: 0, total };
    }

    /// Ends a step or a resume: what it decided is now what is held.
    fn finish(&mut self) {
        self.rebuilding = Rebuilding::default();
        let step = std::mem::take(&mut self.step);
        self.resident.finish(step.complete, step.first_held);
    }
}
