//! The decoder at one layer, for caches that rebuild entries.

use burn::tensor::Tensor;

use super::{Decoder, ForwardError, block::Block, rope::Angles};
use crate::{
    cache::{CacheError, KeysValues, Projection, Replay, TokenIds},
    positions::Positions,
};

/// The decoder at one layer.
#[derive(Debug, Clone, Copy)]
pub(super) struct BlockView<'a> {
    pub(super) decoder: &'a Decoder,
    pub(super) layer: usize,
}

impl BlockView<'_> {
    fn block(&self) -> &Block {
        &self.decoder.blocks[self.layer]
    }

    fn angles(&self, positions: &Positions) -> Angles {
        self.decoder.angles(self.block().table, positions)
    }
}

impl Replay for BlockView<'_> {
    fn embed(&self, tokens: &TokenIds, _: &Positions) -> Result<Tensor<3>, CacheError> {
        self.decoder.embed(tokens).map_err(|error| match error {
            ForwardError::Cache(error) => error,
            error => CacheError::Replay(Box::new(error)),
        })
    }

    fn project(
        &self,
        residual: Tensor<3>,
        positions: &Positions,
    ) -> Result<Projection, CacheError> {
        let angles = self.angles(positions);
        let config = self.decoder.config();
        let projection = self.block().project(residual, &angles, config);
        Ok(projection.cast(self.decoder.cache_dtype))
    }

    fn forward(
        &self,
        residual: Tensor<3>,
        positions: &Positions,
        keys_values: &KeysValues,
    ) -> Result<Tensor<3>, CacheError> {
        let angles = self.angles(positions);
        let config = self.decoder.config();
        let block = self.block();
        Ok(block.forward(residual, &angles, positions, keys_values, config))
    }

    fn rotate(
        &self,
        keys: Tensor<4>,
        from: &Positions,
        to: &Positions,
    ) -> Result<Tensor<4>, CacheError> {
        let dtype = keys.dtype();
        let keys = keys.cast(self.decoder.dtype());
        let original = self.angles(from).inverse().rotate(keys);
        Ok(self.angles(to).rotate(original).cast(dtype))
    }
}
