//! Kernels for the CPU, in safe Rust, over slices.
//!
//! Every sum has one order, whatever the number of rows, threads or vector lanes: `docs/exactness.md` gives it as
//! formulas. A kernel is a struct with an inlined `call`, which [`SimdLevel::run`] compiles once for each set of vector
//! instructions. Lanes are plain arrays that the compiler turns into vectors.

#![allow(
    clippy::needless_range_loop,
    reason = "loops over the lanes of several arrays at once"
)]

pub(crate) mod attention;
mod format;
pub(crate) mod layers;
mod linear;
mod math;
mod rounding;
mod rows;
mod simd;
pub(crate) mod threads;

pub(crate) use self::{
    format::Format,
    linear::{Grouped, Place, linear},
    rows::{gated, norm, rotate, softcap},
};
pub use self::{rounding::Rounding, simd::SimdLevel};
use super::PANEL;
