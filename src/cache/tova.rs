//! `Tova`: drops what the newest query looks at least (Oren et al., arXiv 2401.06104, section 4).

use crate::cache::{
    Budget, CacheError, Group, ModelShape, Observation,
    evicting::{Evicting, Policy, Seen, Turn},
    forward::backend,
    keep::weakest,
    rows::Rows,
};

/// Keeps, in every layer that shows all keys, the rows to which the newest query gave most, by the mean
/// over all query heads: one set for all heads of a layer, at original positions.
///
/// As in the paper the newest row is not protected, unless
/// [`with_protected_last`](TovaConfig::with_protected_last) says so. Of equal probabilities the lowest
/// position stays. A step sees the rows held and its own; a prompt longer than the budget is cut to it by
/// its last query alone. Once something was dropped the result depends on how tokens were split
/// into calls, and a truncation is refused with [`Irreversible`](CacheError::Irreversible), except
/// to nothing. Until then the bits are those of [`FullKv`](crate::cache::FullKv).
///
/// # Cost
/// `budget` rows, in whole pieces of 512 slots that also hold the rows of the step. A step beyond the
/// budget reads the newest query's probabilities back, `heads` numbers a slot in every layer; one below
/// it costs nothing.
///
/// ```
/// use burn::tensor::DType;
/// use kv_direct::cache::{Budget, ModelShape, Tova, TovaConfig};
/// use kv_direct::exact::conformance::KernelShapes;
///
/// let shape = ModelShape::new(2, 64, DType::F32, KernelShapes::new(4, 2, 16));
/// let cache = Tova::new(&shape, TovaConfig::new(Budget::of_prompt(0.5)?).with_protected_last(true))?;
/// assert!(Tova::new(&shape, TovaConfig::new(0)).is_err());
/// # let _ = cache;
/// # Ok::<(), kv_direct::cache::CacheError>(())
/// ```
#[derive(Debug)]
pub struct Tova(Evicting<NewestQuery>);

/// How a [`Tova`] is built.
#[derive(Debug, Clone)]
pub struct TovaConfig {
    budget: Budget,
    protect_last: bool,
}

impl TovaConfig {
    /// `budget` rows, the newest not protected.
    #[must_use]
    pub fn new(budget: impl Into<Budget>) -> Self {
        Self {
            budget: budget.into(),
            protect_last: false,
        }
    }

    /// Whether the newest row is always kept.
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
    /// [`Budget`](CacheError::Budget) if the budget is no row.
    pub fn new(shape: &ModelShape, config: TovaConfig) -> Result<Self, CacheError> {
        config.budget.holds(1)?;
        Ok(Self(Evicting::new(shape, NewestQuery(config))))
    }
}

backend!(Tova);

#[derive(Debug, Clone)]
struct NewestQuery(TovaConfig);

impl Policy for NewestQuery {
    fn wants(&self, turn: &Turn) -> Observation {
        let lengths = turn.after.iter().zip(&turn.prompts);
        let over = |(&length, &prompt)| self.0.budget.of(prompt).is_some_and(|b| length > b);
        if lengths.into_iter().any(over) {
            Observation::LastRows(1)
        } else {
            Observation::Nothing
        }
    }

    fn observe(&mut self, _: usize, rows: &mut Rows, seen: &Seen<'_>, turn: &Turn) {
        for (row, _, slots) in rows.lists_mut() {
            let Some(budget) = self.0.budget.of(turn.prompts[row]) else {
                continue;
            };
            let excess = slots.used().saturating_sub(budget);
            let heads = (0..seen.heads).map(|head| seen.row(row, head, 0));
            let scores = Group::Mean.reduce(heads);
            let last = turn.after[row].saturating_sub(1);
            let candidate = |position| !(self.0.protect_last && position == last);
            for slot in weakest(slots.as_ref(), &scores, excess, candidate) {
                slots.free_slot(slot);
            }
        }
    }
}
