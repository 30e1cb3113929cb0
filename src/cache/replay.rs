//! What a cache may ask of the decoder it serves.

use burn::tensor::Tensor;

use crate::{
    cache::{CacheError, KeysValues, Projection, TokenIds},
    positions::Positions,
};

/// The decoder at one layer, as a cache sees it. This module owns the trait and the decoder implements it, so
/// that a backend can rebuild entries without holding weights or knowing a model.
///
/// For every token, each method returns the bits of the decoder's own step, whatever other tokens share the
/// call. The routines of [`exact`](crate::exact) have this property, and
/// [`Conformance::probe_decoder`](crate::exact::Conformance::probe_decoder) measures whether a decoder has it. In every tensor, the tokens of all sequences stand one after another, as in [`Positions`]. Tokens at
/// [`Positions::EMPTY`] are pads: they are carried along and stay finite, and their results have no meaning.
///
/// A result of another shape or dtype is refused by the backends of this crate, with [`CacheError::Shape`] or
/// [`CacheError::Dtype`]; the step has then failed.
pub trait Replay {
    /// The residual entering the first block, from token ids at these positions: `[1, tokens, hidden]`. A decoder with
    /// learned positions adds them here. The ids of pads have no meaning.
    ///
    /// # Errors
    /// [`NoEmbedding`](CacheError::NoEmbedding) for a decoder that is not fed with token ids,
    /// [`EmptyStep`](CacheError::EmptyStep) if there is no token, and the decoder's own, in [`CacheError::Replay`].
    fn embed(&self, tokens: &TokenIds, positions: &Positions) -> Result<Tensor<3>, CacheError>;

    /// Keys and values from the residual `[1, tokens, hidden]` at these positions: norm, projection, bias,
    /// QK-norm, rotation.
    ///
    /// # Errors
    /// The decoder's own, in [`CacheError::Replay`].
    fn project(&self, residual: Tensor<3>, positions: &Positions)
    -> Result<Projection, CacheError>;

    /// The whole block, `[1, tokens, hidden]` in and out. Attention reads `keys_values` and nothing else.
    ///
    /// # Errors
    /// The decoder's own, in [`CacheError::Replay`].
    fn forward(
        &self,
        residual: Tensor<3>,
        positions: &Positions,
        keys_values: &KeysValues,
    ) -> Result<Tensor<3>, CacheError>;

    /// Keys `[1, kv_heads, tokens, head_dim]`, rotated from their positions to others with the rotary base
    /// and scaling of this layer.
    ///
    /// # Errors
    /// The decoder's own, in [`CacheError::Replay`].
    fn rotate(
        &self,
        keys: Tensor<4>,
        from: &Positions,
        to: &Positions,
    ) -> Result<Tensor<4>, CacheError>;
}

impl<R: Replay + ?Sized> Replay for Box<R> {
    fn embed(&self, tokens: &TokenIds, positions: &Positions) -> Result<Tensor<3>, CacheError> {
        (**self).embed(tokens, positions)
    }

    fn project(
        &self,
        residual: Tensor<3>,
        positions: &Positions,
    ) -> Result<Projection, CacheError> {
        (**self).project(residual, positions)
    }

    fn forward(
        &self,
        residual: Tensor<3>,
        positions: &Positions,
        keys_values: &KeysValues,
    ) -> Result<Tensor<3>, CacheError> {
        (**self).forward(residual, positions, keys_values)
    }

    fn rotate(
        &self,
        keys: Tensor<4>,
        from: &Positions,
        to: &Positions,
    ) -> Result<Tensor<4>, CacheError> {
        (**self).rotate(keys, from, to)
    }
}
