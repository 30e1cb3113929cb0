//! The scheme that makes bits repeat: every product and every reduction that must be exact.
//!
//! A cache that rebuilds keys and values is exact only if a row of a linear layer, of a norm and of
//! attention depends on that row alone: not on how many rows share the call, where it stands among
//! them, or how the keys were split into calls. Stock kernels do not promise that (a product with
//! one row sums in another order than one with two), so everything that must be exact goes through
//! this module, and nothing else in the crate multiplies matrices.
//!
//! * [`linear()`]: the reduction is cut into parts of at most [`KV_BLOCK`] elements whose products are
//!   added in order. Up to that length the kernels of `flex` are one chain of fused multiply-adds
//!   whatever the number of rows.
//! * [`attention()`]: keys are kept transposed, the queries that share a KV head are folded into
//!   rows, and everything along the keys happens in pieces of [`KV_BLOCK`] slots anchored at slot 0, the
//!   last one padded where the order of a sum depends on its length. A query's row maximum is global,
//!   its sums are added piece by piece, and it is divided once.
//! * [`rms_norm`]: one row, one reduction.
//!
//! Whether that holds on a given device and dtype is never assumed: [`conformance`] measures it.

pub mod conformance;

mod attention;
mod linear;
mod norm;
mod observed;
mod pool;
mod zeros;

#[cfg(feature = "model")]
pub(crate) use self::pool::both;
pub use self::{
    attention::{AttentionParams, attention, attention_scratch},
    linear::linear,
    norm::rms_norm,
    observed::{attention_with_column_sums, attention_with_last_queries},
};
pub(crate) use self::{pool::in_pool, zeros::zeros};

/// Elements a reduction runs over before its result is added to the others: the length up to which
/// kernels of different row counts agree, and the size of a piece of keys.
pub const KV_BLOCK: usize = 512;
