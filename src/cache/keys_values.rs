//! Everything attention may read at one layer.

use burn::tensor::Tensor;

use crate::{cache::CacheError, exact::KV_BLOCK, positions::Positions};

/// Everything attention may read at one layer. Drop it before the next call of the cache: while it lives, the
/// next append copies.
///
/// Slots may be in any order. `positions` names the token in each slot, or [`Positions::EMPTY`] for a free slot.
///
/// # Shapes
/// Keys are transposed, `[batch, kv_heads, head_dim, slots]`. Values are `[batch, kv_heads, slots, head_dim]`.
/// `slots` is a multiple of [`KV_BLOCK`]. Free slots must store finite numbers. Both tensors must have this
/// layout in memory: other kernels read a transposed view, and their sums have other bits.
#[derive(Debug)]
pub struct KeysValues {
    keys: Tensor<4>,
    values: Tensor<4>,
    positions: Positions,
}

impl KeysValues {
    /// Keys, values and the position of every slot.
    ///
    /// # Errors
    /// [`Shape`](CacheError::Shape) if the three do not fit one another, or if the slots are not whole blocks.
    pub fn new(
        keys: Tensor<4>,
        values: Tensor<4>,
        positions: Positions,
    ) -> Result<Self, CacheError> {
        let [batch, kv_heads, head_dim, slots] = keys.dims();
        let whole = slots.next_multiple_of(KV_BLOCK).max(KV_BLOCK);
        let heads = if positions.heads() == 1 { 1 } else { kv_heads };
        let position_dims = [positions.sequences(), positions.heads(), positions.width()];
        let parts: [(_, &[usize], &[usize]); 3] = [
            ("keys", &[batch, kv_heads, head_dim, whole], &keys.dims()),
            (
                "values",
                &[batch, kv_heads, slots, head_dim],
                &values.dims(),
            ),
            (
                "positions of the slots",
                &[batch, heads, slots],
                &position_dims,
            ),
        ];
        for (what, expected, found) in parts {
            if expected != found {
                return Err(CacheError::Shape {
                    what,
                    expected: expected.to_vec(),
                    found: found.to_vec(),
                });
            }
        }
        Ok(Self {
            keys,
            values,
            positions,
        })
    }

    /// Keys, `[batch, kv_heads, head_dim, slots]`.
    #[must_use]
    pub const fn keys(&self) -> &Tensor<4> {
        &self.keys
    }

    /// Values, `[batch, kv_heads, slots, head_dim]`.
    #[must_use]
    pub const fn values(&self) -> &Tensor<4> {
        &self.values
    }

    /// The position of every slot.
    #[must_use]
    pub const fn positions(&self) -> &Positions {
        &self.positions
    }
}
