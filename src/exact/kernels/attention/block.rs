//! One block of slots for a few queries, and how blocks are merged.
//!
//! A score is one chain of fused multiply-adds along `head_dim`, an output one along the slots. The maximum and the sum
//! of the exponentials are the block's own; the sum is kept in 32 lanes (slot modulo 32) that are folded by halves.

use burn::tensor::{bf16, f16};

use super::pieces::{Entries, Piece, Sight};
use crate::exact::{
    ATTENTION_BLOCK,
    kernels::{
        PANEL,
        format::widen_f16,
        math::{exp, tanh},
        rounding::MulAdd,
        rows::fold,
        simd::Kernel,
    },
};

/// Slots of a block.
pub(super) const SLOTS: usize = ATTENTION_BLOCK;

/// A stored element of a key or value.
pub(crate) trait Stored: Copy + Send + Sync + 'static {
    /// The same number as f32.
    fn widen(self) -> f32;
}

impl Stored for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
}

impl Stored for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
}

impl Stored for f16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        widen_f16(self.to_bits())
    }
}

/// Scores of `R` queries for a block, and the same transposed.
pub(super) struct Scratch<const R: usize> {
    scores: [[f32; SLOTS]; R],
    weights: [[f32; R]; SLOTS],
}

impl<const R: usize> Scratch<R> {
    pub(super) const fn new() -> Self {
        Self {
            scores: [[0.0; SLOTS]; R],
            weights: [[0.0; R]; SLOTS],
        }
    }

    /// After a block: the exponentials below each query's maximum, 0 where it does not see a slot.
    pub(super) const fn scores(&self) -> &[[f32; SLOTS]; R] {
        &self.scores
    }
}

/// A block for `R` queries, `LANES` columns at a time.
pub(super) struct Block<'a, 'b, T, const R: usize, const LANES: usize> {
    /// Queries side by side, scaled: `[head_dim, R]`.
    pub(super) query: &'a [[f32; R]],
    pub(super) sights: &'a [Sight; R],
    pub(super) entries: &'a [Entries<'b, T>],
    /// The pieces of the block.
    pub(super) pieces: &'a [Piece],
    pub(super) softcap: Option<f32>,
    pub(super) scratch: &'a mut Scratch<R>,
    pub(super) max: &'a mut [f32; R],
    pub(super) sum: &'a mut [f32; R],
    /// `[R, head_dim]`.
    pub(super) mixed: &'a mut [f32],
}

impl<T: Stored, const R: usize, const LANES: usize> Kernel for Block<'_, '_, T, R, LANES> {
    type Output = ();

    #[inline(always)]
    fn call<M: MulAdd>(self) {
        let head_dim = self.query.len();
        let Scratch { scores, weights } = self.scratch;
        // Slots of whole panels around the pieces; what no piece covers is invisible.
        let low = self.pieces.first().map_or(0, |p| p.at / PANEL * PANEL);
        let last = self.pieces.last();
        let high = last.map_or(0, |p| (p.at + p.to - p.from).next_multiple_of(PANEL));
        let mut covered = low;
        for piece in self.pieces {
            let entries = &self.entries[piece.segment];
            let (from, to) = (piece.at, piece.at + piece.to - piece.from);
            for row in scores.iter_mut() {
                row[covered..from].fill(f32::NEG_INFINITY);
            }
            for panel in piece.from / PANEL..piece.to.div_ceil(PANEL) {
                let keys = &entries.keys[panel * head_dim..(panel + 1) * head_dim];
                let at = (entries.start + panel * PANEL) % SLOTS;
                let inside = from.max(at)..to.min(at + PANEL);
                for lane in (0..PANEL).step_by(LANES) {
                    let sums = score::<M, T, R, LANES>(self.query, keys, lane);
                    for r in 0..R {
                        if inside.len() == PANEL {
                            scores[r][at + lane..][..LANES].copy_from_slice(&sums[r]);
                        } else {
                            for j in 0..LANES {
                                if inside.contains(&(at + lane + j)) {
                                    scores[r][at + lane + j] = sums[r][j];
                                }
                            }
                        }
                    }
                }
            }
            let positions = &entries.positions[piece.from..piece.to];
            for r in 0..R {
                for (score, &position) in scores[r][from..to].iter_mut().zip(positions) {
                    if !self.sights[r].sees(position) {
                        *score = f32::NEG_INFINITY;
                    }
                }
            }
            covered = to;
        }
        for row in scores.iter_mut() {
            row[covered..high].fill(f32::NEG_INFINITY);
        }
        for r in 0..R {
            if let Some(cap) = self.softcap {
                for score in &mut scores[r][low..high] {
                    let capped = cap * tanh::<M>(*score / cap);
                    *score = if *score == f32::NEG_INFINITY {
                        *score
                    } else {
                        capped
                    };
                }
            }
            (self.max[r], self.sum[r]) = soften::<M>(&mut scores[r][low..high]);
            for (weight, score) in weights[low..high].iter_mut().zip(&scores[r][low..high]) {
                weight[r] = *score;
            }
        }
        let whole = head_dim / LANES * LANES;
        for column in (0..whole).step_by(LANES) {
            let mut sums = [[0.0; LANES]; R];
            for piece in self.pieces {
                let values = &self.entries[piece.segment].values;
                let values = &values[piece.from * head_dim..piece.to * head_dim];
                mix::<M, T, R, _>(&weights[piece.at..], values, head_dim, column, &mut sums);
            }
            for r in 0..R {
                self.mixed[r * head_dim + column..][..LANES].copy_from_slice(&sums[r]);
            }
        }
        for column in whole..head_dim {
            let mut sums = [[0.0; 1]; R];
            for piece in self.pieces {
                let values = &self.entries[piece.segment].values;
                let values = &values[piece.from * head_dim..piece.to * head_dim];
                mix::<M, T, R, _>(&weights[piece.at..], values, head_dim, column, &mut sums);
            }
            for r in 0..R {
                self.mixed[r * head_dim + column] = sums[r][0];
            }
        }
    }
}

/// The scores of a panel, in `LANES` of its slots from `lane` on.
#[inline(always)]
fn score<M: MulAdd, T: Stored, const R: usize, const LANES: usize>(
    query: &[[f32; R]],
    keys: &[[T; PANEL]],
    lane: usize,
) -> [[f32; LANES]; R] {
    let mut sums = [[0.0; LANES]; R];
    for (x, key) in query.iter().zip(keys) {
        let mut wide = [0.0; LANES];
        for j in 0..LANES {
            wide[j] = key[lane + j].widen();
        }
        for r in 0..R {
            for j in 0..LANES {
                sums[r][j] = M::mul_add(x[r], wide[j], sums[r][j]);
            }
        }
    }
    sums
}

/// Continues the outputs of `LANES` columns over the slots of a piece.
#[inline(always)]
fn mix<M: MulAdd, T: Stored, const R: usize, const LANES: usize>(
    weights: &[[f32; R]],
    values: &[T],
    head_dim: usize,
    column: usize,
    sums: &mut [[f32; LANES]; R],
) {
    let mut chains = *sums;
    for (x, value) in weights.iter().zip(values.chunks_exact(head_dim)) {
        let value = &value[column..column + LANES];
        let mut wide = [0.0; LANES];
        for j in 0..LANES {
            wide[j] = value[j].widen();
        }
        for r in 0..R {
            for j in 0..LANES {
                chains[r][j] = M::mul_add(x[r], wide[j], chains[r][j]);
            }
        }
    }
    *sums = chains;
}

/// Replaces scores by their exponentials below the maximum; -∞ becomes 0. Returns maximum and sum.
#[inline(always)]
fn soften<M: MulAdd>(scores: &mut [f32]) -> (f32, f32) {
    let (panels, _) = scores.as_chunks_mut::<PANEL>();
    let mut lanes = [f32::NEG_INFINITY; PANEL];
    for panel in panels.iter() {
        for j in 0..PANEL {
            lanes[j] = if panel[j] > lanes[j] {
                panel[j]
            } else {
                lanes[j]
            };
        }
    }
    let mut max = f32::NEG_INFINITY;
    for lane in lanes {
        max = if lane > max { lane } else { max };
    }
    let mut sums = [0.0; PANEL];
    for panel in panels.iter_mut() {
        for j in 0..PANEL {
            let e = exp::<M>(panel[j] - max);
            panel[j] = if panel[j] == f32::NEG_INFINITY {
                0.0
            } else {
                e
            };
        }
        for j in 0..PANEL {
            sums[j] += panel[j];
        }
    }
    (max, fold(sums))
}

/// Whether this is the maximum and the sum of a query that saw no slot.
#[inline(always)]
pub(super) fn nothing(max: f32, sum: f32) -> bool {
    max == f32::NEG_INFINITY && sum == 0.0
}

/// Joins a block to the blocks below it. Both are scaled to the higher maximum. A block of which nothing is seen
/// changes nothing.
#[inline(always)]
pub(super) fn merge<M: MulAdd>(
    (max, sum): (&mut f32, &mut f32),
    mixed: &mut [f32],
    (new_max, new_sum): (f32, f32),
    new: &[f32],
) {
    if nothing(new_max, new_sum) {
        return;
    }
    if nothing(*max, *sum) {
        (*max, *sum) = (new_max, new_sum);
        mixed.copy_from_slice(new);
        return;
    }
    let most = if new_max > *max { new_max } else { *max };
    let (old_scale, new_scale) = (exp::<M>(*max - most), exp::<M>(new_max - most));
    *max = most;
    *sum = M::mul_add(new_sum, new_scale, *sum * old_scale);
    for (mixed, new) in mixed.iter_mut().zip(new) {
        *mixed = M::mul_add(*new, new_scale, *mixed * old_scale);
    }
}
