//! Attention of the queries of several sequences.
//!
//! Work is cut into units: some queries that share a KV head, and one block of slots. A unit depends on no other, so
//! threads share them out. Then the blocks of each query are merged in rising order.

mod block;
mod pieces;
mod report;

use std::ops::Range;

pub(crate) use self::{
    block::Stored,
    pieces::{Entries, Sight},
    report::Report,
};
use self::{
    block::{Block, Scratch, merge, nothing},
    pieces::Piece,
};
use super::{SimdLevel, rounding::MulAdd, simd::Kernel, threads};
use crate::exact::scratch::{TOKENS, WAVE};

/// The shape of a call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Heads {
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
}

impl Heads {
    /// Query heads that share a KV head.
    pub(crate) const fn group(self) -> usize {
        self.heads / self.kv_heads
    }
}

/// The queries and entries of one sequence.
pub(crate) struct Sequence<'a, T> {
    /// The row of its first query among those of all sequences.
    pub(crate) first_row: usize,
    /// What each query sees, in rising order of tokens.
    pub(crate) sights: Vec<Sight>,
    /// For every KV head, the segments with its entries.
    pub(crate) entries: Vec<Vec<Entries<'a, T>>>,
    /// What is reported of its queries.
    pub(crate) report: Report<'a>,
}

/// What all sequences of a call share.
pub(crate) struct Call<'a> {
    pub(crate) heads: Heads,
    /// The query of a row and a head.
    pub(crate) query: &'a (dyn Fn(usize, usize) -> &'a [f32] + Sync),
    pub(crate) scale: f32,
    pub(crate) softcap: Option<f32>,
}

/// Computes all queries into `out`, `[rows, heads · head_dim]`. It is zero where a query sees nothing.
pub(crate) fn attend<T: Stored>(
    call: &Call<'_>,
    sequences: &mut [Sequence<'_, T>],
    out: &mut [f32],
) {
    let slots = |sequence: &Sequence<'_, T>| {
        let entries = sequence.entries.first().into_iter().flatten();
        let slots: usize = entries.map(|entries| entries.positions.len()).sum();
        slots * usize::from(sequence.report.is_some())
    };
    let reported = sequences.iter().map(slots).sum::<usize>() * call.heads.heads;
    let together = (SCORES / reported.max(1)).clamp(FEWEST_TOKENS, TOKENS);
    let tokens = sequences.iter().map(|sequence| sequence.sights.len()).max();
    let tokens = tokens.unwrap_or(0);
    for from in (0..tokens).step_by(together) {
        let tokens_now = from..(from + together).min(tokens);
        chunk(call, sequences, tokens_now, out);
    }
}

/// The fewest tokens whose queries are computed together where exponentials are kept for a report.
const FEWEST_TOKENS: usize = 8;
/// Exponentials that are kept for a report, unless [`FEWEST_TOKENS`] have more.
const SCORES: usize = 1 << 19;
/// Queries of a unit: a multiple of those of every tile.
const ROWS: usize = 96;
/// Units that a thread takes at a time are at least this many scores.
const GRAIN: usize = 1 << 12;

/// Some queries that share a KV head, and one block of slots.
struct Unit<'a> {
    sequence: usize,
    kv_head: usize,
    rows: Range<usize>,
    pieces: &'a [Piece],
    /// For each row the maximum, the sum, and the output.
    max: Vec<f32>,
    sum: Vec<f32>,
    mixed: Vec<f32>,
    /// For each row the exponentials of the block's slots, where they are reported.
    weights: Option<Vec<[f32; block::SLOTS]>>,
}

/// The merged state of the rows of a sequence and KV head.
struct Rows {
    max: Vec<f32>,
    sum: Vec<f32>,
    mixed: Vec<f32>,
}

fn chunk<T: Stored>(
    call: &Call<'_>,
    sequences: &mut [Sequence<'_, T>],
    now: Range<usize>,
    out: &mut [f32],
) {
    let Heads {
        heads,
        kv_heads,
        head_dim,
    } = call.heads;
    let group = call.heads.group();
    // What is read: for every sequence and KV head, the pieces that a query sees.
    let mut pieces: Vec<Vec<Piece>> = Vec::with_capacity(sequences.len() * kv_heads);
    let mut states: Vec<Rows> = Vec::with_capacity(pieces.capacity());
    for sequence in &*sequences {
        let count = sequence.sights.len();
        let sights = &sequence.sights[now.start.min(count)..now.end.min(count)];
        let seen = sights.iter().copied().reduce(Sight::with);
        for entries in &sequence.entries {
            pieces.push(seen.map_or_else(Vec::new, |seen| pieces::pieces(entries, seen)));
            let rows = sights.len() * group;
            states.push(Rows {
                max: vec![f32::NEG_INFINITY; rows],
                sum: vec![0.0; rows],
                mixed: vec![0.0; rows * head_dim],
            });
        }
    }
    let blocks: Vec<Vec<&[Piece]>> = pieces
        .iter()
        .map(|pieces| {
            pieces
                .chunk_by(|one, next| one.block == next.block)
                .collect()
        })
        .collect();
    let most = blocks.iter().map(Vec::len).max().unwrap_or(0);
    for from in (0..most).step_by(WAVE) {
        let mut units = Vec::new();
        for (index, (blocks, state)) in blocks.iter().zip(&states).enumerate() {
            let (sequence, kv_head) = (index / kv_heads, index % kv_heads);
            let reported = sequences[sequence].report.wants(&now);
            for pieces in blocks.iter().skip(from).take(WAVE) {
                for first in (0..state.max.len()).step_by(ROWS) {
                    let rows = first..(first + ROWS).min(state.max.len());
                    units.push(Unit {
                        sequence,
                        kv_head,
                        pieces,
                        max: vec![0.0; rows.len()],
                        sum: vec![0.0; rows.len()],
                        mixed: vec![0.0; rows.len() * head_dim],
                        weights: reported.then(|| vec![[0.0; block::SLOTS]; rows.len()]),
                        rows,
                    });
                }
            }
        }
        let scores: usize = units.iter().map(|u| u.rows.len() * block::SLOTS).sum();
        let shares = (scores / GRAIN).clamp(1, 2 * threads::count());
        let grain = units.len().div_ceil(shares).max(1);
        let (sequences_now, first) = (&*sequences, now.start);
        threads::chunks(&mut units, grain, |_, units| {
            let simd = SimdLevel::current();
            for unit in units {
                unit.compute(call, simd, &sequences_now[unit.sequence], first);
            }
        });
        SimdLevel::current().run(Merging {
            units: &units,
            states: &mut states,
            heads: call.heads,
        });
        // Exponentials are turned into probabilities when the maximum is final: all blocks are needed for that.
        for unit in units {
            let index = unit.sequence * kv_heads + unit.kv_head;
            if let Some(weights) = unit.weights {
                let report = &mut sequences[unit.sequence].report;
                report.keep(index % kv_heads, unit.rows, unit.pieces, unit.max, weights);
            }
        }
    }
    let width = heads * head_dim;
    for (index, state) in states.iter().enumerate() {
        let (sequence, kv_head) = (index / kv_heads, index % kv_heads);
        for (row, mixed) in state.mixed.chunks_exact(head_dim).enumerate() {
            let token = sequences[sequence].first_row + now.start + row / group;
            let at = token * width + (kv_head * group + row % group) * head_dim;
            let sum = state.sum[row];
            if nothing(state.max[row], sum) {
                continue;
            }
            // Adding 0 turns -0 into 0: it depends on how many invisible slots were read.
            for (out, mixed) in out[at..at + head_dim].iter_mut().zip(mixed) {
                *out = mixed / sum + 0.0;
            }
        }
    }
    for (sequence, states) in sequences.iter_mut().zip(states.chunks(kv_heads)) {
        let finals = states.iter().map(|rows| (&rows.max[..], &rows.sum[..]));
        sequence.report.add(call.heads, now.start, finals);
    }
}

/// Merges what units computed, in rising order of blocks.
struct Merging<'a, 'b> {
    units: &'a [Unit<'b>],
    states: &'a mut [Rows],
    heads: Heads,
}

impl Kernel for Merging<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn call<M: MulAdd>(self) {
        let head_dim = self.heads.head_dim;
        for unit in self.units {
            let state = &mut self.states[unit.sequence * self.heads.kv_heads + unit.kv_head];
            for (index, row) in unit.rows.clone().enumerate() {
                merge::<M>(
                    (&mut state.max[row], &mut state.sum[row]),
                    &mut state.mixed[row * head_dim..][..head_dim],
                    (unit.max[index], unit.sum[index]),
                    &unit.mixed[index * head_dim..][..head_dim],
                );
            }
        }
    }
}

impl Unit<'_> {
    /// Computes the rows in tiles of as many as suit the vector registers.
    fn compute<T: Stored>(
        &mut self,
        call: &Call<'_>,
        simd: SimdLevel,
        sequence: &Sequence<'_, T>,
        first_token: usize,
    ) {
        let mut from = 0;
        while from < self.rows.len() {
            let left = self.rows.len() - from;
            macro_rules! tiles {
                ($rows:literal, $lanes:literal) => {{
                    let to = from + (left / $rows).max(1) * $rows;
                    let rows = from..to.min(self.rows.len());
                    self.tiles::<T, $rows, $lanes>(call, simd, sequence, first_token, rows);
                    to
                }};
            }
            from = match (simd, left) {
                (SimdLevel::Avx512, 12..) => tiles!(12, 32),
                (_, 1) => tiles!(1, 32),
                (_, 2) => tiles!(2, 32),
                (_, 3) => tiles!(3, 32),
                (_, 4) => tiles!(4, 16),
                _ => tiles!(6, 16),
            };
        }
    }

    /// Computes some of the rows, `R` at a time.
    fn tiles<T: Stored, const R: usize, const LANES: usize>(
        &mut self,
        call: &Call<'_>,
        simd: SimdLevel,
        sequence: &Sequence<'_, T>,
        first_token: usize,
        rows: Range<usize>,
    ) {
        let (head_dim, group) = (call.heads.head_dim, call.heads.group());
        let mut query = vec![[0.0; R]; head_dim];
        let mut mixed = vec![0.0; R * head_dim];
        let mut scratch = Scratch::new();
        for from in rows.clone().step_by(R) {
            let count = R.min(rows.end - from);
            let mut sights = [Sight::NOTHING; R];
            for (r, sight) in sights.iter_mut().enumerate().take(count) {
                let row = self.rows.start + from + r;
                let token = first_token + row / group;
                let head = self.kv_head * group + row % group;
                *sight = sequence.sights[token];
                let values = (call.query)(sequence.first_row + token, head);
                for (lanes, value) in query.iter_mut().zip(values) {
                    lanes[r] = value * call.scale;
                }
            }
            let (mut max, mut sum) = ([0.0; R], [0.0; R]);
            simd.run(Block::<T, R, LANES> {
                query: &query,
                sights: &sights,
                entries: &sequence.entries[self.kv_head],
                pieces: self.pieces,
                softcap: call.softcap,
                scratch: &mut scratch,
                max: &mut max,
                sum: &mut sum,
                mixed: &mut mixed,
            });
            self.max[from..from + count].copy_from_slice(&max[..count]);
            self.sum[from..from + count].copy_from_slice(&sum[..count]);
            let to = &mut self.mixed[from * head_dim..][..count * head_dim];
            to.copy_from_slice(&mixed[..count * head_dim]);
            if let Some(weights) = &mut self.weights {
                weights[from..from + count].copy_from_slice(&scratch.scores()[..count]);
            }
        }
    }
}

#[cfg(test)]
mod tests;
