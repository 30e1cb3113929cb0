//! Rows as the tiles of a product read them.

use crate::exact::kernels::SimdLevel;

/// Rows side by side in groups of as many as a tile has, `[rows / group, width, group]`, filled up with zeros.
pub(crate) struct Grouped {
    pub(super) tile: Tile,
    pub(super) simd: SimdLevel,
    data: Vec<f32>,
    rows: usize,
    width: usize,
}

/// Rows and columns that are computed together: as many as the vector registers hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tile {
    One,
    Two,
    Three,
    Four,
    Six,
    Twelve,
}

impl Tile {
    const fn rows(self) -> usize {
        match self {
            Self::One => 1,
            Self::Two => 2,
            Self::Three => 3,
            Self::Four => 4,
            Self::Six => 6,
            Self::Twelve => 12,
        }
    }

    const fn of(simd: SimdLevel, rows: usize) -> Self {
        match (simd, rows) {
            (_, 0 | 1) => Self::One,
            (_, 2) => Self::Two,
            (_, 3) => Self::Three,
            (_, 4) => Self::Four,
            (SimdLevel::Avx512, 12..) => Self::Twelve,
            (SimdLevel::Avx512, _) => Self::Six,
            // Six rows at a time would compute with too many zeros.
            (_, 7 | 8 | 13..=16) => Self::Four,
            _ => Self::Six,
        }
    }
}

impl Grouped {
    /// All zeros, for the vectors of the process.
    pub(crate) fn zeros(rows: usize, width: usize) -> Self {
        Self::with_simd(SimdLevel::current(), rows, width)
    }

    /// All zeros.
    pub(in crate::exact::kernels) fn with_simd(simd: SimdLevel, rows: usize, width: usize) -> Self {
        let tile = Tile::of(simd, rows);
        Self {
            tile,
            simd,
            data: vec![0.0; rows.next_multiple_of(tile.rows()) * width],
            rows,
            width,
        }
    }

    /// Writes the elements of a row from `left` on.
    pub(crate) fn set(&mut self, row: usize, left: usize, values: &[f32]) {
        let group = self.tile.rows();
        let at = (row / group * self.width + left) * group + row % group;
        let to = self.data[at..].iter_mut().step_by(group);
        to.zip(values).for_each(|(to, value)| *to = *value);
    }

    /// Rows that many rows are grouped by, for the vectors of the process.
    pub(crate) fn most_rows_of_a_tile() -> usize {
        Tile::of(SimdLevel::current(), usize::MAX).rows()
    }

    pub(crate) const fn rows(&self) -> usize {
        self.rows
    }

    pub(crate) const fn width(&self) -> usize {
        self.width
    }

    /// The groups, one after the other: `[rows / R, width]`.
    ///
    /// # Panics
    /// If groups have another number of rows.
    pub(super) fn groups<const R: usize>(&self) -> &[[f32; R]] {
        assert_eq!(R, self.tile.rows(), "rows of a group");
        self.data.as_chunks().0
    }
}
