//! Linear layers with what stands around them: norm before, activation between, bias, norm and residual after.
//!
//! Many rows are computed in groups that go through all stages, so that what lies between two stages stays in cache.
//! A few rows share out the columns of every stage instead. Either way each value is computed by the same operations.

use std::ops::Range;

use super::{Grouped, SimdLevel, gated, norm, rounding::MulAdd, simd::Kernel, threads};
use crate::exact::{
    Activation,
    packed::Packed,
    scratch::{inner_at_once, threads_of_a_group},
};

/// A norm's weight and parameters.
#[derive(Clone, Copy)]
pub(crate) struct Norm<'a> {
    pub(crate) weight: &'a [f32],
    pub(crate) epsilon: f32,
    pub(crate) plus_one: bool,
}

impl Norm<'_> {
    fn apply(self, x: &[f32], out: &mut [f32]) {
        norm(x, self.weight, self.epsilon, self.plus_one, out);
    }
}

/// A weight and an optional bias.
#[derive(Clone, Copy)]
pub(crate) struct Linear<'a> {
    pub(crate) weight: &'a Packed,
    pub(crate) bias: Option<&'a [f32]>,
}

/// What is done with each row of a product: the norm is applied, then the residual is added.
#[derive(Clone, Copy)]
pub(crate) struct After<'a> {
    pub(crate) norm: Option<Norm<'a>>,
    pub(crate) residual: Option<&'a [f32]>,
}

/// Layers that are applied one after the other to each row.
pub(crate) enum Layers<'a> {
    /// Products with the same input, side by side.
    Beside(&'a [Linear<'a>]),
    /// A gated feed-forward layer.
    FeedForward {
        gate_up: Linear<'a>,
        down: Linear<'a>,
        activation: Activation,
    },
}

/// The most rows of a group.
const GROUP: usize = 132;
/// Rows of the largest tile: groups are whole tiles.
const TILE: usize = 12;

impl Layers<'_> {
    /// Elements of a row of the result.
    pub(crate) fn columns(&self) -> usize {
        match self {
            Self::Beside(linears) => linears.iter().map(|l| l.weight.dims()[1]).sum(),
            Self::FeedForward { down, .. } => down.weight.dims()[1],
        }
    }

    /// Applies norm, layers and `after` to every row of `x`, `[rows, width]`.
    pub(crate) fn apply(
        &self,
        x: &[f32],
        width: usize,
        before: Option<Norm<'_>>,
        after: After<'_>,
        out: &mut [f32],
    ) {
        let columns = self.columns();
        if out.is_empty() || width == 0 {
            return;
        }
        let rows = out.len() / columns;
        let together = threads_of_a_group(rows);
        if together > 1 {
            self.group(x, width, before, after, out, together);
            return;
        }
        let threads = threads::count();
        // As many groups for each thread, and as few as fit the caches.
        let groups = rows.div_ceil(GROUP).next_multiple_of(threads);
        let group = rows.div_ceil(groups).next_multiple_of(TILE);
        threads::chunks(out, group * columns, |index, out| {
            let rows = out.len() / columns;
            let x = &x[index * group * width..][..rows * width];
            let residual = after.residual;
            let residual = residual.map(|all| &all[index * group * columns..][..out.len()]);
            let after = After { residual, ..after };
            self.group(x, width, before, after, out, 1);
        });
    }

    /// A group of rows, on up to `parts` threads.
    fn group(
        &self,
        x: &[f32],
        width: usize,
        before: Option<Norm<'_>>,
        after: After<'_>,
        out: &mut [f32],
        parts: usize,
    ) {
        let columns = self.columns();
        let x = grouped(x, width, before);
        match self {
            Self::Beside(linears) => {
                let mut left = 0;
                for linear in *linears {
                    let all = linear.weight.dims()[1];
                    linear.apply(&x, 0..all, out, (columns, left), parts);
                    left += all;
                }
            }
            Self::FeedForward {
                gate_up,
                down,
                activation,
            } => {
                let gated = activated(&x, gate_up, *activation, parts);
                drop(x);
                down.apply(&gated, 0..columns, out, (columns, 0), parts);
            }
        }
        if let Some(norm) = after.norm {
            let mut product = vec![0.0; columns];
            for out in out.chunks_exact_mut(columns) {
                product.copy_from_slice(out);
                norm.apply(&product, out);
            }
        }
        if let Some(residual) = after.residual {
            SimdLevel::current().run(Add { residual, out });
        }
    }
}

/// All rows for the tiles of a product, normed on the way.
fn grouped(x: &[f32], width: usize, before: Option<Norm<'_>>) -> Grouped {
    let mut grouped = Grouped::zeros(x.len() / width, width);
    let mut normed = vec![0.0; width];
    for (row, x) in x.chunks_exact(width).enumerate() {
        match before {
            Some(norm) => {
                norm.apply(x, &mut normed);
                grouped.set(row, 0, &normed);
            }
            None => grouped.set(row, 0, x),
        }
    }
    grouped
}

/// `activation(gate) · up` of all rows, a part of the elements at a time.
fn activated(x: &Grouped, gate_up: &Linear<'_>, activation: Activation, parts: usize) -> Grouped {
    let (rows, inner) = (x.rows(), gate_up.weight.dims()[1] / 2);
    let mut result = Grouped::zeros(rows, inner);
    let most = inner_at_once(inner, rows, parts);
    let mut both = vec![0.0; rows * 2 * most];
    let mut row = vec![0.0; most];
    for from in (0..inner).step_by(most.max(1)) {
        let to = (from + most).min(inner);
        let count = to - from;
        if count == inner {
            gate_up.apply(x, 0..2 * inner, &mut both, (2 * inner, 0), parts);
        } else {
            gate_up.apply(x, from..to, &mut both, (2 * count, 0), parts);
            let up = inner + from..inner + to;
            gate_up.apply(x, up, &mut both, (2 * count, count), parts);
        }
        for (index, both) in both.chunks_exact(2 * count).take(rows).enumerate() {
            gated(both, activation, &mut row[..count]);
            result.set(index, from, &row[..count]);
        }
    }
    result
}

impl Linear<'_> {
    /// Writes some columns of the product from `left` on, to rows of `stride` elements.
    fn apply(
        self,
        x: &Grouped,
        columns: Range<usize>,
        out: &mut [f32],
        (stride, left): (usize, usize),
        parts: usize,
    ) {
        let (rows, place) = (x.rows(), (stride, left));
        self.weight.multiply(x, columns.clone(), out, place, parts);
        if let Some(bias) = self.bias {
            for out in out.chunks_exact_mut(stride).take(rows) {
                for (out, bias) in out[left..].iter_mut().zip(&bias[columns.clone()]) {
                    *out += bias;
                }
            }
        }
    }
}

struct Add<'a> {
    residual: &'a [f32],
    out: &'a mut [f32],
}

impl Kernel for Add<'_> {
    type Output = ();

    #[inline(always)]
    fn call<M: MulAdd>(self) {
        for (out, residual) in self.out.iter_mut().zip(self.residual) {
            *out += residual;
        }
    }
}
