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
    let Place { columns, left, .. } = place;
    if width == 0 || columns == 0 || out.is_empty() {
        out.fill(0.0);
        return;
    }
    let simd = SimdLevel::current();
    let rows = x.len() / width;
    let parts = match rows * width * columns < WORTH_A_THREAD {
        true => 1,
        false => parts,
    };
    if rows == 1 {
        one(simd, x, panels, &mut out[left..left + columns], parts);
    } else if parts > 1 && columns > PANEL {
        few(simd, x, width, panels, out, place, parts);
    } else {
        many(simd, x, width, panels, out, place);
    }
}

/// Multiply-adds from which waking a thread costs less than it saves.
const WORTH_A_THREAD: usize = 1 << 17;
/// Rows of the reduction in a block: a panel's share fits the first-level cache.
const BLOCK: usize = 128;

/// One row, in as many contiguous shares of the weight as there are threads.
fn one<F: Format>(simd: SimdLevel, x: &[f32], panels: &[F], out: &mut [f32], parts: usize) {
    let count = out.len().div_ceil(PANEL);
    if parts <= 1 || count <= 1 {
        simd.run(Row { x, panels, out });
        return;
    }
    let left = (count * (parts / 2) / parts).max(1);
    let (out_left, out_right) = out.split_at_mut(left * PANEL);
    let (panels_left, panels_right) = panels.split_at(left * x.len() / F::ROWS);
    threads::join(
        || one(simd, x, panels_left, out_left, parts / 2),
        || one(simd, x, panels_right, out_right, parts - parts / 2),
    );
}

/// A few rows: threads share the columns.
fn few<F: Format>(
    simd: SimdLevel,
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
    let rows = x.len() / width;
    let share = columns.div_ceil(PANEL).div_ceil(parts) * PANEL;
    let mut shares: Vec<Vec<f32>> = (0..columns)
        .step_by(share)
        .map(|from| vec![0.0; rows * share.min(columns - from)])
        .collect();
    threads::chunks(&mut shares, 1, |index, out| {
        let from = index * share / PANEL * width / F::ROWS;
        let columns = out[0].len() / rows;
        let place = Place {
            columns,
            stride: columns,
            left: 0,
        };
        many(simd, x, width, &panels[from..], &mut out[0], place);
    });
    for (index, part) in shares.iter().enumerate() {
        let wide = part.len() / rows;
        for (to, from) in out.chunks_exact_mut(stride).zip(part.chunks_exact(wide)) {
            to[left + index * share..][..wide].copy_from_slice(from);
        }
    }
}

/// All columns for the rows of `x`, on this thread, in the tile that suits vectors and rows.
fn many<F: Format>(
    simd: SimdLevel,
    x: &[f32],
    width: usize,
    panels: &[F],
    out: &mut [f32],
    place: Place,
) {
    let rows = x.len() / width;
    macro_rules! tile {
        ($rows:literal, $lanes:literal) => {{
            let x = &packed::<$rows>(x, width);
            simd.run(Rows::<F, $rows, $lanes> {
                x,
                width,
                panels,
                place,
                out,
            })
        }};
    }
    match (simd, rows) {
        (_, 1) => {
            let out = &mut out[place.left..place.left + place.columns];
            simd.run(Row { x, panels, out });
        }
        (_, 2) => tile!(2, 16),
        (_, 3) => tile!(3, 16),
        (_, 4) => tile!(4, 16),
        (SimdLevel::Avx512, 12..) => tile!(12, 32),
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

/// One row times every panel.
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
        let panels = self.panels.chunks_exact(x.len() / F::ROWS);
        for (panel, out) in panels.zip(self.out.chunks_mut(PANEL)) {
            let mut sums = [[0.0; PANEL]];
            add::<M, F, 1, PANEL>(x, panel, 0, &mut sums);
            out.copy_from_slice(&sums[0][..out.len()]);
        }
    }
}

/// Groups of `R` rows times every panel, `LANES` columns at a time.
struct Rows<'a, F, const R: usize, const LANES: usize> {
    /// `[rows / R, width]`
    x: &'a [[f32; R]],
    width: usize,
    panels: &'a [F],
    place: Place,
    out: &'a mut [f32],
}

impl<F: Format, const R: usize, const LANES: usize> Kernel for Rows<'_, F, R, LANES> {
    type Output = ();

    #[inline(always)]
    fn call<M: MulAdd>(self) {
        let (width, place) = (self.width, self.place);
        let mut sums = vec![[[0.0; PANEL]; R]; self.x.len() / width];
        let mut wide = [[0.0; PANEL]; BLOCK];
        let widens = F::NARROW && sums.len() > 1;
        let panels = self.panels.chunks_exact(width / F::ROWS);
        for (panel, left) in panels.zip((0..place.columns).step_by(PANEL)) {
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
            let count = PANEL.min(place.columns - left);
            let rows = self.out.chunks_exact_mut(place.stride);
            for (out, sums) in rows.zip(sums.as_flattened()) {
                out[place.left + left..][..count].copy_from_slice(&sums[..count]);
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
