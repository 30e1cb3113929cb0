//! `Tova`: evicts what the newest query attends to least (Oren et al., arXiv 2401.06104, section 4).

use super::{Attention, Entries, Evicting, Group, Policy, Sequence, TokenBudget};
use crate::cache::{CacheError, ModelShape, Observation, forward_to_field};

/// Keeps, in every full-attention layer, the entries to which the newest query gave the highest probability, by the
/// mean over all query heads. All KV heads of a layer keep the same entries, at original positions.
///
/// As in the paper the newest entry is not protected, unless
/// [`with_protected_last`](TovaConfig::with_protected_last) says so. Of equal probabilities the lowest position stays.
/// Attention reads the entries held and those of the step; a prompt longer than the budget is cut by its last query
/// alone. Once something was evicted, the result depends on how tokens were split into steps, and any truncation but to
/// nothing is refused with [`Irreversible`](CacheError::Irreversible). Until then the bits are those of
/// [`FullKv`](crate::FullKv).
///
/// # Cost
/// `budget` entries, in panels of 32 slots that also hold those of the step. A step beyond the budget reads back the
/// newest query's probabilities, `heads` numbers a slot in every full-attention layer. A step below it costs nothing,
/// unless the budget is a share of a prompt of which more chunks follow. Then the newest query of each sequence is
/// read back and remembered until its prompt ends.
///
/// ```
/// use burn::tensor::DType;
/// use kv_direct::policy::{TokenBudget, Tova, TovaConfig};
/// use kv_direct::{cache::ModelShape, exact::KernelShapes};
///
/// let shape = ModelShape::new(2, 64, DType::F32, KernelShapes::new(4, 2, 16));
/// let half = TovaConfig::new(TokenBudget::of_prompt(0.5)?).with_protected_last(true);
/// assert!(Tova::new(&shape, half).is_ok());
/// assert!(Tova::new(&shape, TovaConfig::new(0)).is_err());
/// # Ok::<(), kv_direct::cache::CacheError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Tova(Evicting<NewestQuery>);

/// Options of [`Tova`].
#[derive(Debug, Clone)]
pub struct TovaConfig {
    budget: TokenBudget,
    protect_last: bool,
}

impl TovaConfig {
    /// Keeps `budget` entries; the newest is not protected.
    #[must_use]
    pub fn new(budget: impl Into<TokenBudget>) -> Self {
        Self {
            budget: budget.into(),
            protect_last: false,
        }
    }

    /// Whether the newest entry is always kept.
    #[must_use]
    pub const fn with_protected_last(mut self, protected: bool) -> Self {
        self.protect_last = protected;
        self
    }
}

impl Tova {
    /// An empty cache for a model of this shape.
    ///
    /// # Errors
    /// [`Budget`](CacheError::Budget) if the budget is 0.
    pub fn new(shape: &ModelShape, config: TovaConfig) -> Result<Self, CacheError> {
        config.budget.at_least(1)?;
        Ok(Self(Evicting::new(shape, NewestQuery(config))))
    }
}

forward_to_field!(Tova);

#[derive(Debug, Clone)]
struct NewestQuery(TovaConfig);

impl Policy for NewestQuery {
    const NAME: &'static str = "tova";

    fn options(&self) -> Vec<(&'static str, String)> {
        vec![
            ("budget", self.0.budget.as_option()),
            ("protect_last", self.0.protect_last.to_string()),
        ]
    }

    fn wants(&self, sequence: &Sequence) -> Observation {
        let wanted = match self.0.budget.of(sequence) {
            Some(budget) => sequence.length > budget,
            None => sequence.length > sequence.before,
        };
        match wanted {
            true => Observation::LastQueries(1),
            false => Observation::Nothing,
        }
    }

    fn remembers(&self) -> usize {
        usize::from(self.0.budget.number().is_none())
    }

    fn evict(&self, entries: &mut Entries<'_>, attention: &Attention<'_>, sequence: &Sequence) {
        let queries = attention.queries().len();
        let (Some(budget), Some(newest)) = (self.0.budget.of(sequence), queries.checked_sub(1))
        else {
            return;
        };
        let heads = attention.heads();
        let scores = Group::Mean.reduce(heads.map(|head| attention.probabilities(newest, head)));
        let last = sequence.length.saturating_sub(1);
        entries.evict_lowest_by(&scores, budget, |position| {
            !(self.0.protect_last && position == last)
        });
    }
}
