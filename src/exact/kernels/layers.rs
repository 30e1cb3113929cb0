//! Linear layers with what stands around them: norm before, activation between, bias, norm and residual after.
//!
//! Many rows are computed in groups that go through all stages, so that what lies between two stages stays in cache.
//! A few rows share out the columns of every stage instead. Either way each value is computed by the same operations.

use super::{SimdLevel, gated, norm, rounding::MulAdd, simd::Kernel, threads};
use crate::exact::{Activation, packed::Packed};

/// A norm's weight and parameters.
#[derive(Clone, Copy)]
pub(crate) struct Norm<'a> {
    pub(crate) weight: &'a [f32],
    pub(crate) epsilon: f32,
    pub(crate) plus_one: bool,
}

impl Norm<'_> {
    fn all(self, x: &[f32], out: &mut [f32]) {
        let width = self.weight.len();
        for (x, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
            norm(x, self.weight, self.epsilon, self.plus_one, out);
        }
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
/// The fewest rows of a group for each thread.
const FEWEST: usize = 24;
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
        let threads = threads::count();
        if rows < FEWEST * threads {
            self.group(x, width, before, after, out, threads);
            return;
        }
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
        let normed = before.map(|norm| {
            let mut normed = vec![0.0; x.len()];
            norm.all(x, &mut normed);
            normed
        });
        let x = normed.as_deref().unwrap_or(x);
        let columns = self.columns();
        match self {
            Self::Beside(linears) => {
                let mut left = 0;
                for linear in *linears {
                    linear.apply(x, width, out, (columns, left), parts);
                    left += linear.weight.dims()[1];
                }
            }
            Self::FeedForward {
                gate_up,
                down,
                activation,
            } => {
                let (rows, inner) = (x.len() / width, down.weight.dims()[0]);
                let mut both = vec![0.0; rows * 2 * inner];
                gate_up.apply(x, width, &mut both, (2 * inner, 0), parts);
                let mut gate = vec![0.0; rows * inner];
                let each = gate.chunks_exact_mut(inner.max(1));
                for (both, gate) in both.chunks_exact(2 * inner.max(1)).zip(each) {
                    gated(both, *activation, gate);
                }
                down.apply(&gate, inner, out, (columns, 0), parts);
            }
        }
        if let Some(norm) = after.norm {
            let product = out.to_vec();
            norm.all(&product, out);
        }
        if let Some(residual) = after.residual {
            SimdLevel::current().run(Add { residual, out });
        }
    }
}

impl Linear<'_> {
    /// Writes the columns from `left` on, of rows of `stride` elements.
    fn apply(
        self,
        x: &[f32],
        width: usize,
        out: &mut [f32],
        (stride, left): (usize, usize),
        parts: usize,
    ) {
        self.weight.multiply(x, out, (stride, left), parts);
        if let Some(bias) = self.bias {
            let rows = x.len() / width;
            for out in out.chunks_exact_mut(stride).take(rows) {
                for (out, bias) in out[left..].iter_mut().zip(bias) {
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
