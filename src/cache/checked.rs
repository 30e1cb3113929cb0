//! A decoder whose results are checked before a cache uses them.

use burn::tensor::{DType, Tensor};

use super::{CacheError, KeysValues, ModelShape, Projection, Replay, TokenIds};
use crate::positions::Positions;

/// Checks shapes and dtypes of everything that a decoder rebuilds. Rotated keys are checked where they are used.
pub(crate) struct CheckedReplay<'a> {
    pub(crate) replay: &'a dyn Replay,
    pub(crate) shape: &'a ModelShape,
}

impl CheckedReplay<'_> {
    fn residual(
        &self,
        what: &'static str,
        found: &Tensor<3>,
        tokens: usize,
    ) -> Result<(), CacheError> {
        let expected = [1, tokens, self.shape.hidden];
        check(what, found, expected, self.shape.dtype)
    }

    fn entries(
        &self,
        what: &'static str,
        found: &Tensor<4>,
        tokens: usize,
    ) -> Result<(), CacheError> {
        let kernels = &self.shape.kernels;
        let expected = [1, kernels.kv_heads, tokens, kernels.head_dim];
        check(what, found, expected, self.shape.cache_dtype)
    }
}

/// Checks that a tensor has this shape and dtype.
pub(crate) fn check<const D: usize>(
    what: &'static str,
    found: &Tensor<D>,
    shape: [usize; D],
    dtype: DType,
) -> Result<(), CacheError> {
    if found.dims() != shape {
        return Err(CacheError::Shape {
            what,
            expected: shape.to_vec(),
            found: found.dims().to_vec(),
        });
    }
    if found.dtype() != dtype {
        return Err(CacheError::Dtype {
            what,
            expected: dtype,
            found: found.dtype(),
        });
    }
    Ok(())
}

impl Replay for CheckedReplay<'_> {
    fn embed(&self, tokens: &TokenIds, positions: &Positions) -> Result<Tensor<3>, CacheError> {
        let residual = self.replay.embed(tokens, positions)?;
        let count = tokens.lengths().iter().sum();
        self.residual("embedded residuals", &residual, count)?;
        Ok(residual)
    }

    fn project(
        &self,
        residual: Tensor<3>,
        positions: &Positions,
    ) -> Result<Projection, CacheError> {
        let projection = self.replay.project(residual, positions)?;
        self.entries("rebuilt keys", &projection.keys, positions.tokens())?;
        self.entries("rebuilt values", &projection.values, positions.tokens())?;
        Ok(projection)
    }

    fn forward(
        &self,
        residual: Tensor<3>,
        positions: &Positions,
        keys_values: &KeysValues,
    ) -> Result<Tensor<3>, CacheError> {
        let residual = self.replay.forward(residual, positions, keys_values)?;
        self.residual("replayed residuals", &residual, positions.tokens())?;
        Ok(residual)
    }

    fn rotate(
        &self,
        keys: Tensor<4>,
        from: &Positions,
        to: &Positions,
    ) -> Result<Tensor<4>, CacheError> {
        self.replay.rotate(keys, from, to)
    }
}
