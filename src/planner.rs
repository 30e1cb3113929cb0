//! What a plan costs, and the cheapest one within a byte budget.
//!
//! * [`Cost`]: the bytes and operations of a [`Plan`] at a context length ([`Plan::cost`]).
//! * [`Throughput`]: how fast a device runs a model, measured once; it turns a cost into seconds.
//! * [`Planner`]: the plan with the least predicted time within a byte budget.

mod cost;
mod throughput;
mod throughput_text;

use self::cost::MOST_TOKENS;
pub use self::{
    cost::Cost,
    throughput::{ChunkThroughput, Throughput},
};
use crate::{
    cache::{CacheError, ModelShape},
    residual::{
        Plan, Retain,
        need::{Need, StepSize, rebuilt},
    },
};

/// Finds the plan with the least predicted time a step, for a context and a byte budget.
///
/// In a model with at most three full-attention layers it tries every choice for them. Otherwise it tries plans that
/// replay the layers from the token ids up to some layer. With sliding windows a replay may also start from a residual
/// in the middle. The other layers retain residuals, or keys and values. It tries each plan with every measured chunk,
/// and with as many hot tokens as then fit.
///
/// The budget covers entries, ids, slack and the scratch of a step, at every length up to the context. Hand it to the
/// cache as well ([`ResidualConfig::with_byte_budget`]), which then keeps it and uses what shorter texts leave free.
/// With [certified eviction][`ResidualConfig::with_certified_eviction`], leave some room for entries that differ: no
/// plan can know how many will.
///
/// [`ResidualConfig::with_byte_budget`]: crate::residual::ResidualConfig::with_byte_budget
/// [`ResidualConfig::with_certified_eviction`]: crate::residual::ResidualConfig::with_certified_eviction
///
/// ```
/// # #[cfg(feature = "model")]
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use burn::tensor::DType;
/// use kv_direct::cache::CacheError;
/// use kv_direct::model::DecoderConfig;
/// use kv_direct::planner::{Planner, Throughput};
///
/// let shape = DecoderConfig::new(1000, 64, 8, 4, 4).shape(DType::F32);
/// // Measured before on this machine: see `Throughput::measure`.
/// let measured: Throughput = "read 9e9; 64 tokens: projection 5e10, block 6e10, attention 2e10".parse()?;
/// let planner = Planner::new(&shape, &measured, 1024)?;
///
/// let plan = planner.plan(4 << 20)?;
/// assert!(planner.cost(&plan)?.peak() <= 4 << 20);
///
/// let refused = planner.plan(1000);
/// assert!(matches!(refused, Err(CacheError::BudgetBytes { smallest, .. }) if smallest == planner.smallest()));
/// # Ok(())
/// # }
/// # #[cfg(not(feature = "model"))]
/// # fn main() {}
/// ```
#[derive(Debug, Clone)]
pub struct Planner<'a> {
    shape: &'a ModelShape,
    throughput: &'a Throughput,
    context: usize,
    sequences: usize,
    step: usize,
}

/// For up to this many full-attention layers, every combination is tried.
const FEW: usize = 3;

impl<'a> Planner<'a> {
    /// For contexts of up to `context` tokens, the token of a step included, in one sequence. A context outside 1 to
    /// 2²⁴ is clamped.
    ///
    /// # Errors
    /// [`UnknownSize`](CacheError::UnknownSize) if the shape does not say [`intermediate`](ModelShape::intermediate).
    pub fn new(
        shape: &'a ModelShape,
        throughput: &'a Throughput,
        context: usize,
    ) -> Result<Self, CacheError> {
        shape.known_intermediate()?;
        let context = context.clamp(1, MOST_TOKENS);
        Ok(Self {
            shape,
            throughput,
            context,
            sequences: 1,
            step: context,
        })
    }

    /// For this many sequences, at least 1.
    #[must_use]
    pub fn with_sequences(mut self, sequences: usize) -> Self {
        self.sequences = sequences.max(1);
        self
    }

    /// For steps of at most this many tokens, at least 1. By default a prompt may fill the context in one step. Only
    /// sliding-window layers hold more after a longer step. The tokens of a draft count as one step, together with
    /// those of the step before it.
    #[must_use]
    pub fn with_steps_of(mut self, tokens: usize) -> Self {
        self.step = tokens.max(1);
        self
    }

    /// Of the plans that stay within `budget` bytes at every length, the one with the least predicted time for a step
    /// at the full context.
    ///
    /// # Errors
    /// [`BudgetBytes`](CacheError::BudgetBytes) with the smallest budget that works.
    ///
    /// # Cost
    /// Milliseconds for 30 layers. Grows with their cube, or with their fourth power if there are sliding windows.
    pub fn plan(&self, budget: usize) -> Result<Plan, CacheError> {
        let mut best: Option<(f64, Plan)> = None;
        for plan in self.candidates() {
            let Some(plan) = self.fitted(plan, budget) else {
                continue;
            };
            let seconds = self.steady_cost(&plan).seconds(self.throughput);
            if best.as_ref().is_none_or(|(least, _)| seconds < *least) {
                best = Some((seconds, plan));
            }
        }
        best.map(|(_, plan)| plan)
            .ok_or_else(|| CacheError::BudgetBytes {
                budget,
                smallest: self.smallest(),
            })
    }

    /// The smallest budget for which there is a plan.
    #[must_use]
    pub fn smallest(&self) -> usize {
        let needs = self.candidates().map(|plan| self.need(&plan));
        needs.min().unwrap_or(usize::MAX)
    }

    /// The smallest budget that keeps everything.
    #[must_use]
    pub fn everything(&self) -> usize {
        let keep = |layer| match self.shape.slides(layer) {
            true => Retain::Nothing,
            false => Retain::KeysValues,
        };
        let layers = (0..self.shape.layers()).map(keep).collect();
        Plan::new(self.shape, layers).map_or(usize::MAX, |plan| self.need(&plan))
    }

    /// What the step of one token costs that fills the context.
    ///
    /// # Errors
    /// [`PlanLayers`](CacheError::PlanLayers) for a plan of another model.
    pub fn cost(&self, plan: &Plan) -> Result<Cost, CacheError> {
        plan.check_layers(self.shape)?;
        Ok(self.steady_cost(plan))
    }

    fn steady_cost(&self, plan: &Plan) -> Cost {
        let size = StepSize::decode(plan, self.sequences, self.context - 1);
        plan.cost_of(self.shape, &size)
    }

    /// The most bytes a plan holds at any length up to the context.
    fn need(&self, plan: &Plan) -> usize {
        // All of it grows with the length and with the tokens of a step: no step needs more than this one would.
        let size = StepSize {
            recent: self.step.min(self.context),
            ..StepSize::decode(plan, self.sequences, self.context - 1)
        };
        Need::of(self.shape, plan, &size).peak()
    }

    /// With as many hot tokens as fit; nothing if not even the plan without any does.
    fn fitted(&self, plan: Plan, budget: usize) -> Option<Plan> {
        let fits = |hot: usize| self.need(&plan.clone().with_hot(hot)) <= budget;
        if !fits(0) {
            return None;
        }
        if rebuilt(self.shape, &plan).next().is_none() {
            return Some(plan);
        }
        // At most context - 1: `need` then always has room for a replay.
        let (mut low, mut high) = (0, self.context);
        while high - low > 1 {
            let middle = low.midpoint(high);
            match fits(middle) {
                true => low = middle,
                false => high = middle,
            }
        }
        Some(plan.with_hot(low))
    }

    /// Plans without hot tokens, each with every measured chunk.
    fn candidates(&self) -> impl Iterator<Item = Plan> + '_ {
        let shapes = self.layers();
        let mut chunks: Vec<usize> = self
            .throughput
            .chunks
            .iter()
            .map(|chunk| chunk.tokens)
            .collect();
        if chunks.is_empty() {
            chunks.push(Plan::tokens(self.shape).chunk());
        }
        chunks.into_iter().flat_map(move |chunk| {
            let plan = move |layers: &Vec<Retain>| {
                let plan = Plan::new(self.shape, layers.clone()).ok()?;
                let all = self.shape.keys_values_per_old_token();
                // A plan that a cache would refuse as larger is no candidate.
                let smaller = !plan.has_residuals() || plan.bytes_per_old_token(self.shape) < all;
                smaller.then(|| plan.with_chunk(chunk))
            };
            shapes.iter().filter_map(plan).collect::<Vec<_>>()
        })
    }

    /// What each layer may retain.
    fn layers(&self) -> Vec<Vec<Retain>> {
        let shape = self.shape;
        let full: Vec<usize> = (0..shape.layers()).filter(|&l| !shape.slides(l)).collect();
        let count = full.len();
        let mut all = Vec::new();
        if count <= FEW {
            let choices = [Retain::KeysValues, Retain::Residual, Retain::Nothing];
            for choice in 0..choices.len().pow(count as u32) {
                let mut layers = vec![Retain::Nothing; shape.layers()];
                let mut rest = choice;
                for &layer in &full {
                    layers[layer] = choices[rest % choices.len()];
                    rest /= choices.len();
                }
                all.push(layers);
            }
            return all;
        }
        let mut add = |start: usize, end: usize, from_residual: bool, first: bool| {
            // Of the layers that are not replayed, this many retain residuals: those above first.
            for residuals in 0..=start + count - end {
                let mut layers = vec![Retain::Nothing; shape.layers()];
                for (index, &layer) in full.iter().enumerate() {
                    let outside = index.checked_sub(end).unwrap_or(count - end + index);
                    layers[layer] = match index {
                        _ if from_residual && index == start => Retain::Residual,
                        0 if first => Retain::Nothing,
                        _ if (start..end).contains(&index) => Retain::Nothing,
                        _ if outside < residuals => Retain::Residual,
                        _ => Retain::KeysValues,
                    };
                }
                all.push(layers);
            }
        };
        // Full-attention layers `start .. end` are replayed.
        for end in 0..=count {
            add(0, end, false, false);
        }
        if count < shape.layers() {
            // A residual in the middle spares the blocks of sliding windows below. Without windows, a replay from the
            // ids takes no longer and holds less. Below it, the first layer may still be rebuilt from the ids.
            for end in 2..=count {
                for start in 0..end - 1 {
                    add(start, end, true, false);
                    if start > 0 {
                        add(start, end, true, true);
                    }
                }
            }
        }
        all
    }
}
