//! `H2o`: keeps the entries that received most attention, and the newest (Zhang et al., arXiv 2306.14048, section 4;
//! selection as in `utils_real_drop` of the authors' code).

use super::{Attention, Entries, Evicting, Group, Policy, Sequence, TokenBudget};
use crate::cache::{CacheError, ModelShape, Observation, forward_to_field};

/// Keeps, in every full-attention layer and for each KV head, the `recent` newest entries and those that received
/// most attention since they were stored, at their original positions.
///
/// The score of an entry is the probability that all queries so far gave it, its own included, summed in f32 and
/// never normalised. As in the original, early entries have an advantage. Of equal scores the lowest position stays.
/// Entries are evicted after each step, so attention reads the budget and the entries of the step. Once something was
/// evicted, the result depends on how tokens were split into steps. Until then the bits are those of
/// [`FullKv`](crate::FullKv).
///
/// Scores cannot be undone: any truncation but to nothing is refused with
/// [`Irreversible`](CacheError::Irreversible).
///
/// # Cost
/// `budget` entries, in panels of 32 slots that also hold those of the step. In addition 12 bytes a slot and KV head:
/// 8 for the position and 4 for the score. Attention sums its columns block by block. The sums, `heads` numbers a slot,
/// are read back in every full-attention layer.
///
/// ```
/// use burn::tensor::DType;
/// use kv_direct::policy::{H2o, H2oConfig};
/// use kv_direct::{cache::ModelShape, exact::KernelShapes};
///
/// let shape = ModelShape::new(2, 64, DType::F32, KernelShapes::new(4, 2, 16));
/// assert!(H2o::new(&shape, H2oConfig::new(64, 32).with_sinks(4)).is_ok());
/// let refused = H2o::new(&shape, H2oConfig::new(64, 70)).unwrap_err();
/// assert_eq!(refused.to_string(), "a budget of 64 tokens is too small: the smallest that works is 70");
/// ```
#[derive(Debug, Clone)]
pub struct H2o(Evicting<HeavyHitters>);

/// Options of [`H2o`].
#[derive(Debug, Clone)]
pub struct H2oConfig {
    budget: TokenBudget,
    recent: TokenBudget,
    sinks: usize,
    group: Group,
}

impl H2oConfig {
    /// Keeps `budget` entries, the newest `recent` always among them.
    #[must_use]
    pub fn new(budget: impl Into<TokenBudget>, recent: impl Into<TokenBudget>) -> Self {
        Self {
            budget: budget.into(),
            recent: recent.into(),
            sinks: 0,
            group: Group::default(),
        }
    }

    /// Always keeps the first `sinks` entries too. If a share of a short prompt is too small for both, the sinks stay
    /// and fewer of the newest do. The original has no sinks.
    #[must_use]
    pub const fn with_sinks(mut self, sinks: usize) -> Self {
        self.sinks = sinks;
        self
    }

    /// How the scores of the query heads that share a KV head become one. The original has no such heads.
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
    /// [`Budget`](CacheError::Budget) if the budget is 0, or less than `sinks` and `recent` together.
    pub fn new(shape: &ModelShape, config: H2oConfig) -> Result<Self, CacheError> {
        let recent = config.recent.number().unwrap_or(0);
        config
            .budget
            .at_least(config.sinks.saturating_add(recent))?;
        Ok(Self(Evicting::new(shape, HeavyHitters(config))))
    }
}

forward_to_field!(H2o);

#[derive(Debug, Clone)]
struct HeavyHitters(H2oConfig);

impl Policy for HeavyHitters {
    const NAME: &'static str = "h2o";
    const PER_HEAD: bool = true;

    fn options(&self) -> Vec<(&'static str, String)> {
        vec![
            ("budget", self.0.budget.as_option()),
            ("recent", self.0.recent.as_option()),
            ("sinks", self.0.sinks.to_string()),
            ("group", self.0.group.as_option().into()),
        ]
    }

    fn wants(&self, _: &Sequence) -> Observation {
        Observation::ColumnSums
    }

    fn evict(&self, entries: &mut Entries<'_>, attention: &Attention<'_>, sequence: &Sequence) {
        let queries = attention.queries().len();
        let sums = attention
            .heads()
            .map(|head| attention.sums(0..queries, head));
        entries.add_scores(&self.0.group.reduce(sums));
        let Some(budget) = self.0.budget.of(sequence) else {
            return;
        };
        let room = budget.saturating_sub(self.0.sinks);
        let recent = self.0.recent.of(sequence).unwrap_or(0).min(room);
        let newest = sequence.length.saturating_sub(recent);
        entries.evict_lowest(budget, |position| {
            position >= self.0.sinks && position < newest
        });
    }

    fn shortest(&self, sequence: &Sequence, _: bool) -> usize {
        sequence.length
    }
}
