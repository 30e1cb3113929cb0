//! What attention hands to a cache at one layer.

use burn::tensor::{DType, Tensor};

use crate::{
    cache::{CacheError, ModelShape, Replay, Step, check},
    positions::Positions,
};

/// Keys and values of consecutive tokens as a block projects them: keys after QK-norm and rotation.
///
/// # Shapes
/// Both `[1, kv_heads, tokens, head_dim]`: the tokens of all sequences one after another.
#[derive(Debug, Clone)]
#[allow(
    clippy::exhaustive_structs,
    reason = "two tensors; a decoder of another crate builds it"
)]
pub struct Projection {
    /// The keys.
    pub keys: Tensor<4>,
    /// The values.
    pub values: Tensor<4>,
}

impl Projection {
    /// The same rounded to another dtype.
    #[must_use]
    pub fn cast(self, dtype: DType) -> Self {
        if [self.keys.dtype(), self.values.dtype()] == [dtype; 2] {
            return self;
        }
        Self {
            keys: self.keys.cast(dtype),
            values: self.values.cast(dtype),
        }
    }
}

/// The new tokens of a step at one layer, and what a backend may need to store them.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub struct Span<'a> {
    /// Positions of the new tokens.
    pub positions: &'a Positions,
    /// The residual stream entering the block: `[1, tokens, hidden]`, the tokens of all sequences one after another.
    pub residual: &'a Tensor<3>,
    /// Keys and values of the new tokens.
    pub projection: &'a Projection,
    /// The block itself, for a backend that rebuilds entries.
    pub replay: &'a dyn Replay,
}

impl<'a> Span<'a> {
    /// The span of one layer. All parts describe the same tokens.
    #[must_use]
    pub const fn new(
        positions: &'a Positions,
        residual: &'a Tensor<3>,
        projection: &'a Projection,
        replay: &'a dyn Replay,
    ) -> Self {
        Self {
            positions,
            residual,
            projection,
            replay,
        }
    }

    /// Checks positions, shapes and dtypes against the step and the model.
    pub(crate) fn check(&self, step: &Step, shape: &ModelShape) -> Result<(), CacheError> {
        let tokens = step.positions().tokens();
        if self.positions != step.positions() {
            let [expected, found] = [step.positions(), self.positions].map(|p| Box::new(p.clone()));
            return Err(CacheError::SpanPositions { expected, found });
        }
        let Projection { keys, values } = self.projection;
        let (kv_heads, head_dim) = (shape.kernels.kv_heads, shape.kernels.head_dim);
        let projected = [1, kv_heads, tokens, head_dim];
        check("keys", keys, projected, shape.cache_dtype)?;
        check("values", values, projected, shape.cache_dtype)?;
        let residual = [1, tokens, shape.hidden];
        check("residuals", self.residual, residual, shape.dtype)
    }
}

impl std::fmt::Debug for Span<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Span")
            .field("positions", &self.positions)
            .finish_non_exhaustive()
    }
}
