//! How a [`ResidualCheckpoint`](super::ResidualCheckpoint) is built.

use super::Plan;
use crate::{cache::ModelShape, exact::conformance::Conformance};

/// What is kept of a token whose keys and values were dropped, in every layer alike; a [`Plan`] says it layer
/// by layer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Floor {
    /// Its id, 4 bytes: every step replays the old tokens through all blocks, one layer at a time.
    #[default]
    Tokens,
    /// The residual entering every layer: a step only projects. Saves memory where
    /// `hidden < 2 · kv_heads · head_dim`, and nowhere else.
    Residuals,
}

/// How a [`ResidualCheckpoint`](super::ResidualCheckpoint) is built.
///
/// ```
/// use kv_direct::cache::{Floor, ResidualConfig};
///
/// let config = ResidualConfig::new(128).with_floor(Floor::Residuals);
/// ```
#[derive(Debug, Clone)]
pub struct ResidualConfig {
    pub(super) layout: Layout,
    pub(super) budget: Option<usize>,
    pub(super) even_if_larger: bool,
    pub(super) conformance: Option<Conformance>,
    pub(super) certified: Option<bool>,
}

/// What is kept, as it was asked for.
#[derive(Debug, Clone)]
pub(super) enum Layout {
    Floor(Floor, usize),
    Plan(Plan),
}

impl Layout {
    /// As a plan for this model.
    pub(super) fn plan(self, shape: &ModelShape) -> Plan {
        match self {
            Self::Floor(floor, hot) => Plan::of_floor(shape, floor).with_hot(hot),
            Self::Plan(plan) => plan,
        }
    }
}

impl ResidualConfig {
    /// `hot` exact rows in every layer (0 rebuilds everything at every step), token ids below.
    #[must_use]
    pub const fn new(hot: usize) -> Self {
        Self::of(Layout::Floor(Floor::Tokens, hot))
    }

    /// What a plan says: one of your own, or one a [`Planner`](super::Planner) found for a budget.
    #[must_use]
    pub const fn planned(plan: Plan) -> Self {
        Self::of(Layout::Plan(plan))
    }

    /// All rows exact, as in [`FullKv`](crate::cache::FullKv), until
    /// [`park`](crate::cache::CacheBackend::park) lets go of them: for a conversation that is to cost
    /// almost nothing while nobody talks.
    #[must_use]
    pub const fn parked() -> Self {
        Self::new(usize::MAX)
    }

    const fn of(layout: Layout) -> Self {
        Self {
            layout,
            budget: None,
            even_if_larger: false,
            conformance: None,
            certified: None,
        }
    }

    /// What is kept of older tokens, in every layer alike, instead of a plan, of which only the hot rows stay.
    #[must_use]
    pub fn with_floor(mut self, floor: Floor) -> Self {
        let hot = match &self.layout {
            Layout::Floor(_, hot) => *hot,
            Layout::Plan(plan) => plan.hot(),
        };
        self.layout = Layout::Floor(floor, hot);
        self
    }

    /// Never holds more than `bytes`, rows, ids, slack and the scratch of a step together: a step that would is
    /// [refused](crate::cache::CacheError::StepBytes) before anything changes. (Not counted is the old content while
    /// `set_state` replaces it.) What a block's feed-forward layer takes is known from
    /// [`ModelShape::intermediate`](crate::cache::ModelShape::intermediate).
    ///
    /// What the budget leaves free at the present length is used: keys and values of as many layers as fit stay
    /// though the plan does not keep them, top layers first, until a longer context needs their room.
    #[must_use]
    pub const fn with_budget(mut self, bytes: usize) -> Self {
        self.budget = Some(bytes);
        self
    }

    /// Accepts a floor or plan that holds more bytes than the keys and values it replaces.
    #[must_use]
    pub const fn even_if_larger(mut self) -> Self {
        self.even_if_larger = true;
        self
    }

    /// Uses the report of a probe that was made before, instead of making one.
    #[must_use]
    pub fn with_conformance(mut self, conformance: Conformance) -> Self {
        self.conformance = Some(conformance);
        self
    }

    /// Whether rows are rebuilt and compared before they are let go of, and kept where a bit differs. Without
    /// this call: where the probe fails, and not where it passes.
    ///
    /// Such a cache serves one batch row, in chunks of at most 64 rows, and cannot be parked, nor written to a
    /// state: a certificate is about this device in this process.
    #[must_use]
    pub const fn with_certified_eviction(mut self, certified: bool) -> Self {
        self.certified = Some(certified);
        self
    }
}
