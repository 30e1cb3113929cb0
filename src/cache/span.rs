//! What passes between attention and a cache at one layer.

use burn::tensor::Tensor;

use crate::{
    cache::{CacheError, ModelShape, Replay, Step},
    exact::PIECE,
    positions::Positions,
};

/// Keys and values of consecutive rows, as a block projects them: keys after QK-norm and rotation.
///
/// # Shapes
/// Both `[batch, kv_heads, tokens, head_dim]`.
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
    /// Keys and values of the same rows.
    #[must_use]
    pub const fn new(keys: Tensor<4>, values: Tensor<4>) -> Self {
        Self { keys, values }
    }
}

/// The new rows of one step at one layer, and what a backend may need to take them in.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub struct Span<'a> {
    /// Positions of the new rows; pads are [`Positions::EMPTY`].
    pub positions: &'a Positions,
    /// The residual stream as it enters the block: `[batch, tokens, hidden]`.
    pub residual: &'a Tensor<3>,
    /// Keys and values of the new rows.
    pub projection: &'a Projection,
    /// The block itself, for a backend that rebuilds rows.
    pub replay: &'a dyn Replay,
}

impl<'a> Span<'a> {
    /// The rows of one layer; all parts are about the same rows.
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
        let [batch, tokens] = [step.positions().rows(), step.positions().width()];
        if self.positions != step.positions() {
            let [expected, found] = [step.positions(), self.positions].map(|p| Box::new(p.clone()));
            return Err(CacheError::SpanPositions { expected, found });
        }
        let Projection { keys, values } = self.projection;
        let rows = [
            batch,
            shape.kernels.kv_heads,
            tokens,
            shape.kernels.head_dim,
        ];
        let parts = [
            ("keys", &rows[..], keys.shape(), keys.dtype()),
            ("values", &rows, values.shape(), values.dtype()),
            (
                "residuals",
                &[batch, tokens, shape.hidden],
                self.residual.shape(),
                self.residual.dtype(),
            ),
        ];
        for (what, expected, found, dtype) in parts {
            if found.as_slice() != expected {
                return Err(CacheError::Shape {
                    what,
                    expected: expected.to_vec(),
                    found: found.to_vec(),
                });
            }
            if dtype != shape.dtype {
                return Err(CacheError::Dtype {
                    what,
                    expected: shape.dtype,
                    found: dtype,
                });
            }
        }
        Ok(())
    }
}

impl std::fmt::Debug for Span<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Span")
            .field("positions", &self.positions)
            .finish_non_exhaustive()
    }
}

/// Every row attention may read at one layer. Drop it before the cache's next call: while it lives,
/// the next append has to copy.
///
/// Slots may stand in any order: `positions` says which token each holds, and
/// [`Positions::EMPTY`] that it holds none.
///
/// # Shapes
/// Keys transposed, `[batch, kv_heads, head_dim, slots]`, values
/// `[batch, kv_heads, slots, head_dim]`, `slots` a multiple of [`PIECE`]. What free slots store must
/// be finite. Both are laid out like that in memory: keys that are only a transposed view are read by
/// other kernels, whose sums have other bits.
#[derive(Debug)]
pub struct KeysValues {
    keys: Tensor<4>,
    values: Tensor<4>,
    positions: Positions,
    query_positions: Option<Positions>,
}

impl KeysValues {
    /// What attention is to read.
    ///
    /// # Errors
    /// [`Shape`](CacheError::Shape) if the two tensors and the positions do not fit one another or
    /// the slots are not whole pieces.
    pub fn new(
        keys: Tensor<4>,
        values: Tensor<4>,
        positions: Positions,
    ) -> Result<Self, CacheError> {
        let [batch, kv_heads, head_dim, slots] = keys.dims();
        let whole = slots.next_multiple_of(PIECE).max(PIECE);
        let shape = |what, expected: &[usize], found: &[usize]| CacheError::Shape {
            what,
            expected: expected.to_vec(),
            found: found.to_vec(),
        };
        if slots != whole {
            return Err(shape(
                "keys",
                &[batch, kv_heads, head_dim, whole],
                &keys.dims(),
            ));
        }
        let expected = [batch, kv_heads, slots, head_dim];
        if values.dims() != expected {
            return Err(shape("values", &expected, &values.dims()));
        }
        let heads = if positions.heads() == 1 { 1 } else { kv_heads };
        let found = [positions.rows(), positions.heads(), positions.width()];
        if found != [batch, heads, slots] {
            return Err(shape(
                "positions of the slots",
                &[batch, heads, slots],
                &found,
            ));
        }
        Ok(Self {
            keys,
            values,
            positions,
            query_positions: None,
        })
    }

    /// The positions at which the queries must be rotated, where a policy re-indexes.
    #[must_use]
    pub fn with_query_positions(mut self, positions: Positions) -> Self {
        self.query_positions = Some(positions);
        self
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

    /// Where the queries are to be rotated and masked, if not at their own positions.
    #[must_use]
    pub const fn query_positions(&self) -> Option<&Positions> {
        self.query_positions.as_ref()
    }
}

/// Positions that a next query could read at one layer, rising.
///
/// ```
/// use kv_direct::cache::Kept;
///
/// let kept = Kept::shared(vec![vec![0, 1, 5]]);
/// assert_eq!(kept.row(0), [vec![0, 1, 5]]);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kept(Vec<Vec<Vec<usize>>>);

impl Kept {
    /// One list for every row, shared by its heads.
    #[must_use]
    pub fn shared(rows: Vec<Vec<usize>>) -> Self {
        Self(rows.into_iter().map(|row| vec![row]).collect())
    }

    /// A list for every row and KV head.
    #[must_use]
    pub const fn per_head(rows: Vec<Vec<Vec<usize>>>) -> Self {
        Self(rows)
    }

    /// Number of batch rows.
    #[must_use]
    pub const fn rows(&self) -> usize {
        self.0.len()
    }

    /// The lists of one row: a single one where all heads share it, else one for each KV head.
    ///
    /// # Panics
    /// If there is no such row.
    #[must_use]
    pub fn row(&self, row: usize) -> &[Vec<usize>] {
        &self.0[row]
    }
}
