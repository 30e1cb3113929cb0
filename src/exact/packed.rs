//! The weight of a linear layer in panels.

use std::fmt;

use burn::tensor::{DType, bf16, f16};

use super::{
    PANEL,
    kernels::{self, Format, Place},
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
    F32(Vec<[f32; PANEL]>),
    Bf16(Vec<[bf16; PANEL]>),
    F16(Vec<[f16; PANEL]>),
}

impl Packed {
    /// All zeros, stored as `dtype`: bf16, f16, or f32 for every other one.
    pub(super) fn zeros([width, out]: [usize; 2], dtype: DType) -> Self {
        let blocks = width * out.div_ceil(PANEL);
        Self {
            width,
            out,
            panels: match dtype {
                DType::BF16 => Panels::Bf16(vec![[bf16::ZERO; PANEL]; blocks]),
                DType::F16 => Panels::F16(vec![[f16::ZERO; PANEL]; blocks]),
                _ => Panels::F32(vec![[0.0; PANEL]; blocks]),
            },
        }
    }

    /// Writes consecutive columns from `first` on, each `width` numbers of `columns`, rounded to the stored format.
    pub(super) fn set_columns(&mut self, first: usize, columns: &[f32]) {
        let width = self.width;
        match &mut self.panels {
            Panels::F32(panels) => set(panels, width, first, columns, |x| x),
            Panels::Bf16(panels) => set(panels, width, first, columns, bf16::from_f32),
            Panels::F16(panels) => set(panels, width, first, columns, f16::from_f32),
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

    /// `x · weight`: `[rows, width]` to the columns from `left` on of rows of `stride` elements, on up to `parts`
    /// threads.
    pub(super) fn multiply(
        &self,
        x: &[f32],
        out: &mut [f32],
        (stride, left): (usize, usize),
        parts: usize,
    ) {
        let place = Place {
            columns: self.out,
            stride,
            left,
        };
        match &self.panels {
            Panels::F32(panels) => kernels::linear(x, self.width, panels, out, place, parts),
            Panels::Bf16(panels) => kernels::linear(x, self.width, panels, out, place, parts),
            Panels::F16(panels) => kernels::linear(x, self.width, panels, out, place, parts),
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

fn set<T: Copy>(
    panels: &mut [[T; PANEL]],
    width: usize,
    first: usize,
    columns: &[f32],
    narrow: impl Fn(f32) -> T,
) {
    for (index, values) in columns.chunks_exact(width).enumerate() {
        let column = first + index;
        let panel = &mut panels[column / PANEL * width..][..width];
        for (row, value) in panel.iter_mut().zip(values) {
            row[column % PANEL] = narrow(*value);
        }
    }
}
