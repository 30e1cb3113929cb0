//! `ResidualCheckpoint`: a window of exact rows, and everything older rebuilt from what determines
//! it (KV-Direct, arXiv 2603.19664, Algorithm 1, corrected: the paper stores one residual a token
//! but needs one per layer; here the token id is enough, or a residual per layer is kept).

mod certify;
mod config;
mod fill;
mod need;
mod park;
mod plan;
mod planner;
mod prefix;
mod price;
mod rebuild;
mod speeds;
mod stored;
mod turn;
mod undo;

use burn::tensor::Device;

use self::{
    certify::Certified,
    prefix::{Prefix, Residuals},
    turn::{Beside, Turn},
};
pub use self::{
    config::{Floor, ResidualConfig},
    park::Resuming,
    plan::{Old, Plan},
    planner::Planner,
    price::Price,
    speeds::{ChunkSpeed, Speeds},
};
use crate::{
    cache::{
        CacheBackend, CacheError, Kept, KeysValues, LayerIndex, ModelShape, Span, State, Step,
        TokenIds, progress::Progress, rows::Rows,
    },
    exact::conformance::{Conformance, Subject},
    memory::MemoryReport,
};

/// Keeps the newest rows of every layer and rebuilds all older ones at every step: the bits of
/// [`FullKv`](crate::cache::FullKv) from a fraction of its memory.
///
/// What is dropped is always a prefix, so what is left determines it: at each layer the old rows'
/// residual is projected to keys and values, attention reads them in front of the exact rows, and
/// the block carries the residual to the next layer. One layer's old rows live at a time. Bits repeat
/// because every row goes through the routines of [`exact`](crate::exact); the constructor measures
/// that they do. Where they do not, rows are rebuilt and compared before they leave, and stay where a bit
/// differs ([`ResidualConfig::with_certified_eviction`]).
///
/// What is kept is a [`Plan`]: one of the two [`Floor`]s, one of your own, or the one a [`Planner`] found for a
/// budget of bytes, which [`ResidualConfig::with_budget`] then holds.
///
/// A layer with a window keeps the rows of its window, as in every backend, and nothing older: what no
/// later query sees is dropped without loss. A replay passes through it all the same, chunk by chunk
/// under its own mask and rotation, if a layer that shows all keys comes behind it. Where such a layer comes
/// first, token ids are kept beside residuals too: nothing else leads to its rows.
///
/// # Cost
/// For `T` tokens, `E = T - hot` of them old, `L` layers that show all keys, in bytes of element `b`:
/// * between steps with [`Floor::Tokens`] `hot · 2 · kv · L · b + 4 · T`; with [`Floor::Residuals`]
///   `hot · 2 · kv · L · b + T · d · L · b` (a row's residual is kept from the moment it comes in: it
///   cannot be had later); with a [`Plan`] what that says layer by layer, `2 · kv · b`, `d · b` or nothing a
///   token. `hot` rows are reserved at once when they are first full; rows that are all kept, and
///   those of a window and its last call, stand in whole pieces of 512.
/// * within a step on top of that about `E · (d + 2 · kv) · b` and a block of
///   [scores](crate::exact::attention_scratch), fewer with a [smaller chunk](Plan::with_chunk).
/// * a step replays the `E` old rows: a prefill of them with `Tokens`, up to the last layer that shows
///   all keys; one norm and one projection per such layer with `Residuals`. While `T <= hot` it costs
///   what `FullKv` costs, save that buffers that are no whole pieces of 512 rows are copied into padded
///   ones.
///
/// ```
/// use burn::tensor::{DType, Device};
/// use kv_direct::cache::{CacheBackend, CacheError, Floor, ModelShape, ResidualCheckpoint, ResidualConfig};
/// use kv_direct::exact::conformance::KernelShapes;
///
/// let device = Device::flex();
/// // Four query heads share two KV heads: a residual (64) is as wide as keys and values (2 · 32).
/// let shape = ModelShape::new(3, 64, DType::F32, KernelShapes::new(4, 2, 16));
/// let cache = ResidualCheckpoint::new(&shape, &device, ResidualConfig::new(32))?;
/// assert_eq!(cache.position(0), 0);
/// let residuals = ResidualConfig::new(32).with_floor(Floor::Residuals);
/// assert!(matches!(
///     ResidualCheckpoint::new(&shape, &device, residuals),
///     Err(CacheError::Larger { residuals: 768, keys_values: 768 })
/// ));
/// # Ok::<(), CacheError>(())
/// ```
#[derive(Debug, Clone)]
pub struct ResidualCheckpoint {
    shape: ModelShape,
    device: Device,
    plan: Plan,
    budget: Option<usize>,
    certified: bool,
    progress: Progress,
    /// Exact rows of every layer: the newest of every batch row, those of the layer's window, or all where the
    /// plan keeps them.
    layers: Vec<Rows>,
    /// Layers that hold every row for now, though the plan does not ask for it.
    whole: Vec<bool>,
    /// Of every batch row the first tokens, whose rows the other layers that the plan rebuilds do not hold.
    dropped: Vec<usize>,
    /// All rows that can be rebuilt were let go of, those of windows too: the next step rebuilds them.
    emptied: bool,
    /// Ids of all tokens, those of the open step last; kept where the plan replays them.
    tokens: TokenIds,
    /// Residuals of all tokens by layer; kept where the plan says so.
    residuals: Vec<Residuals>,
    /// What the open step does with old rows.
    turn: Turn,
    /// Old rows on their way through the layers.
    replaying: Prefix,
    /// All rows of the layer that is due, while a step runs: one pair of buffers for all layers.
    answer_rows: Rows,
    /// Blocks that were rebuilt and compared before they left.
    blocks: Certified,
    /// The most bytes held on top of the rest within the last step, and the most of all while rows moved at its
    /// start.
    scratch_peak: usize,
    sliding_peak: usize,
}

impl ResidualCheckpoint {
    /// An empty cache for a model of this shape on `device`, after measuring that rebuilt rows are
    /// exact there ([`Conformance::probe`]; share its report between caches by
    /// [`ResidualConfig::with_conformance`]).
    ///
    /// # Errors
    /// [`ModelShape`](CacheError::ModelShape) for sizes of zero,
    /// [`NotExact`](CacheError::NotExact) where the probe fails and rows are not to be
    /// [certified](ResidualConfig::with_certified_eviction),
    /// [`Conformance`](CacheError::Conformance) if the report handed over is about something else,
    /// [`Larger`](CacheError::Larger) where residuals would save nothing,
    /// [`PlanLayers`](CacheError::PlanLayers) and [`PlanWindow`](CacheError::PlanWindow) for a plan of another model.
    pub fn new(
        shape: &ModelShape,
        device: &Device,
        config: ResidualConfig,
    ) -> Result<Self, CacheError> {
        shape.validate()?;
        let mut plan = config.layout.plan(shape).checked(shape)?;
        let (residuals, keys_values) = (
            plan.bytes_per_old_token(shape),
            shape.keys_values_per_old_token(),
        );
        if plan.has_residuals() && residuals >= keys_values && !config.even_if_larger {
            return Err(CacheError::Larger {
                residuals,
                keys_values,
            });
        }
        let expected = Subject::new(&shape.kernels, device, shape.dtype);
        let conformance = config
            .conformance
            .unwrap_or_else(|| Conformance::probe(&shape.kernels, device, shape.dtype));
        if *conformance.subject() != expected {
            let found = Box::new(conformance.subject().clone());
            return Err(CacheError::Conformance {
                expected: Box::new(expected),
                found,
            });
        }
        let certified = config.certified.unwrap_or(!conformance.is_exact());
        if !conformance.is_exact() && !certified {
            return Err(CacheError::NotExact(Box::new(conformance)));
        }
        if certified {
            plan = plan.canonical();
        }
        Ok(Self::empty(shape, device, plan, config.budget, certified))
    }

    fn empty(
        shape: &ModelShape,
        device: &Device,
        plan: Plan,
        budget: Option<usize>,
        certified: bool,
    ) -> Self {
        let layers = (0..shape.layers()).map(|layer| match plan.rebuilds(layer) {
            true => Rows::limited(None, plan.limit(certified)),
            false => Rows::new(shape.windows[layer]),
        });
        Self {
            shape: shape.clone(),
            device: device.clone(),
            budget,
            certified,
            progress: Progress::default(),
            layers: layers.collect(),
            whole: vec![false; shape.layers()],
            dropped: Vec::new(),
            emptied: false,
            tokens: TokenIds::default(),
            residuals: vec![Residuals::new(plan.chunk()); shape.layers()],
            turn: Turn::default(),
            replaying: Prefix::default(),
            answer_rows: Rows::by_position(),
            blocks: Certified::default(),
            scratch_peak: 0,
            sliding_peak: 0,
            plan,
        }
    }
}

impl CacheBackend for ResidualCheckpoint {
    fn begin(&mut self, step: &Step) -> Result<(), CacheError> {
        self.progress.can_begin(step)?;
        self.can_certify(step.starts().len())?;
        let whole = self.affords(step)?;
        self.progress.begin(step)?;
        (self.scratch_peak, self.sliding_peak) = (0, 0);
        for layer in 0..self.layers.len() {
            let moved = self.layers[layer].slide(&self.progress.anchor());
            if moved > 0 {
                self.sliding_peak = self.sliding_peak.max(moved + self.memory().total());
            }
        }
        self.take_turn(whole);
        if self.plan.keeps_ids() {
            self.tokens.extend(step.tokens());
        }
        Ok(())
    }

    fn keys_values(&mut self, layer: LayerIndex, span: Span<'_>) -> Result<KeysValues, CacheError> {
        self.progress.layer(layer, &span, &self.shape)?;
        let layer = layer.index();
        if self.plan.old(layer) == Old::Residual {
            self.residuals[layer].append(span.residual, span.positions);
        }
        let new = Some((span.projection, span.positions));
        let answer = self.answer(layer, new, span.replay);
        if answer.is_err() {
            self.progress.fail();
        }
        answer.map(|rows| rows.expect("the rows of the step are among them"))
    }

    fn commit(&mut self) -> Result<(), CacheError> {
        self.progress.commit(&self.shape)?;
        self.replaying = Prefix::default();
        self.answer_rows = Rows::by_position();
        self.end_turn();
        Ok(())
    }

    fn position(&self, row: usize) -> usize {
        self.progress.length(row)
    }

    /// Every position that the layer's window shows: what is not held is rebuilt.
    fn kept(&self, layer: LayerIndex) -> Kept {
        let lengths = if layer.index() < self.shape.layers() {
            self.progress.lengths()
        } else {
            &[]
        };
        let window = self.shape.windows.get(layer.index()).copied().flatten();
        let first = |length: usize| window.map_or(0, |w| (length + 1).saturating_sub(w.get()));
        let all = lengths
            .iter()
            .map(|&length| vec![(first(length)..length).collect()])
            .collect();
        self.shape.readable(layer, lengths, all)
    }

    fn memory(&self) -> MemoryReport {
        let mut report = Rows::report(&self.layers);
        let taken_in: usize = self.progress.lengths().iter().sum();
        if self.plan.keeps_ids() {
            report.tokens = taken_in * size_of::<u32>();
            report.reserved += self.tokens.bytes() - report.tokens;
        }
        let residuals = (0..self.layers.len()).filter(|&l| self.plan.old(l) == Old::Residual);
        let residual = self.shape.hidden * self.shape.dtype.size();
        report.residuals = taken_in * residuals.count() * residual;
        report.reserved +=
            self.residuals.iter().map(Residuals::bytes).sum::<usize>() - report.residuals;
        let sliding = self.sliding_peak.saturating_sub(report.total());
        report.scratch_peak = self.scratch_peak.max(sliding);
        (report.blocks_certified, report.blocks_kept) = self.blocks.counted();
        report
    }

    fn rows(&self) -> usize {
        self.progress.lengths().len()
    }

    /// As [`CacheBackend::truncate_rows`]. Every length can be reached; where a window has let go of rows that
    /// are needed there, the next step rebuilds those of all layers; not so where rows are certified before they
    /// leave.
    fn truncate_rows(&mut self, to: &[usize]) -> Result<(), CacheError> {
        self.progress.can_truncate(to)?;
        if to.iter().all(|&to| to == 0) {
            self.clear();
            return Ok(());
        }
        if self.certified && !self.progress.is_draft() {
            // The rows of a window that were let go of were not compared with anything.
            Rows::reachable(&self.layers, self.progress.lengths(), to, |_, _| 0)?;
        }
        self.take_back(to);
        Ok(())
    }

    fn checkpoint(&mut self) -> Result<(), CacheError> {
        self.progress.checkpoint()
    }

    fn restore(&mut self) -> Result<(), CacheError> {
        let to = self.progress.drafted()?;
        if !self.progress.has_batch_before_draft() {
            self.clear();
            return Ok(());
        }
        self.take_back(&to);
        self.progress.end_draft();
        self.settle();
        Ok(())
    }

    fn accept(&mut self) -> Result<(), CacheError> {
        self.progress.drafted()?;
        self.progress.end_draft();
        self.settle();
        Ok(())
    }

    /// As [`CacheBackend::select_rows`]. More rows than before may be refused with
    /// [`StepBytes`](CacheError::StepBytes).
    fn select_rows(&mut self, rows: &[usize]) -> Result<(), CacheError> {
        self.progress.can_select_rows(rows)?;
        self.can_certify(rows.len())?;
        if rows.is_empty() {
            self.clear();
        } else if !rows.iter().copied().eq(0..self.rows()) {
            if rows.len() > self.rows() {
                let lengths: Vec<usize> = rows.iter().map(|&row| self.position(row)).collect();
                let beside = Beside {
                    recent: self.beyond_windows(),
                    ..Beside::default()
                };
                let whole = self.affordable(&lengths, &lengths, beside)?;

                self.make_room(&whole);
            }
            self.layers
                .iter_mut()
                .for_each(|layer| layer.select_rows(rows));
            self.residuals
                .iter_mut()
                .for_each(|residuals| residuals.select_rows(rows));
            if self.plan.keeps_ids() {
                self.tokens = rows
                    .iter()
                    .map(|&row| self.tokens.row(row).to_vec())
                    .collect();
            }
            self.dropped = rows.iter().map(|&row| self.dropped[row]).collect();
            self.progress.select_rows(rows);
            let longest = self.progress.lengths().iter().copied().max().unwrap_or(0);
            self.emptied &= longest > 0;
            let residuals = self.residuals.iter_mut();
            residuals.for_each(|residuals| residuals.truncate(longest));
            (self.scratch_peak, self.sliding_peak) = (0, 0);
        }
        Ok(())
    }

    /// Holds what the plan keeps of old tokens, for all tokens, until the next step or
    /// [`resume`](Self::resume): with [`Floor::Tokens`] nothing but ids.
    fn park(&mut self) -> Result<(), CacheError> {
        self.progress.settled()?;
        self.uncertified("be parked: rows are certified before they leave")?;
        self.let_go();
        self.tokens.shrink();
        (self.scratch_peak, self.sliding_peak) = (0, 0);
        Ok(())
    }

    fn state(&self) -> Result<State, CacheError> {
        self.progress.undrafted()?;
        self.uncertified("hand out its state: certificates are of this process")?;
        Ok(self.written())
    }

    fn set_state(&mut self, state: &State) -> Result<(), CacheError> {
        self.uncertified("go on from a state: certificates are of one process")?;
        *self = self.restored(state)?;
        Ok(())
    }

    fn clear(&mut self) {
        let plan = self.plan.clone();
        *self = Self::empty(&self.shape, &self.device, plan, self.budget, self.certified);
    }

    fn fork(&self) -> Box<dyn CacheBackend> {
        Box::new(self.clone())
    }
}
