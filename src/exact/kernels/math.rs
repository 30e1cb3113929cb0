//! Exponential, hyperbolic tangent and what is made of them, with the same bits on every CPU.
//!
//! All are polynomials without branches, so that they give the same bits alone and in vectors of any width.

use super::rounding::MulAdd;

/// `e^x` for `x <= 0`. Below -87.3 it is that of -87.3, the smallest normal numbers. NaN stays NaN.
#[inline(always)]
pub(crate) fn exp<M: MulAdd>(x: f32) -> f32 {
    let bounded = if x < LOWEST { LOWEST } else { x };
    // The sum rounds to an integer and has it in its low bits.
    let shifted = M::mul_add(bounded, std::f32::consts::LOG2_E, ROUNDING);
    let n = shifted - ROUNDING;
    // ln 2 in two parts, of which the first has few bits: its products with n are exact.
    let r = M::mul_add(n, -0.693_359_4, bounded);
    let r = M::mul_add(n, 2.121_944_4e-4, r);
    let mut p = 1.987_569_2e-4_f32;
    p = M::mul_add(p, r, 1.398_199_9e-3);
    p = M::mul_add(p, r, 8.333_452e-3);
    p = M::mul_add(p, r, 4.166_579_6e-2);
    p = M::mul_add(p, r, 1.666_666_5e-1);
    p = M::mul_add(p, r, 0.5);
    let p = M::mul_add(p, r * r, r) + 1.0;
    let scaled = f32::from_bits(p.to_bits().wrapping_add(shifted.to_bits() << 23));
    if x.is_nan() { x } else { scaled }
}

/// The smallest exponent whose result is a normal number.
const LOWEST: f32 = -87.3;
/// 1.5 · 2^23: adding it rounds to an integer.
const ROUNDING: f32 = 12_582_912.0;

/// `tanh(x)`.
#[inline(always)]
pub(crate) fn tanh<M: MulAdd>(x: f32) -> f32 {
    let size = x.abs();
    let e = exp::<M>(-2.0 * size);
    let large = (1.0 - e) / (1.0 + e);
    let z = x * x;
    let mut p = -5.704_988_7e-3_f32;
    p = M::mul_add(p, z, 2.063_909e-2);
    p = M::mul_add(p, z, -5.373_971_6e-2);
    p = M::mul_add(p, z, 1.333_144_2e-1);
    p = M::mul_add(p, z, -3.333_328e-1);
    let small = M::mul_add(p * z, x, x);
    let large = if x < 0.0 { -large } else { large };
    if size < 0.625 { small } else { large }
}

/// `cap · tanh(x / cap)`.
#[inline(always)]
pub(crate) fn softcap<M: MulAdd>(x: f32, cap: f32) -> f32 {
    cap * tanh::<M>(x / cap)
}

/// `x · sigmoid(x)`.
#[inline(always)]
pub(crate) fn silu<M: MulAdd>(x: f32) -> f32 {
    let e = exp::<M>(-x.abs());
    let part = if x < 0.0 { e } else { 1.0 };
    x * (part / (1.0 + e))
}

/// GELU in its approximation by tanh.
#[inline(always)]
pub(crate) fn gelu_tanh<M: MulAdd>(x: f32) -> f32 {
    let cube = x * x * x;
    let inner = 0.797_884_6 * M::mul_add(0.044_715_f32, cube, x);
    0.5 * x * (1.0 + tanh::<M>(inner))
}
