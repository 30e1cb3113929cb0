//! What a cache may ask of the decoder it serves.

use burn::tensor::Tensor;

use crate::{
    cache::{CacheError, KeysValues, Projection, TokenIds},
    positions::Positions,
};

/// A view of the decoder at one layer, owned by this module and implemented by the decoder, so that
/// a backend can rebuild rows without holding weights or knowing a model.
///
/// Every method gives the bits that the decoder's own step gives for the same row, whatever other
/// rows share the call. Rows at [`Positions::EMPTY`] are pads: they are carried along, finite, and
/// mean nothing.
pub trait Replay {
    /// Residual rows entering the first block, from token ids: `[rows, longest, hidden]`. Rows
    /// shorter than the longest end in pads.
    ///
    /// # Errors
    /// [`NoEmbedding`](CacheError::NoEmbedding) where the decoder is fed by something else.
    fn embed(&self, tokens: &TokenIds) -> Result<Tensor<3>, CacheError>;

    /// Keys and values of residual rows `[batch, tokens, hidden]` at their positions: norm,
    /// projection, bias, QK-norm, rotation.
    ///
    /// # Errors
    /// Whatever the decoder finds wrong with the rows.
    fn project(&self, residual: Tensor<3>, positions: &Positions)
    -> Result<Projection, CacheError>;

    /// The whole block: residual rows in, residual rows out, reading `keys_values` and nothing else.
    ///
    /// # Errors
    /// Whatever the decoder finds wrong with the rows.
    fn forward(
        &self,
        residual: Tensor<3>,
        positions: &Positions,
        keys_values: &KeysValues,
    ) -> Result<Tensor<3>, CacheError>;

    /// Keys `[batch, kv_heads, tokens, head_dim]` turned from their positions to others, with this
    /// layer's own base and scaling.
    ///
    /// # Errors
    /// Whatever the decoder finds wrong with the rows.
    fn rotate(
        &self,
        keys: Tensor<4>,
        from: &Positions,
        to: &Positions,
    ) -> Result<Tensor<4>, CacheError>;
}
