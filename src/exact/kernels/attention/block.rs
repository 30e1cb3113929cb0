//! One block of slots for a few queries, and how blocks are merged.
//!
//! A score is one chain of fused multiply-adds along `head_dim`, an output one along the slots. The maximum and the sum
//! of the exponentials are the block's own; the sum is kept in 32 lanes (slot modulo 32) that are folded by halves.

use std::ops::Range;

use super::pieces::{Entries, Piece, Sight, Stored};
use crate::exact::{
    ATTENTION_BLOCK,
    kernels::{
        PANEL,
        math::{exp, softcap},
        rounding::MulAdd,
        rows::fold,
        simd::Kernel,
    },
};

/// Slots of a block.
pub(super) const SLOTS: usize = ATTENTION_BLOCK;

/// Scores of `R` queries for the slots of a block.
pub(super) type Scores<const R: usize> = [[f32; SLOTS]; R];

/// What is known of some queries after some blocks: for each the maximum, the sum, and the output.
pub(super) struct State<'a> {
    pub(super) max: &'a mut [f32],
    pub(super) sum: &'a mut [f32],
    pub(super) mixed: &'a mut [f32],
}

/// A block for up to `R` queries, `LANES` columns at a time.
pub(super) struct Block<'a, 'b, T, const R: usize, const LANES: usize> {
    /// Queries side by side, scaled: `[head_dim, R]`.
    pub(super) query: &'a [[f32; R]],
    /// What each query sees. Further queries of the tile are not used.
    pub(super) sights: &'a [Sight],
    pub(super) entries: &'a [Entries<'b, T>],
    /// The pieces of the block.
    pub(super) pieces: &'a [Piece],
    pub(super) softcap: Option<f32>,
    /// Afterwards the exponentials below each query's maximum, 0 where it does not see a slot.
    pub(super) scores: &'a mut Scores<R>,
    /// The block is merged into what is known of the queries.
    pub(super) state: State<'a>,
    /// `[R, head_dim]`.
    pub(super) mixed: &'a mut [f32],
}

impl<T: Stored, const R: usize, const LANES: usize> Kernel for Block<'_, '_, T, R, LANES> {
    type Output = ();

    #[inline(always)]
    fn call<M: MulAdd>(mut self) {
        let head_dim = self.query.len();
        // Slots of whole panels around the pieces; what no piece covers is invisible.
        let low = self.pieces.first().map_or(0, |p| p.at / PANEL * PANEL);
        let last = self.pieces.last();
        let high = last.map_or(0, |p| p.slots().end.next_multiple_of(PANEL));
        let seen = self.score::<M>(low..high);
        let State { max, sum, mixed } = self.state;
        let mut news = [(0.0, 0.0); R];
        for (scores, new) in self.scores.iter_mut().zip(&mut news) {
            let scores = &mut scores[low..high];
            if let Some(cap) = self.softcap {
                for score in &mut *scores {
                    let capped = softcap::<M>(*score, cap);
                    *score = if *score == f32::NEG_INFINITY {
                        *score
                    } else {
                        capped
                    };
                }
            }
            *new = soften::<M>(scores);
        }
        let whole = head_dim / LANES * LANES;
        macro_rules! columns {
            ($columns:expr, $lanes:expr) => {
                for column in $columns {
                    let mut sums = [[0.0; $lanes]; R];
                    for piece in self.pieces {
                        let values = self.entries[piece.segment].values;
                        let slots = piece.slots();
                        let slots = slots.start.max(seen.start)..slots.end.min(seen.end);
                        if !slots.is_empty() {
                            let from = (piece.from + slots.start - piece.at) * head_dim;
                            let values = &values[from..][..slots.len() * head_dim];
                            let at = (head_dim, column);
                            mix::<M, T, R, _>(self.scores, slots.start, values, at, &mut sums);
                        }
                    }
                    for r in 0..R {
                        self.mixed[r * head_dim + column..][..$lanes].copy_from_slice(&sums[r]);
                    }
                }
            };
        }
        columns!((0..whole).step_by(LANES), LANES);
        columns!(whole..head_dim, 1);
        let states = max
            .iter_mut()
            .zip(sum)
            .zip(mixed.chunks_exact_mut(head_dim));
        let news = news.into_iter().zip(self.mixed.chunks_exact(head_dim));
        for (((max, sum), mixed), (new, new_mixed)) in states.zip(news) {
            merge::<M>((max, sum), mixed, new, new_mixed);
        }
    }
}

impl<T: Stored, const R: usize, const LANES: usize> Block<'_, '_, T, R, LANES> {
    /// Computes the scores in a range of whole panels, -∞ where a query does not see a slot. Returns the slots between
    /// which a query sees any.
    #[inline(always)]
    fn score<M: MulAdd>(&mut self, range: Range<usize>) -> Range<usize> {
        let (head_dim, scores) = (self.query.len(), &mut *self.scores);
        let sights = self.sights.iter().copied();
        let any = sights.clone().reduce(Sight::with).unwrap_or(Sight::NOTHING);
        let mut seen = range.end..range.start;
        let mut covered = range.start;
        for piece in self.pieces {
            let entries = &self.entries[piece.segment];
            let slots = piece.slots();
            let positions = &entries.positions[piece.from..piece.to];
            let mut sights = sights.clone();
            let all = sights.all(|sight| sight.sees(piece.lowest) && sight.sees(piece.highest));
            for row in scores.iter_mut() {
                row[covered..slots.start].fill(f32::NEG_INFINITY);
            }
            for panel in piece.from / PANEL..piece.to.div_ceil(PANEL) {
                let keys = &entries.keys[panel * head_dim..(panel + 1) * head_dim];
                let at = (entries.start + panel * PANEL) % SLOTS;
                let inside = slots.start.max(at)..slots.end.min(at + PANEL);
                let positions = &positions[inside.start - slots.start..][..inside.len()];
                if !all && !positions.iter().any(|&position| any.sees(position)) {
                    for row in scores.iter_mut() {
                        row[inside.clone()].fill(f32::NEG_INFINITY);
                    }
                    continue;
                }
                seen = seen.start.min(inside.start)..inside.end;
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
            if !all {
                for (row, sight) in scores.iter_mut().zip(self.sights) {
                    for (score, &position) in row[slots.clone()].iter_mut().zip(positions) {
                        if !sight.sees(position) {
                            *score = f32::NEG_INFINITY;
                        }
                    }
                }
            }
            covered = slots.end;
        }
        for row in scores.iter_mut() {
            row[covered..range.end].fill(f32::NEG_INFINITY);
        }
        seen
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

/// Continues the outputs of `LANES` columns from `column` on over the slots from `first` on, whose values these are.
#[inline(always)]
fn mix<M: MulAdd, T: Stored, const R: usize, const LANES: usize>(
    weights: &Scores<R>,
    first: usize,
    values: &[T],
    (head_dim, column): (usize, usize),
    sums: &mut [[f32; LANES]; R],
) {
    let mut chains = *sums;
    for (index, value) in values.chunks_exact(head_dim).enumerate() {
        // Slots of a block: the remainder tells the compiler that they are.
        let slot = (first + index) % SLOTS;
        let value = &value[column..column + LANES];
        let mut wide = [0.0; LANES];
        for j in 0..LANES {
            wide[j] = value[j].widen();
        }
        for r in 0..R {
            for j in 0..LANES {
                chains[r][j] = M::mul_add(weights[r][slot], wide[j], chains[r][j]);
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
    for panel in panels {
        // Half a panel at a time stays in registers.
        let halves = panel.chunks_exact_mut(PANEL / 2);
        for (scores, sums) in halves.zip(sums.chunks_exact_mut(PANEL / 2)) {
            for j in 0..PANEL / 2 {
                let e = exp::<M>(scores[j] - max);
                scores[j] = if scores[j] == f32::NEG_INFINITY {
                    0.0
                } else {
                    e
                };
                sums[j] += scores[j];
            }
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
