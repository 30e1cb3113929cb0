//! Products of several weights with the same input, shared out to threads.

use std::ops::Range;

use super::{Grouped, PANEL, threads};
use crate::exact::packed::Packed;

/// A part of a weight, and a bias for all of its columns.
#[derive(Clone)]
pub(crate) struct Product<'a> {
    pub(crate) weight: &'a Packed,
    pub(crate) bias: Option<&'a [f32]>,
    /// Rows of the reduction. After the first row a product continues the sums that it finds.
    pub(crate) rows: Range<usize>,
    /// Columns, the first of a panel.
    pub(crate) columns: Range<usize>,
}

/// Computes products side by side, `[rows, columns of all]`, on up to `parts` threads.
pub(crate) fn products(x: &Grouped, products: Vec<Product<'_>>, out: &mut [f32], parts: usize) {
    let columns: usize = products.iter().map(|product| product.columns.len()).sum();
    if columns == 0 {
        return;
    }
    let parts = match x.rows() * x.width() * columns < WORTH_A_THREAD {
        true => 1,
        false => parts,
    };
    let rows = out.chunks_exact_mut(columns).take(x.rows());
    shared(x, products, rows.collect(), parts);
}

/// Multiply-adds from which waking a thread costs less than it saves.
const WORTH_A_THREAD: usize = 1 << 17;

/// In `parts` contiguous shares of the panels. Each writes its columns of all rows in place.
fn shared(x: &Grouped, products: Vec<Product<'_>>, mut rows: Vec<&mut [f32]>, parts: usize) {
    let panels: usize = products.iter().map(Product::panels).sum();
    if parts <= 1 || panels <= 1 {
        for product in products {
            let (mut now, rest) = split(rows, product.columns.len());
            product.write(x, &mut now);
            rows = rest;
        }
        return;
    }
    let mut take = (panels * (parts / 2) / parts).max(1);
    let (mut left, mut right) = (Vec::new(), Vec::new());
    for product in products {
        let panels = take.min(product.panels());
        let (one, other) = product.split(panels);
        take -= panels;
        left.push(one);
        right.push(other);
    }
    let columns = left.iter().map(|product| product.columns.len()).sum();
    let (rows_left, rows_right) = split(rows, columns);
    threads::join(
        || shared(x, left, rows_left, parts / 2),
        || shared(x, right, rows_right, parts - parts / 2),
    );
}

/// The elements of all rows before `column`, and those from it on.
fn split(rows: Vec<&mut [f32]>, column: usize) -> (Vec<&mut [f32]>, Vec<&mut [f32]>) {
    rows.into_iter().map(|row| row.split_at_mut(column)).unzip()
}

impl<'a> Product<'a> {
    /// All columns.
    pub(crate) const fn all(weight: &'a Packed, bias: Option<&'a [f32]>) -> Self {
        Self {
            weight,
            bias,
            rows: 0..weight.dims()[0],
            columns: 0..weight.dims()[1],
        }
    }

    fn panels(&self) -> usize {
        self.columns.len().div_ceil(PANEL)
    }

    /// The first panels, and the rest.
    fn split(self, panels: usize) -> (Self, Self) {
        let column = (self.columns.start + panels * PANEL).min(self.columns.end);
        let (left, right) = (self.columns.start..column, column..self.columns.end);
        let one = Self {
            columns: left,
            ..self.clone()
        };
        let other = Self {
            columns: right,
            ..self
        };
        (one, other)
    }

    /// Computes all columns on this thread.
    fn write(&self, x: &Grouped, rows: &mut [&mut [f32]]) {
        if self.columns.is_empty() {
            return;
        }
        let (part, columns) = (self.rows.clone(), self.columns.clone());
        self.weight.multiply(x, part, columns, rows);
        let ends = self.rows.end == self.weight.dims()[0];
        if let Some(bias) = self.bias.filter(|_| ends) {
            for row in rows {
                for (out, bias) in row.iter_mut().zip(&bias[self.columns.clone()]) {
                    *out += bias;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
