//! The cheapest plan that stays inside a budget.

use super::{
    Old, Plan, Price, Speeds,
    need::{Need, Standing, rebuilt},
    price::MOST_TOKENS,
};
use crate::cache::{CacheError, ModelShape};

/// Finds the plan with the least predicted time a step for a context and a budget of bytes.
///
/// Where three layers or fewer show all keys it looks at every choice for them; else at plans that replay layers from the
/// token ids up to some layer, or, where there are layers with a window,
/// from a residual kept in the middle; and that keep residuals or keys and values elsewhere. Layers with a window keep
/// their window in every plan. Every plan is tried with each measured number of rows a call, and with as many hot rows as
/// then fit.
///
/// A budget covers rows, ids, slack and the scratch of a step, at every length up to the context; hand it to the
/// cache as well ([`ResidualConfig::with_budget`](super::ResidualConfig::with_budget)), which holds it and uses what
/// shorter texts leave free. A cache that [certifies rows](super::ResidualConfig::with_certified_eviction) needs room
/// for those that differ, which no plan can know: leave some.
///
/// ```
/// use burn::tensor::{DType, Device};
/// use kv_direct::cache::{CacheError, Planner, ResidualCheckpoint, ResidualConfig, Speeds};
/// use kv_direct::model::DecoderConfig;
///
/// let shape = DecoderConfig::new(1000, 64, 8, 4, 4).shape(DType::F32);
/// // Measured before on this machine: see `Speeds::measure`.
/// let speeds: Speeds = "read 9e9; 64 rows: projection 5e10, block 6e10, attention 2e10".parse()?;
/// let planner = Planner::new(&shape, &speeds, 1024);
///
/// let budget = 4 << 20;
/// let plan = planner.plan(budget)?;
/// assert!(planner.price(&plan).peak() <= budget);
/// let config = ResidualConfig::planned(plan).with_budget(budget);
/// let cache = ResidualCheckpoint::new(&shape, &Device::flex(), config)?;
///
/// let refused = planner.plan(1000);
/// assert!(matches!(refused, Err(CacheError::BudgetBytes { smallest, .. }) if smallest == planner.smallest()));
/// # Ok::<(), CacheError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Planner<'a> {
    shape: &'a ModelShape,
    speeds: &'a Speeds,
    context: usize,
    rows: usize,
    call: usize,
}

/// Of so many layers that show all keys every combination is tried.
const FEW: usize = 3;

impl<'a> Planner<'a> {
    /// For contexts of up to `context` tokens, the token of a step included, in one batch row. At least 1 token, at most
    /// 2²⁴.
    #[must_use]
    pub const fn new(shape: &'a ModelShape, speeds: &'a Speeds, context: usize) -> Self {
        let context = match context {
            0 => 1,
            context if context > MOST_TOKENS => MOST_TOKENS,
            context => context,
        };
        Self {
            shape,
            speeds,
            context,
            rows: 1,
            call: context,
        }
    }

    /// For so many batch rows, at least 1.
    #[must_use]
    pub const fn with_rows(mut self, rows: usize) -> Self {
        self.rows = if rows == 0 { 1 } else { rows };
        self
    }

    /// For calls of at most so many tokens, at least 1; before, for prompts of the whole context in one call. Only
    /// layers with a window hold more after a longer call. Tokens of a draft count as one call together, with those of
    /// the call before it.
    #[must_use]
    pub const fn with_calls(mut self, tokens: usize) -> Self {
        self.call = if tokens == 0 { 1 } else { tokens };
        self
    }

    /// The plan with the least predicted time a step at the full context, of those that stay within `budget` bytes
    /// at every length.
    ///
    /// # Errors
    /// [`BudgetBytes`](CacheError::BudgetBytes) with the smallest budget that works.
    ///
    /// # Cost
    /// Milliseconds for 30 layers; grows with their square, and where residuals are smaller with their cube.
    pub fn plan(&self, budget: usize) -> Result<Plan, CacheError> {
        let mut best: Option<(f64, Plan)> = None;
        for plan in self.candidates() {
            let Some(plan) = self.fitted(plan, budget) else {
                continue;
            };
            let seconds = self.price(&plan).seconds(self.speeds);
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

    /// The budget from which on everything is kept.
    #[must_use]
    pub fn everything(&self) -> usize {
        let keep = |layer| match self.shape.slides(layer) {
            true => Old::Nothing,
            false => Old::KeysValues,
        };
        let layers = (0..self.shape.layers()).map(keep).collect();
        Plan::new(self.shape, layers).map_or(usize::MAX, |plan| self.need(&plan))
    }

    /// What a step of one token costs at the full context.
    #[must_use]
    pub fn price(&self, plan: &Plan) -> Price {
        let context = self.context - 1;
        plan.price_of(self.shape, Standing::steady(plan, self.rows, context))
    }

    /// The most bytes a plan holds at any length up to the context.
    fn need(&self, plan: &Plan) -> usize {
        // All of it grows with the length, and with the tokens of a call: no step needs more than this one would.
        let standing = Standing {
            recent: self.call.min(self.context),
            ..Standing::steady(plan, self.rows, self.context - 1)
        };
        Need::of(self.shape, plan, standing).peak()
    }

    /// With as many hot rows as fit; none where not even the plan without any does.
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

    /// Plans without hot rows, each in calls of every number of rows that was measured.
    fn candidates(&self) -> impl Iterator<Item = Plan> + '_ {
        let shapes = self.layers();
        let mut chunks: Vec<usize> = self.speeds.chunks.iter().map(|chunk| chunk.rows).collect();
        if chunks.is_empty() {
            chunks.push(Plan::tokens(self.shape).chunk());
        }
        chunks.into_iter().flat_map(move |chunk| {
            let plan = move |layers: &Vec<Old>| {
                let plan = Plan::new(self.shape, layers.clone()).ok()?;
                let all = self.shape.keys_values_per_old_token();
                // What a cache would refuse as larger is no candidate.
                let smaller = !plan.has_residuals() || plan.bytes_per_old_token(self.shape) < all;
                smaller.then(|| plan.with_chunk(chunk))
            };
            shapes.iter().filter_map(plan).collect::<Vec<_>>()
        })
    }

    /// What may be kept at each layer.
    fn layers(&self) -> Vec<Vec<Old>> {
        let shape = self.shape;
        let full: Vec<usize> = (0..shape.layers()).filter(|&l| !shape.slides(l)).collect();
        let count = full.len();
        let mut all = Vec::new();
        if count <= FEW {
            let choices = [Old::KeysValues, Old::Residual, Old::Nothing];
            for choice in 0..choices.len().pow(count as u32) {
                let mut layers = vec![Old::Nothing; shape.layers()];
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
            // Of the layers that are not replayed so many keep residuals: those above first.
            for residuals in 0..=start + count - end {
                let mut layers = vec![Old::Nothing; shape.layers()];
                for (index, &layer) in full.iter().enumerate() {
                    let outside = index.checked_sub(end).unwrap_or(count - end + index);
                    layers[layer] = match index {
                        _ if from_residual && index == start => Old::Residual,
                        0 if first => Old::Nothing,
                        _ if (start..end).contains(&index) => Old::Nothing,
                        _ if outside < residuals => Old::Residual,
                        _ => Old::KeysValues,
                    };
                }
                all.push(layers);
            }
        };
        // Layers `start .. end` of those that show all keys are replayed.
        for end in 0..=count {
            add(0, end, false, false);
        }
        if count < shape.layers() {
            // A residual in the middle spares the blocks of windows below; without windows a replay from the ids
            // takes no more and holds less. Below it, the first may still be rebuilt from the ids.
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
