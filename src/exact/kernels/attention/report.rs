//! Probabilities that are reported: sums over all queries, or those of the last ones.

use std::ops::Range;

use super::{Heads, block::SLOTS, pieces::Piece};
use crate::exact::kernels::{
    math::exp,
    rounding::{Fused, MulAdd, Rounding, Separate},
    threads,
};

/// What is reported of one sequence.
pub(crate) enum Report<'a> {
    /// Nothing.
    Nothing,
    /// The sum over all queries, `[heads, slots]`.
    ColumnSums { kept: Kept, out: &'a mut [f32] },
    /// Those of the last `count` queries, `[heads, rows, slots]`. The last query of the sequence is the last row.
    LastQueries {
        kept: Kept,
        out: &'a mut [f32],
        rows: usize,
        /// The first token that is reported.
        first: usize,
        /// Its row.
        row: usize,
    },
}

/// Exponentials of the tokens under way.
#[derive(Default)]
pub(crate) struct Kept(Vec<Block>);

/// The exponentials of some rows of a KV head for one block.
struct Block {
    kv_head: usize,
    rows: Range<usize>,
    /// Pieces as slots of the block, and the slots of the report from which they are counted.
    pieces: Vec<(Range<usize>, usize)>,
    max: Vec<f32>,
    weights: Vec<[f32; SLOTS]>,
}

impl Report<'_> {
    pub(super) const fn is_some(&self) -> bool {
        !matches!(self, Self::Nothing)
    }

    /// Whether a query of these tokens is reported.
    pub(super) const fn wants(&self, tokens: &Range<usize>) -> bool {
        match self {
            Self::Nothing => false,
            Self::ColumnSums { .. } => true,
            Self::LastQueries { first, .. } => *first < tokens.end,
        }
    }

    /// Keeps the exponentials of a unit.
    pub(super) fn keep(
        &mut self,
        kv_head: usize,
        rows: Range<usize>,
        pieces: &[Piece],
        max: Vec<f32>,
        weights: Vec<[f32; SLOTS]>,
    ) {
        let (Self::ColumnSums { kept, .. } | Self::LastQueries { kept, .. }) = self else {
            return;
        };
        let slots = |piece: &Piece| (piece.slots(), piece.index);
        kept.0.push(Block {
            kv_head,
            rows,
            pieces: pieces.iter().map(slots).collect(),
            max,
            weights,
        });
    }

    /// Turns what was kept into probabilities and reports them. `finals` are the maxima and sums of the rows of each KV
    /// head; the first row is of `first_token`.
    pub(super) fn add<'f>(
        &mut self,
        heads: Heads,
        first_token: usize,
        finals: impl Iterator<Item = (&'f [f32], &'f [f32])>,
    ) {
        match Rounding::current() {
            Rounding::Fused => self.add_rounded::<Fused>(heads, first_token, finals),
            Rounding::Separate => self.add_rounded::<Separate>(heads, first_token, finals),
        }
    }

    fn add_rounded<'f, M: MulAdd>(
        &mut self,
        heads: Heads,
        first_token: usize,
        finals: impl Iterator<Item = (&'f [f32], &'f [f32])>,
    ) {
        let finals: Vec<_> = finals.collect();
        let group = heads.group();
        // The factor that makes probabilities of a row of a block, and the row within the block.
        let of_head = |kept: &Kept, head: usize, each: Each<'_>| {
            let (kv_head, lane) = (head / group, head % group);
            for block in kept.0.iter().filter(|block| block.kv_head == kv_head) {
                for (index, row) in block.rows.clone().enumerate() {
                    if row % group == lane {
                        let (max, sum) = (finals[kv_head].0[row], finals[kv_head].1[row]);
                        let factor = exp::<M>(block.max[index] - max) / sum;
                        if block.max[index] != f32::NEG_INFINITY {
                            each(
                                first_token + row / group,
                                block,
                                &block.weights[index],
                                factor,
                            );
                        }
                    }
                }
            }
        };
        match self {
            Self::Nothing => {}
            Self::ColumnSums { kept, out } => {
                let kept = std::mem::take(kept);
                let slots = out.len() / heads.heads;
                threads::chunks(out, slots.max(1), |head, out| {
                    of_head(&kept, head, &mut |_, block, weights, factor| {
                        for (from, to) in &block.pieces {
                            let out = &mut out[*to..][..from.len()];
                            for (out, weight) in out.iter_mut().zip(&weights[from.clone()]) {
                                *out = M::mul_add(*weight, factor, *out);
                            }
                        }
                    });
                });
            }
            Self::LastQueries {
                kept,
                out,
                rows,
                first,
                row,
            } => {
                let kept = std::mem::take(kept);
                let slots = out.len() / (heads.heads * *rows).max(1);
                for (head, out) in out.chunks_mut((*rows * slots).max(1)).enumerate() {
                    of_head(&kept, head, &mut |token, block, weights, factor| {
                        if token < *first {
                            return;
                        }
                        let at = (*row + token - *first) * slots;
                        for (from, to) in &block.pieces {
                            let out = &mut out[at + to..][..from.len()];
                            for (out, weight) in out.iter_mut().zip(&weights[from.clone()]) {
                                *out = weight * factor;
                            }
                        }
                    });
                }
            }
        }
    }
}

/// Receives a token, a block, the exponentials of one of its rows, and their factor.
type Each<'a> = &'a mut dyn FnMut(usize, &Block, &[f32; SLOTS], f32);
