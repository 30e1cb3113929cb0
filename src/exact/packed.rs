//! The weight of a linear layer in panels.

use std::{fmt, ops::Range};

use burn::tensor::{DType, bf16, f16};

use super::{
    Numbers, PANEL,
    kernels::{self, Format, Grouped, threads},
    pages::Pages,
};

/// A weight `[width, out]` in panels of 32 columns: `[out / 32, width, 32]`, as stored, the last panel filled up with
/// zeros.
pub(crate) struct Packed {
    width: usize,
    out: usize,
    panels: Panels,
}

/// The panels in one of the stored formats.
enum Panels {
    F32(Pages<[f32; PANEL]>),
    Bf16(Pages<[bf16; PANEL]>),
    F16(Pages<[f16; PANEL]>),
}

impl Packed {
    /// All zeros, stored as `dtype`: bf16, f16, or f32 for every other one.
    pub(super) fn zeros([width, out]: [usize; 2], dtype: DType) -> Self {
        let blocks = width * out.div_ceil(PANEL);
        Self {
            width,
            out,
            panels: match dtype {
                DType::BF16 => Panels::Bf16(Pages::zeros(blocks)),
                DType::F16 => Panels::F16(Pages::zeros(blocks)),
                _ => Panels::F32(Pages::zeros(blocks)),
            },
        }
    }

    /// Writes consecutive columns from `first` on, each `width` numbers of `columns`, rounded to the stored format.
    pub(super) fn set_columns(&mut self, first: usize, columns: Numbers<'_>) {
        let at = (self.width, first);
        match (&mut self.panels, columns) {
            (Panels::F32(panels), Numbers::F32(columns)) => {
                set(panels, at, columns, f32::from_le_bytes);
            }
            (Panels::Bf16(panels), Numbers::Bf16(columns)) => {
                set(panels, at, columns, bf16::from_le_bytes);
            }
            (Panels::F16(panels), Numbers::F16(columns)) => {
                set(panels, at, columns, f16::from_le_bytes);
            }
            (Panels::F32(panels), columns) => set(panels, at, &columns.floats(), |x| x),
            (Panels::Bf16(panels), columns) => set(panels, at, &columns.floats(), bf16::from_f32),
            (Panels::F16(panels), columns) => set(panels, at, &columns.floats(), f16::from_f32),
        }
    }

    /// Copies one column, widened.
    pub(super) fn column(&self, column: usize, to: &mut [f32]) {
        fn copy<F: Format>(panels: &[F], width: usize, column: usize, to: &mut [f32]) {
            let panel = &panels[column / PANEL * width..][..width];
            for (to, row) in to.iter_mut().zip(panel) {
                *to = row.widen(0)[column % PANEL];
            }
        }
        match &self.panels {
            Panels::F32(panels) => copy(panels, self.width, column, to),
            Panels::Bf16(panels) => copy(panels, self.width, column, to),
            Panels::F16(panels) => copy(panels, self.width, column, to),
        }
    }

    /// `x · weight`: some columns of the weight, the first of a panel, for every row of `out`. `x` has the elements for
    /// these rows of the weight; after the first row the sums in `out` are continued.
    pub(super) fn multiply(
        &self,
        x: &Grouped,
        rows: Range<usize>,
        columns: Range<usize>,
        out: &mut [&mut [f32]],
    ) {
        let first = columns.start / PANEL * self.width;
        let blocks = first..columns.end.div_ceil(PANEL) * self.width;
        match &self.panels {
            Panels::F32(panels) => kernels::linear(x, &panels[blocks], self.width, rows, out),
            Panels::Bf16(panels) => kernels::linear(x, &panels[blocks], self.width, rows, out),
            Panels::F16(panels) => kernels::linear(x, &panels[blocks], self.width, rows, out),
        }
    }

    /// `[width, out]`.
    pub(super) const fn dims(&self) -> [usize; 2] {
        [self.width, self.out]
    }

    /// The stored dtype.
    pub(super) const fn dtype(&self) -> DType {
        match self.panels {
            Panels::F32(_) => DType::F32,
            Panels::Bf16(_) => DType::BF16,
            Panels::F16(_) => DType::F16,
        }
    }
}

impl fmt::Debug for Packed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Packed")
            .field("dims", &self.dims())
            .field("dtype", &self.dtype())
            .finish_non_exhaustive()
    }
}

/// Writes columns of `width` numbers from `first` on. Threads share out the panels.
fn set<T: Send, S: Copy + Sync>(
    panels: &mut [[T; PANEL]],
    (width, first): (usize, usize),
    columns: &[S],
    convert: impl Fn(S) -> T + Sync,
) {
    if columns.is_empty() {
        return;
    }
    let (start, end) = (first / PANEL, first + columns.len() / width);
    let write = |index: usize, panel: &mut [[T; PANEL]]| {
        let left = (start + index) * PANEL;
        for column in first.max(left)..end.min(left + PANEL) {
            let values = &columns[(column - first) * width..][..width];
            for (row, value) in panel.iter_mut().zip(values) {
                row[column - left] = convert(*value);
            }
        }
    };
    let panels = &mut panels[start * width..end.div_ceil(PANEL) * width];
    if panels.len() == width {
        write(0, panels);
    } else {
        threads::chunks(panels, width, write);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_where_they_belong_whatever_they_are_stored_as() {
        let [width, out] = [70, 203];
        // Small integers, which every dtype holds.
        let number = |at: usize| (at * 7) as f32 % 251.0 - 125.0;
        let columns: Vec<f32> = (0..width * out).map(number).collect();
        let wide: Vec<_> = columns.iter().map(|x| x.to_le_bytes()).collect();
        let bf16s = columns.iter().map(|&x| bf16::from_f32(x).to_le_bytes());
        let bf16s: Vec<_> = bf16s.collect();
        let f16s = columns.iter().map(|&x| f16::from_f32(x).to_le_bytes());
        let f16s: Vec<_> = f16s.collect();
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            for stored in 0..4 {
                let mut packed = Packed::zeros([width, out], dtype);
                // Parts that begin and end within panels.
                for (from, to) in [(0, 5), (5, 40), (40, 160), (160, 203)] {
                    let part = from * width..to * width;
                    let part = match stored {
                        0 => Numbers::Floats(&columns[part]),
                        1 => Numbers::F32(&wide[part]),
                        2 => Numbers::Bf16(&bf16s[part]),
                        _ => Numbers::F16(&f16s[part]),
                    };
                    packed.set_columns(from, part);
                }
                let mut found = vec![0.0; width];
                for (index, column) in columns.chunks(width).enumerate() {
                    packed.column(index, &mut found);
                    assert_eq!(found, column, "{stored} as {dtype:?}, column {index}");
                }
            }
        }
    }
}
