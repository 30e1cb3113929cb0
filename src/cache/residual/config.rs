//! What a [`ResidualCheckpoint`](super::ResidualCheckpoint) keeps.

use super::Plan;
use crate::exact::conformance::Conformance;

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
    pub(super) hot: usize,
    pub(super) floor: Floor,
    pub(super) plan: Option<Plan>,
    pub(super) even_if_larger: bool,
    pub(super) conformance: Option<Conformance>,
}

impl ResidualConfig {
    /// `hot` exact rows in every layer (0 rebuilds everything at every step), token ids below.
    #[must_use]
    pub const fn new(hot: usize) -> Self {
        Self {
            hot,
            floor: Floor::Tokens,
            plan: None,
            even_if_larger: false,
            conformance: None,
        }
    }

    /// All rows exact, as in [`FullKv`](crate::cache::FullKv), until
    /// [`park`](crate::cache::CacheBackend::park) lets go of them: for a conversation that is to cost
    /// almost nothing while nobody talks.
    #[must_use]
    pub const fn parked() -> Self {
        Self::new(usize::MAX)
    }

    /// What is kept of older tokens.
    #[must_use]
    pub fn with_floor(mut self, floor: Floor) -> Self {
        (self.floor, self.plan) = (floor, None);
        self
    }

    /// What is kept of older tokens, layer by layer.
    #[must_use]
    pub fn with_plan(mut self, plan: Plan) -> Self {
        self.plan = Some(plan);
        self
    }

    /// Accepts a floor that holds more bytes than the keys and values it replaces.
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
}
