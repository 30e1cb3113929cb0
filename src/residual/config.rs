//! Options of a [`ResidualCheckpoint`](super::ResidualCheckpoint).

use super::Plan;

/// Options of a [`ResidualCheckpoint`](super::ResidualCheckpoint). A [`Plan`] alone converts into one.
///
/// ```
/// use burn::tensor::DType;
/// use kv_direct::residual::{Plan, ResidualConfig};
/// use kv_direct::{cache::ModelShape, exact::KernelShapes};
///
/// let shape = ModelShape::new(2, 64, DType::F32, KernelShapes::new(4, 2, 16));
/// let config = ResidualConfig::new(Plan::tokens(&shape).with_hot(128)).with_byte_budget(4 << 20);
/// ```
#[derive(Debug, Clone)]
pub struct ResidualConfig {
    pub(super) plan: Plan,
    pub(super) byte_budget: Option<usize>,
    pub(super) even_if_larger: bool,
    pub(super) certified: Option<bool>,
}

impl ResidualConfig {
    /// With this plan, and no byte budget.
    #[must_use]
    pub const fn new(plan: Plan) -> Self {
        Self {
            plan,
            byte_budget: None,
            even_if_larger: false,
            certified: None,
        }
    }

    /// Never holds more than `bytes`: entries, ids, slack and the scratch of a step together. A step that would is
    /// [refused](crate::cache::CacheError::StepBytes) before anything changes. The old content is not counted
    /// while `set_state` replaces it. The model's shape must say its
    /// [`intermediate`](crate::cache::ModelShape::intermediate), or have
    /// [temporaries of its own](crate::cache::ModelShape::with_scratch).
    ///
    /// Room that is left stores keys and values that the plan does not retain, top layers first. A longer context takes
    /// the room back.
    #[must_use]
    pub const fn with_byte_budget(mut self, bytes: usize) -> Self {
        self.byte_budget = Some(bytes);
        self
    }

    /// Accepts a plan that holds more bytes than the keys and values it replaces.
    #[must_use]
    pub const fn even_if_larger(mut self) -> Self {
        self.even_if_larger = true;
        self
    }

    /// Whether entries are rebuilt and compared before they are dropped, and stay where a bit differs. By default they
    /// are, unless the conformance report [covers the decoder](crate::exact::Conformance::covers_decoder) and found no
    /// difference.
    ///
    /// Such a cache serves one sequence, in chunks of at most 64 tokens. A step or a selection of more sequences is
    /// refused with [`Sequences`](crate::cache::CacheError::Sequences). The cache cannot be parked, and has no state: a
    /// certificate is about this device in this process.
    #[must_use]
    pub const fn with_certified_eviction(mut self, certified: bool) -> Self {
        self.certified = Some(certified);
        self
    }
}

impl From<Plan> for ResidualConfig {
    fn from(plan: Plan) -> Self {
        Self::new(plan)
    }
}
