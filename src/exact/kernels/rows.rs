//! Kernels over single rows: norm, rotation, gated activation, soft cap.

use super::{
    PANEL, SimdLevel,
    math::{self, gelu_tanh, silu},
    rounding::MulAdd,
    simd::Kernel,
};
use crate::exact::Activation;

/// Root-mean-square norm of one row. Squares are summed in 32 lanes, folded by halves. `plus_one` adds 1 to the weight.
pub(crate) fn norm(x: &[f32], weight: &[f32], epsilon: f32, plus_one: bool, out: &mut [f32]) {
    SimdLevel::current().run(Norm {
        x,
        weight,
        epsilon,
        plus_one,
        out,
    });
}

struct Norm<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    epsilon: f32,
    plus_one: bool,
    out: &'a mut [f32],
}

impl Kernel for Norm<'_> {
    type Output = ();

    #[inline(always)]
    fn call<M: MulAdd>(self) {
        let mut lanes = [0.0; PANEL];
        let (chunks, rest) = self.x.as_chunks::<PANEL>();
        for x in chunks {
            for j in 0..PANEL {
                lanes[j] = M::mul_add(x[j], x[j], lanes[j]);
            }
        }
        for (lane, x) in lanes.iter_mut().zip(rest) {
            *lane = M::mul_add(*x, *x, *lane);
        }
        let mean = fold(lanes) / self.x.len() as f32;
        let scale = 1.0 / (mean + self.epsilon).sqrt();
        let rows = self.out.iter_mut().zip(self.x).zip(self.weight);
        if self.plus_one {
            rows.for_each(|((out, x), weight)| *out = (x * scale) * (weight + 1.0));
        } else {
            rows.for_each(|((out, x), weight)| *out = (x * scale) * weight);
        }
    }
}

/// The sum of all lanes: the upper half is added to the lower, until one is left.
#[inline(always)]
pub(super) fn fold(mut lanes: [f32; PANEL]) -> f32 {
    let mut width = PANEL / 2;
    while width > 0 {
        for j in 0..width {
            lanes[j] += lanes[j + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// Rotates one head: element `i` of its first half with element `i` of its second, by the angle of `cos[i]` and
/// `sin[i]`.
pub(crate) fn rotate(x: &[f32], cos: &[f32], sin: &[f32], out: &mut [f32]) {
    SimdLevel::current().run(Rotate { x, cos, sin, out });
}

struct Rotate<'a> {
    x: &'a [f32],
    cos: &'a [f32],
    sin: &'a [f32],
    out: &'a mut [f32],
}

impl Kernel for Rotate<'_> {
    type Output = ();

    #[inline(always)]
    fn call<M: MulAdd>(self) {
        let half = self.x.len() / 2;
        let (low, high) = self.x.split_at(half);
        let (out_low, out_high) = self.out.split_at_mut(half);
        let (cos, sin) = (&self.cos[..half], &self.sin[..half]);
        for i in 0..half {
            out_low[i] = M::mul_add(low[i], cos[i], -(high[i] * sin[i]));
            out_high[i] = M::mul_add(high[i], cos[i], low[i] * sin[i]);
        }
    }
}

/// `activation(gate) · up` for one row, whose first half is the gate.
pub(crate) fn gated(x: &[f32], activation: Activation, out: &mut [f32]) {
    SimdLevel::current().run(Gated { x, activation, out });
}

struct Gated<'a> {
    x: &'a [f32],
    activation: Activation,
    out: &'a mut [f32],
}

impl Kernel for Gated<'_> {
    type Output = ();

    #[inline(always)]
    fn call<M: MulAdd>(self) {
        let (gate, up) = self.x.split_at(self.x.len() / 2);
        let all = self.out.iter_mut().zip(gate).zip(up);
        match self.activation {
            Activation::Silu => all.for_each(|((out, gate), up)| *out = silu::<M>(*gate) * up),
            Activation::GeluTanh => {
                all.for_each(|((out, gate), up)| *out = gelu_tanh::<M>(*gate) * up)
            }
        }
    }
}

/// `cap · tanh(x / cap)` in place.
pub(crate) fn softcap(x: &mut [f32], cap: f32) {
    SimdLevel::current().run(Softcap { x, cap });
}

struct Softcap<'a> {
    x: &'a mut [f32],
    cap: f32,
}

impl Kernel for Softcap<'_> {
    type Output = ();

    #[inline(always)]
    fn call<M: MulAdd>(self) {
        for x in self.x {
            *x = math::softcap::<M>(*x, self.cap);
        }
    }
}
