//! Matrix products and reductions whose bits repeat.
//!
//! A row is the vector of one token. A cache that rebuilds keys and values is exact only if a row's result depends on
//! that row alone. It must not depend on how many rows share the call, on its place among them, or on how the keys were
//! split into steps. Stock kernels do not guarantee this: a product with one row sums in another order than a product
//! with two. So everything that must be exact goes through this module. Nothing else in the crate multiplies matrices.
//!
//! * [`linear()`] computes each output as one chain of fused multiply-adds along the reduction.
//! * [`attention()`] computes every query by itself. It reads entries from [`Segment`]s, in blocks of
//!   [`ATTENTION_BLOCK`] slots, counted from slot number 0. A block has a maximum and sums of its own. Blocks are merged
//!   in rising order, and the result is divided once.
//! * [`rms_norm`], [`rotate()`] and [`gated()`] read one row, [`softcap()`] one number.
//!
//! On `flex` in f32, kernels of this crate do so: `docs/exactness.md` gives the order of every sum as formulas, and
//! neither threads nor vector instructions change a bit. Elsewhere stock operations of burn run, cut and padded so
//! that a row does not depend on others where the kernels of the device allow it. Nothing is assumed there:
//! [`Conformance`] measures it.

mod conformance;

mod attention;
mod blocks;
#[cfg(feature = "flex")]
mod flex;
mod gated;
#[cfg(feature = "flex")]
mod kernels;
#[cfg(feature = "model")]
mod layers;
mod linear;
mod norm;
#[cfg(any(feature = "flex", feature = "model"))]
mod numbers;
mod observed;
#[cfg(feature = "flex")]
mod ops;
#[cfg(feature = "flex")]
mod packed;
#[cfg(feature = "flex")]
mod pages;
mod pool;
mod rotate;
mod scratch;
mod segment;
mod softcap;
mod stock_attention;
mod weight;
mod zeros;

#[cfg(feature = "flex")]
pub use self::kernels::{Rounding, SimdLevel};
#[cfg(feature = "flex")]
pub(crate) use self::ops::write;
pub use self::{
    attention::{AttentionParams, attention},
    conformance::{Check, CheckKind, Conformance, KernelShapes, Subject},
    gated::{Activation, gated},
    linear::linear,
    norm::rms_norm,
    observed::{attention_with_column_sums, attention_with_last_queries},
    rotate::rotate,
    segment::{ATTENTION_BLOCK, PANEL, Segment},
    softcap::softcap,
    weight::Weight,
};
#[cfg(feature = "model")]
pub(crate) use self::{
    layers::{Linear, feed_forward_added, linear_added, normed_linears},
    scratch::caches,
    weight::Packing,
};
#[cfg(any(feature = "flex", feature = "model"))]
pub(crate) use self::{norm::Norm, numbers::Numbers};
pub(crate) use self::{
    pool::in_pool,
    scratch::{attention_scratch, layers_scratch, owned},
    segment::{grown, panels, rows, whole},
    stock_attention::stock_attention_scratch,
    zeros::zeros,
};
