//! `x · weight` from packed panels.
//!
//! Each output is one chain of fused multiply-adds along the reduction, from its first element to its last. Blocks of
//! the reduction store and reload the chain. Nothing else decides a bit.

use super::{Format, PANEL, SimdLevel, rounding::MulAdd, simd::Kernel, threads};

/// Where the rows of a product go: `columns` elements of each row of `stride` elements, from `left` on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) columns: usize,
    pub(crate) stride: usize,
    pub(crate) left: usize,
}

/// `x · weight`, `[rows, width]` to `[rows, columns]`, on up to `parts` threads. The weight has one panel for every 32
/// columns.
pub(crate) fn linear<F: Format>(
    x: &[f32],
    width: usize,
    panels: &[F],
    out: &mut [f32],
    place: Place,
    parts: usize,
) {
    let Place {
        columns,
        stride,
        left,
    } = place;
    if width == 0 || columns == 0 || out.is_empty() {
        out.fill(0.0);
        return;
    }
    let parts = match x.len() * columns < WORTH_A_THREAD {
        true => 1,
        false => parts,
    };
    let rows = out.chunks_exact_mut(stride);
    let rows = rows.map(|row| &mut row[left..left + columns]).collect();
    shared(SimdLevel::current(), x, panels, rows, parts);
}

/// Multiply-adds from which waking a thread costs less than it saves.
const WORTH_A_THREAD: usize = 1 << 17;
/// Rows of the reduction in a block: a panel's share fits the first-level cache.
const BLOCK: usize = 128;

/// In `parts` contiguous shares of the weight. Each writes its columns of all rows in place.
fn shared<F: Format>(
    simd: SimdLevel,
    x: &[f32],
    panels: &[F],
    mut rows: Vec<&mut [f32]>,
    parts: usize,
) {
    let count = rows[0].len().div_ceil(PANEL);
    if parts <= 1 || count <= 1 {
        return all(simd, x, panels, &mut rows);
    }
    let left = (count * (parts / 2) / parts).max(1);
    let (panels_left, panels_right) = panels.split_at(panels.len() / count * left);
    let rows = rows.into_iter().map(|row| row.split_at_mut(left * PANEL));
    let (rows_left, rows_right) = rows.unzip();
    threads::join(
        || shared(simd, x, panels_left, rows_left, parts / 2),
        || shared(simd, x, panels_right, rows_right, parts - parts / 2),
    );
}

/// All columns on this thread, in the tile that suits vectors and rows.
fn all<F: Format>(simd: SimdLevel, x: &[f32], panels: &[F], out: &mut [&mut [f32]]) {
    let width = x.len() / out.len();
    macro_rules! tile {
        ($rows:literal, $lanes:literal) => {{
            let x = &packed::<$rows>(x, width);
            simd.run(Rows::<'_, '_, F, $rows, $lanes> {
                x,
                width,
                panels,
                out,
            })
        }};
    }
    match (simd, out.len()) {
        (_, 1) => simd.run(Row {
            x,
            panels,
            out: &mut *out[0],
        }),
        (_, 2) => tile!(2, 32),
        (_, 3) => tile!(3, 32),
        (_, 4) => tile!(4, 16),
        (SimdLevel::Avx512, 12..) => tile!(12, 32),
        (SimdLevel::Avx512, _) => tile!(6, 16),
        // Six rows at a time would compute with too many zeros.
        (_, 7 | 8 | 13..=16) => tile!(4, 16),
        _ => tile!(6, 16),
    }
}

/// Rows side by side in groups of `R`, filled up with zeros: `[rows / R, width, R]`.
fn packed<const R: usize>(x: &[f32], width: usize) -> Vec<[f32; R]> {
    let rows = x.len() / width;
    let mut packed = vec![[0.0; R]; rows.div_ceil(R) * width];
    for (x, to) in x.chunks(R * width).zip(packed.chunks_exact_mut(width)) {
        for (lane, row) in x.chunks_exact(width).enumerate() {
            for (to, x) in to.iter_mut().zip(row) {
                to[lane] = *x;
            }
        }
    }
    packed
}

/// One row times every panel, two at a time: twice as many chains run at once, and memory is read in two streams.
struct Row<'a, F> {
    x: &'a [f32],
    panels: &'a [F],
    out: &'a mut [f32],
}

impl<F: Format> Kernel for Row<'_, F> {
    type Output = ();

    #[inline(always)]
    fn call<M: MulAdd>(self) {
        let (x, _) = self.x.as_chunks::<1>();
        let size = x.len() / F::ROWS;
        let pairs = self.panels.chunks(2 * size);
        for (pair, out) in pairs.zip(self.out.chunks_mut(2 * PANEL)) {
            let (one, other) = pair.split_at(size);
            let mut sums = [[0.0; PANEL]; 2];
            if other.is_empty() {
                let mut alone = [[0.0; PANEL]];
                add::<M, F, 1, PANEL>(x, one, 0, &mut alone);
                sums[0] = alone[0];
            } else {
                add_both::<M, _>(self.x, one, other, &mut sums);
            }
            out.copy_from_slice(&sums.as_flattened()[..out.len()]);
        }
    }
}

/// Continues the chains of one row in two panels, independent of one another.
#[inline(always)]
fn add_both<M: MulAdd, F: Format>(x: &[f32], one: &[F], other: &[F], sums: &mut [[f32; PANEL]; 2]) {
    let [mut left, mut right] = *sums;
    for ((x, one), other) in x.chunks_exact(F::ROWS).zip(one).zip(other) {
        for (row, x) in x.iter().enumerate() {
            let (one, other) = (one.widen(row), other.widen(row));
            for j in 0..PANEL {
                left[j] = M::mul_add(*x, one[j], left[j]);
            }
            for j in 0..PANEL {
                right[j] = M::mul_add(*x, other[j], right[j]);
            }
        }
    }
    *sums = [left, right];
}

/// Groups of `R` rows times every panel, `LANES` columns at a time.
struct Rows<'a, 'b, F, const R: usize, const LANES: usize> {
    /// `[rows / R, width]`
    x: &'a [[f32; R]],
    width: usize,
    panels: &'a [F],
    out: &'a mut [&'b mut [f32]],
}

impl<F: Format, const R: usize, const LANES: usize> Kernel for Rows<'_, '_, F, R, LANES> {
    type Output = ();

    #[inline(always)]
    fn call<M: MulAdd>(self) {
        let (width, columns) = (self.width, self.out[0].len());
        let mut sums = vec![[[0.0; PANEL]; R]; self.x.len() / width];
        let mut wide = [[0.0; PANEL]; BLOCK];
        let widens = sums.len() > F::GROUPS;
        let panels = self.panels.chunks_exact(width / F::ROWS);
        for (panel, left) in panels.zip((0..columns).step_by(PANEL)) {
            sums.fill([[0.0; PANEL]; R]);
            for from in (0..width).step_by(BLOCK) {
                let to = (from + BLOCK).min(width);
                let panel = &panel[from / F::ROWS..to / F::ROWS];
                if widens {
                    for (row, wide) in wide[..to - from].iter_mut().enumerate() {
                        *wide = panel[row / F::ROWS].widen(row % F::ROWS);
                    }
                }
                for (x, sums) in self.x.chunks_exact(width).zip(&mut sums) {
                    let x = &x[from..to];
                    for lane in (0..PANEL).step_by(LANES) {
                        let mut part = [[0.0; LANES]; R];
                        for r in 0..R {
                            part[r].copy_from_slice(&sums[r][lane..lane + LANES]);
                        }
                        match widens {
                            true => add::<M, _, _, _>(x, &wide, lane, &mut part),
                            false => add::<M, _, _, _>(x, panel, lane, &mut part),
                        }
                        for r in 0..R {
                            sums[r][lane..lane + LANES].copy_from_slice(&part[r]);
                        }
                    }
                }
            }
            let count = PANEL.min(columns - left);
            for (out, sums) in self.out.iter_mut().zip(sums.as_flattened()) {
                out[left..][..count].copy_from_slice(&sums[..count]);
            }
        }
    }
}

/// Continues the chains of `R` rows over the rows of `panel`, in `LANES` of its columns from `lane` on.
#[inline(always)]
fn add<M: MulAdd, F: Format, const R: usize, const LANES: usize>(
    x: &[[f32; R]],
    panel: &[F],
    lane: usize,
    sums: &mut [[f32; LANES]; R],
) {
    let mut chains = *sums;
    for (x, block) in x.chunks_exact(F::ROWS).zip(panel) {
        for (row, x) in x.iter().enumerate() {
            let wide = block.widen(row);
            let mut weights = [0.0; LANES];
            weights.copy_from_slice(&wide[lane..lane + LANES]);
            for r in 0..R {
                for j in 0..LANES {
                    chains[r][j] = M::mul_add(x[r], weights[j], chains[r][j]);
                }
            }
        }
    }
    *sums = chains;
}

#[cfg(test)]
mod tests;
