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
        in_groups(out, columns, |first, out, parts| {
            let rows = out.len() / columns;
            let x = &x[first * width..][..rows * width];
            let residual = after.residual;
            let residual = residual.map(|all| &all[first * columns..][..out.len()]);
            let after = After { residual, ..after };
            self.group(x, width, before, after, out, parts);
        });
    }

    /// As [`apply`](Self::apply), and adds the result to `x`, `[rows, columns]`.
    pub(crate) fn add_to(&self, x: &mut [f32], before: Option<Norm<'_>>, after: Option<Norm<'_>>) {
        let width = self.columns();
        if x.is_empty() {
            return;
        }
        in_groups(x, width, |_, x, parts| {
            let (norm, residual) = (after, None);
            let mut out = vec![0.0; x.len()];
            self.group(x, width, before, After { norm, residual }, &mut out, parts);
            SimdLevel::current().run(Add {
                residual: &out,
                out: x,
            });
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
                feed_forward(&x, [gate_up, down], *activation, out, parts);
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

/// Runs `work` on groups of the rows of `out`, with the index of the first row and the threads that share the group.
fn in_groups(out: &mut [f32], columns: usize, work: impl Fn(usize, &mut [f32], usize) + Sync) {
    let rows = out.len() / columns;
    let together = threads_of_a_group(rows);
    if together > 1 {
        work(0, out, together);
        return;
    }
    let threads = threads::count();
    // As many groups for each thread, and as few as fit the caches.
    let groups = rows.div_ceil(GROUP).next_multiple_of(threads);
    let group = rows.div_ceil(groups);
    let group = group.next_multiple_of(Grouped::most_rows_of_a_tile());
    threads::chunks(out, group * columns, |index, out| {
        work(index * group, out, 1)
    });
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

/// `down(activation(gate) · up)` of all rows, a part of the elements between the products at a time.
fn feed_forward(
    x: &Grouped,
    [gate_up, down]: [&Product<'_>; 2],
    activation: Activation,
    out: &mut [f32],
    parts: usize,
) {
    let (rows, inner) = (x.rows(), gate_up.columns.len() / 2);
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
        let mut gate = Grouped::zeros(rows, count);
        for (index, both) in both.chunks_exact(2 * count).take(rows).enumerate() {
            gated(both, activation, &mut row[..count]);
            gate.set(index, 0, &row[..count]);
        }
        let rows = from..to;
        products(
            &gate,
            vec![Product {
                rows,
                ..down.clone()
            }],
            out,
            parts,
        );
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
