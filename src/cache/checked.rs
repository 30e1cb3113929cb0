//! A decoder whose results are checked before a cache uses them.

use burn::tensor::{DType, Tensor};

use super::{CacheError, KeysValues, ModelShape, Projection, Replay, TokenIds};
use crate::positions::Positions;

/// Checks shapes and dtypes of everything that a decoder rebuilds.
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
        check(
            what,
            (found.dims(), found.dtype()),
            (expected, self.shape.dtype),
        )
    }

    fn entries(
        &self,
        what: &'static str,
        found: &Tensor<4>,
        tokens: usize,
    ) -> Result<(), CacheError> {
        let kernels = &self.shape.kernels;
        let expected = [1, kernels.kv_heads, tokens, kernels.head_dim];
        check(
            what,
            (found.dims(), found.dtype()),
            (expected, self.shape.cache_dtype),
        )
    }
}

fn check<const D: usize>(
    what: &'static str,
    (shape, dtype): ([usize; D], DType),
    expected: ([usize; D], DType),
) -> Result<(), CacheError> {
    if shape != expected.0 {
        return Err(CacheError::Shape {
            what,
            expected: expected.0.to_vec(),
            found: shape.to_vec(),
        });
    }
    if dtype != expected.1 {
        return Err(CacheError::Dtype {
            what,
            expected: expected.1,
            found: dtype,
        });
    }
    Ok(())
}

impl Replay for CheckedReplay<'_> {
    fn embed(&self, tokens: &TokenIds) -> Result<Tensor<3>, CacheError> {
        let residual = self.replay.embed(tokens)?;
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
        let rotated = self.replay.rotate(keys, from, to)?;
        self.entries("rotated keys", &rotated, to.tokens())?;
        Ok(rotated)
    }
}
