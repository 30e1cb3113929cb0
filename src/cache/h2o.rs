//! `H2o`: keeps the rows that attention has looked at most, and the newest (Zhang et al., arXiv
//! 2306.14048, section 4; selection as in `utils_real_drop` of the authors' code).

use crate::cache::{
    Budget, CacheError, Group, ModelShape, Observation,
    evicting::{Evicting, Policy, Seen, Turn},
    forward::backend,
    keep::weakest,
    rows::Rows,
};

/// Keeps, in every layer that shows all keys and for each KV head, the `recent` newest rows and those
/// that gathered the most attention since they came in, at their original positions.
///
/// A row's score is the probability that all queries so far gave it, its own included, added up in f32
/// and never normalised, as in the original: early rows have an advantage. Of equal scores the
/// lowest position stays. Rows are dropped after each step, so a step sees the budget and its own rows,
/// and once something was dropped the result depends on how tokens were split into calls. Until then the
/// bits are those of [`FullKv`](crate::cache::FullKv).
///
/// Scores cannot be taken back: truncation is refused with
/// [`Irreversible`](CacheError::Irreversible), except to nothing.
///
/// # Cost
/// `budget` rows and 4 bytes a slot and KV head for scores, in whole pieces of 512 slots. Attention adds
/// up its columns block by block; the sums, `heads` numbers a slot, are read back in every layer.
///
/// ```
/// use burn::tensor::DType;
/// use kv_direct::cache::{H2o, H2oConfig, ModelShape};
/// use kv_direct::exact::conformance::KernelShapes;
///
/// let shape = ModelShape::new(2, 64, DType::F32, KernelShapes::new(4, 2, 16));
/// let cache = H2o::new(&shape, H2oConfig::new(64, 32).with_sinks(4))?;
/// let refused = H2o::new(&shape, H2oConfig::new(64, 70)).unwrap_err();
/// assert_eq!(refused.to_string(), "a budget of 64 rows is too small: the smallest that works is 70");
/// # let _ = cache;
/// # Ok::<(), kv_direct::cache::CacheError>(())
/// ```
#[derive(Debug)]
pub struct H2o(Evicting<HeavyHitters>);

/// How an [`H2o`] is built.
#[derive(Debug, Clone)]
pub struct H2oConfig {
    budget: Budget,
    recent: Budget,
    sinks: usize,
    group: Group,
}

impl H2oConfig {
    /// `budget` rows of which the newest `recent` are always kept.
    #[must_use]
    pub fn new(budget: impl Into<Budget>, recent: impl Into<Budget>) -> Self {
        Self {
            budget: budget.into(),
            recent: recent.into(),
            sinks: 0,
            group: Group::default(),
        }
    }

    /// The first `sinks` rows are always kept too, even where a share of a short prompt is less, and before
    /// the newest where it is less than both. The original has none.
    #[must_use]
    pub const fn with_sinks(mut self, sinks: usize) -> Self {
        self.sinks = sinks;
        self
    }

    /// How the scores of the query heads that share a KV head become one. The original knows none that do.
    #[must_use]
    pub const fn with_group(mut self, group: Group) -> Self {
        self.group = group;
        self
    }
}

impl H2o {
    /// An empty cache for a model of this shape.
    ///
    /// # Errors
    /// [`Budget`](CacheError::Budget) if the budget is no row, or less than `sinks` and `recent` together.
    pub fn new(shape: &ModelShape, config: H2oConfig) -> Result<Self, CacheError> {
        let recent = config.recent.of(None).unwrap_or(0);
        config.budget.holds(config.sinks.saturating_add(recent))?;
        Ok(Self(Evicting::new(shape, HeavyHitters(config))))
    }
}

backend!(H2o);

#[derive(Debug, Clone)]
struct HeavyHitters(H2oConfig);

impl Policy for HeavyHitters {
    const NAME: &'static str = "h2o";
    const PER_HEAD: bool = true;

    fn options(&self) -> String {
        let H2oConfig {
            budget,
            recent,
            sinks,
            group,
        } = &self.0;
        format!("budget {budget}, recent {recent}, sinks {sinks}, {group} of a group")
    }

    fn observes(&self) -> bool {
        true
    }

    fn wants(&self, _: &Turn) -> Observation {
        Observation::ColumnSums
    }

    fn observe(&mut self, _: usize, rows: &mut Rows, seen: &Seen<'_>, turn: &Turn) {
        for (row, head, slots) in rows.lists_mut() {
            slots.add_scores(seen.group(row, head, 0, self.0.group).into_iter());
            let prompt = turn.prompts[row];
            let Some(budget) = self.0.budget.of(prompt) else {
                continue;
            };
            let room = budget.saturating_sub(self.0.sinks);
            let recent = self.0.recent.of(prompt).unwrap_or(0).min(room);
            let newest = turn.after[row].saturating_sub(recent);
            let candidate = |position| position >= self.0.sinks && position < newest;
            let excess = slots.used().saturating_sub(budget);
            for slot in weakest(slots.as_ref(), slots.scores(), excess, candidate) {
                slots.free_slot(slot);
            }
        }
    }

    fn oldest(&self, length: usize, _: Option<usize>, _: bool) -> usize {
        length
    }
}
