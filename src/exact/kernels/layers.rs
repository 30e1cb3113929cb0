//! Linear layers with what stands around them: norm before, activation between, bias, norm and residual after.
//!
//! Many rows are computed in groups that go through all stages, so that what lies between two stages stays in cache.
//! A few rows share out the columns of every stage instead. Either way each value is computed by the same operations.

use super::{
    Grouped, Product, SimdLevel, gated, norm, products, rounding::MulAdd, simd::Kernel, threads,
};
use crate::exact::{
    Activation,
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

/// What is done with each row of a product: the norm is applied, then the residual is added.
#[derive(Clone, Copy)]
pub(crate) struct After<'a> {
    pub(crate) norm: Option<Norm<'a>>,
    pub(crate) residual: Option<&'a [f32]>,
}

/// Layers that are applied one after the other to each row.
pub(crate) enum Layers<'a> {
    /// Products with the same input, side by side.
    Beside(&'a [Product<'a>]),
    /// A gated feed-forward layer.
    FeedForward {
        gate_up: Product<'a>,
        down: Product<'a>,
        activation: Activation,
    },
}

/// The most rows of a group.
const GROUP: usize = 132;

impl Layers<'_> {
    /// Elements of a row of the result.
    pub(crate) fn columns(&self) -> usize {
        match self {
            Self::Beside(products) => products.iter().map(|p| p.columns.len()).sum(),
            Self::FeedForward { down, .. } => down.columns.len(),
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
        let group = rows.div_ceil(groups);
        let group = group.next_multiple_of(Grouped::most_rows_of_a_tile());
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
            Self::Beside(linears) => products(&x, linears.to_vec(), out, parts),
            Self::FeedForward {
                gate_up,
                down,
                activation,
            } => {
                let gated = activated(&x, gate_up, *activation, parts);
                drop(x);
                products(&gated, vec![down.clone()], out, parts);
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
fn activated(x: &Grouped, gate_up: &Product<'_>, activation: Activation, parts: usize) -> Grouped {
    let (rows, inner) = (x.rows(), gate_up.columns.len() / 2);
    let mut result = Grouped::zeros(rows, inner);
    let most = inner_at_once(inner, rows, parts);
    let mut both = vec![0.0; rows * 2 * most];
    let mut row = vec![0.0; most];
    for from in (0..inner).step_by(most.max(1)) {
        let to = (from + most).min(inner);
        let count = to - from;
        let columns = |columns| Product {
            columns,
            ..gate_up.clone()
        };
        let parts_of_both = match count == inner {
            true => vec![gate_up.clone()],
            false => vec![columns(from..to), columns(inner + from..inner + to)],
        };
        products(x, parts_of_both, &mut both, parts);
        for (index, both) in both.chunks_exact(2 * count).take(rows).enumerate() {
            gated(both, activation, &mut row[..count]);
            result.set(index, from, &row[..count]);
        }
    }
    result
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
