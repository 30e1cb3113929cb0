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
mod products;
mod rounding;
mod rows;
mod simd;
pub(crate) mod threads;

pub(crate) use self::{
    format::Format,
    linear::{Grouped, linear},
    products::{Product, products},
    rows::{gated, norm, rotate, softcap},
};
pub use self::{rounding::Rounding, simd::SimdLevel};
use super::PANEL;

#[cfg(test)]
mod tests {
    /// Numbers in -1 .. 1.
    pub(super) fn numbers(seed: u32) -> impl Iterator<Item = f32> {
        let mut state = seed;
        std::iter::repeat_with(move || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
    }
}
