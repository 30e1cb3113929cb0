//! The loops over the panels of a weight.

use std::ops::Range;

use crate::exact::kernels::{
    Format, PANEL,
    rounding::MulAdd,
    simd::{Kernel, prefetch},
};

/// One row times every panel, two at a time: twice as many chains run at once, and memory is read in two streams.
pub(super) struct Row<'a, F> {
    pub(super) x: &'a [f32],
    pub(super) panels: &'a [F],
    pub(super) out: &'a mut [f32],
}

impl<F: Format> Kernel for Row<'_, F> {
    type Output = ();

    #[inline(always)]
    fn call<M: MulAdd>(self) {
        let size = self.x.len() / F::ROWS;
        let pairs = self.panels.chunks(2 * size);
        for (pair, out) in pairs.zip(self.out.chunks_mut(2 * PANEL)) {
            let (one, other) = pair.split_at(size);
            let other = if other.is_empty() { one } else { other };
            let mut sums = [[0.0; PANEL]; 2];
            add_both::<M, _>(self.x, one, other, &mut sums);
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
///
/// `PANELS` panels take turns in blocks that fit the first-level cache together. While one block is computed, the next
/// is fetched, so that memory is read all the time.
pub(super) struct Rows<'a, 'b, F, const R: usize, const LANES: usize, const PANELS: usize> {
    /// `[rows / R, rows of the reduction]`
    pub(super) x: &'a [[f32; R]],
    pub(super) panels: &'a [F],
    /// Rows of the reduction in a panel.
    pub(super) height: usize,
    /// Those that are computed. After the first row the sums in `out` are continued.
    pub(super) reduction: Range<usize>,
    pub(super) out: &'a mut [&'b mut [f32]],
}

/// Rows of the reduction in a block of one panel.
const BLOCK: usize = 128;

impl<F: Format, const R: usize, const LANES: usize, const PANELS: usize> Kernel
    for Rows<'_, '_, F, R, LANES, PANELS>
{
    type Output = ();

    #[inline(always)]
    fn call<M: MulAdd>(self) {
        let (width, columns) = (self.reduction.len(), self.out[0].len());
        let (size, block) = (self.height / F::ROWS, BLOCK / PANELS);
        let (first, continues) = (self.reduction.start / F::ROWS, self.reduction.start > 0);
        let groups = self.x.len() / width;
        let mut sums = vec![[[0.0; PANEL]; R]; PANELS * groups];
        let mut wide = [[0.0; PANEL]; BLOCK];
        let widens = groups > F::GROUPS;
        for (index, panels) in self.panels.chunks(PANELS * size).enumerate() {
            sums.fill([[0.0; PANEL]; R]);
            if continues {
                let sums = sums.chunks_exact_mut(groups).take(panels.len() / size);
                for (panel, sums) in sums.enumerate() {
                    let left = (index * PANELS + panel) * PANEL;
                    let count = PANEL.min(columns - left);
                    for (out, sums) in self.out.iter().zip(sums.as_flattened_mut()) {
                        sums[..count].copy_from_slice(&out[left..][..count]);
                    }
                }
            }
            for from in (0..width).step_by(block) {
                let to = (from + block).min(width);
                // The next block is in these panels or in those after them.
                let next = match to < width {
                    true => index * PANELS * size + first + to / F::ROWS,
                    false => (index + 1) * PANELS * size + first,
                };
                let mut ahead = Ahead::<_, PANELS> {
                    panels: std::array::from_fn(|panel: usize| {
                        let rows = self.panels.get(next + panel * size..).unwrap_or_default();
                        &rows[..rows.len().min(block / F::ROWS)]
                    }),
                    every: groups * PANELS * PANEL / LANES,
                };
                for (panel, sums) in panels.chunks_exact(size).zip(sums.chunks_exact_mut(groups)) {
                    let panel = &panel[first + from / F::ROWS..first + to / F::ROWS];
                    if widens {
                        for (row, wide) in wide[..to - from].iter_mut().enumerate() {
                            *wide = panel[row / F::ROWS].widen(row % F::ROWS);
                        }
                    }
                    for (x, sums) in self.x.chunks_exact(width).zip(sums) {
                        let x = &x[from..to];
                        for lane in (0..PANEL).step_by(LANES) {
                            let mut part = [[0.0; LANES]; R];
                            for r in 0..R {
                                part[r].copy_from_slice(&sums[r][lane..lane + LANES]);
                            }
                            match widens {
                                true => {
                                    add::<M, _, _, _, _, _>(x, &wide, lane, &mut part, &mut ahead)
                                }
                                false => {
                                    add::<M, _, _, _, _, _>(x, panel, lane, &mut part, &mut ahead)
                                }
                            }
                            for r in 0..R {
                                sums[r][lane..lane + LANES].copy_from_slice(&part[r]);
                            }
                        }
                    }
                }
            }
            let sums = sums.chunks_exact(groups).take(panels.len() / size);
            for (panel, sums) in sums.enumerate() {
                let left = (index * PANELS + panel) * PANEL;
                let count = PANEL.min(columns - left);
                for (out, sums) in self.out.iter_mut().zip(sums.as_flattened()) {
                    out[left..][..count].copy_from_slice(&sums[..count]);
                }
            }
        }
    }
}

/// The rows of the next block that are still to be fetched.
struct Ahead<'a, F, const PANELS: usize> {
    panels: [&'a [F]; PANELS],
    /// Rows of the present block, in any of its passes, for which one row of each panel is fetched.
    every: usize,
}

impl<F: Format, const PANELS: usize> Ahead<'_, F, PANELS> {
    #[inline(always)]
    fn fetch(&mut self) {
        for rows in &mut self.panels {
            if let Some((row, rest)) = rows.split_first() {
                prefetch(row);
                *rows = rest;
            }
        }
    }
}

/// Continues the chains of `R` rows over the rows of `panel`, in `LANES` of its columns from `lane` on.
#[inline(always)]
fn add<M: MulAdd, F: Format, G: Format, const R: usize, const LANES: usize, const PANELS: usize>(
    x: &[[f32; R]],
    panel: &[F],
    lane: usize,
    sums: &mut [[f32; LANES]; R],
    ahead: &mut Ahead<'_, G, PANELS>,
) {
    let mut chains = *sums;
    let every = ahead.every;
    for (x, panel) in x.chunks(every * F::ROWS).zip(panel.chunks(every)) {
        ahead.fetch();
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
    }
    *sums = chains;
}
