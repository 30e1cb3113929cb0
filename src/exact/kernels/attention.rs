//! Attention of the queries of several sequences.
//!
//! Work is cut into units: some queries that share a KV head, and one block of slots, or all of them. A unit depends on
//! no other, so threads share them out. The blocks of each query are merged in rising order.

mod block;
mod pieces;
mod report;
mod unit;

use std::ops::Range;

use self::{
    block::{merge, nothing},
    pieces::Piece,
};
pub(crate) use self::{
    pieces::{Entries, Sight, Stored},
    report::Report,
};
use super::{SimdLevel, rounding::MulAdd, simd::Kernel, threads};
use crate::exact::scratch::{FEW_TOKENS, TOKENS, blocks_at_once};

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
    let together = match reported {
        0 => TOKENS,
        _ => (SCORES / reported).clamp(FEWEST_TOKENS, FEW_TOKENS),
    };
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

/// Some queries of a sequence that share a KV head, and consecutive blocks of slots.
struct Unit<'a> {
    sequence: usize,
    kv_head: usize,
    rows: Range<usize>,
    /// The pieces of each block.
    blocks: &'a [&'a [Piece]],
    known: Known,
    /// For each row the exponentials of the slots of the only block, where they are reported.
    weights: Option<Vec<[f32; block::SLOTS]>>,
}

/// What is known of some rows after some blocks.
struct Known {
    max: Vec<f32>,
    sum: Vec<f32>,
    mixed: Vec<f32>,
}

impl Known {
    /// Before the first block.
    fn nothing(rows: usize, head_dim: usize) -> Self {
        Self {
            max: vec![f32::NEG_INFINITY; rows],
            sum: vec![0.0; rows],
            mixed: vec![0.0; rows * head_dim],
        }
    }
}

/// Computes the queries of some tokens of every sequence.
fn chunk<T: Stored>(
    call: &Call<'_>,
    sequences: &mut [Sequence<'_, T>],
    now: Range<usize>,
    out: &mut [f32],
) {
    let Heads {
        kv_heads, head_dim, ..
    } = call.heads;
    let group = call.heads.group();
    // What is read: for every sequence and KV head, the pieces that a query sees.
    let mut pieces: Vec<Vec<Piece>> = Vec::with_capacity(sequences.len() * kv_heads);
    let mut rows: Vec<usize> = Vec::with_capacity(pieces.capacity());
    let mut reported = false;
    for sequence in &*sequences {
        let count = sequence.sights.len();
        let sights = &sequence.sights[now.start.min(count)..now.end.min(count)];
        let seen = sights.iter().copied().reduce(Sight::with);
        for entries in &sequence.entries {
            pieces.push(seen.map_or_else(Vec::new, |seen| pieces::pieces(entries, seen)));
            rows.push(sights.len() * group);
        }
        reported |= sequence.report.wants(&now);
    }
    let blocks: Vec<Vec<&[Piece]>> = pieces
        .iter()
        .map(|pieces| {
            let blocks = pieces.chunk_by(|one, next| one.block == next.block);
            blocks.collect()
        })
        .collect();
    let most = blocks.iter().map(Vec::len).max().unwrap_or(0);
    // Threads share out rows where there are enough of them, else also blocks, some of them at a time.
    let by_rows = !reported
        && rows.iter().map(|rows| rows.div_ceil(ROWS)).sum::<usize>() >= ENOUGH * threads::count();
    let (each, wave) = match by_rows {
        true => (most, most),
        false => (1, blocks_at_once(now.len())),
    };
    // What blocks of different units are merged into: nothing where a unit has all of its rows' blocks.
    let merged = if by_rows { &[] } else { &rows[..] };
    let mut known: Vec<Known> = merged
        .iter()
        .map(|&rows| Known::nothing(rows, head_dim))
        .collect();
    for from in (0..most).step_by(wave.max(1)) {
        let mut units = Vec::new();
        for (index, (blocks, &rows)) in blocks.iter().zip(&rows).enumerate() {
            let (sequence, kv_head) = (index / kv_heads, index % kv_heads);
            let reported = sequences[sequence].report.wants(&now);
            let blocks = &blocks[from.min(blocks.len())..(from + wave).min(blocks.len())];
            for blocks in blocks.chunks(each) {
                for first in (0..rows).step_by(ROWS) {
                    let rows = first..(first + ROWS).min(rows);
                    units.push(Unit {
                        sequence,
                        kv_head,
                        blocks,
                        known: Known::nothing(rows.len(), head_dim),
                        weights: reported.then(|| vec![[0.0; block::SLOTS]; rows.len()]),
                        rows,
                    });
                }
            }
        }
        let slots = |unit: &Unit<'_>| unit.rows.len() * unit.blocks.len() * block::SLOTS;
        let scores: usize = units.iter().map(slots).sum();
        let shares = (scores / GRAIN).clamp(1, SHARES * threads::count());
        let grain = units.len().div_ceil(shares).max(1);
        let (sequences_now, first) = (&*sequences, now.start);
        threads::chunks(&mut units, grain, |_, units| {
            let simd = SimdLevel::current();
            for unit in units {
                unit.compute(call, simd, &sequences_now[unit.sequence], first);
            }
        });
        if by_rows {
            for unit in units {
                let first_row = sequences[unit.sequence].first_row + now.start;
                write(
                    call,
                    first_row,
                    unit.kv_head,
                    unit.rows.start,
                    &unit.known,
                    out,
                );
            }
            return;
        }
        SimdLevel::current().run(Merging {
            units: &units,
            known: &mut known,
            heads: call.heads,
        });
        // Exponentials are turned into probabilities when the maximum is final: all blocks are needed for that.
        for unit in units {
            if let Some(weights) = unit.weights {
                let report = &mut sequences[unit.sequence].report;
                let pieces = unit.blocks.first().copied().unwrap_or_default();
                report.keep(unit.kv_head, unit.rows, pieces, unit.known.max, weights);
            }
        }
    }
    for (index, known) in known.iter().enumerate() {
        let first_row = sequences[index / kv_heads].first_row + now.start;
        write(call, first_row, index % kv_heads, 0, known, out);
    }
    for (sequence, known) in sequences.iter_mut().zip(known.chunks(kv_heads)) {
        let finals = known.iter().map(|rows| (&rows.max[..], &rows.sum[..]));
        sequence.report.add(call.heads, now.start, finals);
    }
}

/// Units for each thread that are enough to keep all of them busy.
const ENOUGH: usize = 2;
/// Shares of units for each thread: more than one, so that a thread that is slow takes fewer.
const SHARES: usize = 4;

/// Divides what is known of the rows of a KV head, `row` and those after it, by their sums. `first_row` is the first
/// row of the sequence now.
fn write(
    call: &Call<'_>,
    first_row: usize,
    kv_head: usize,
    row: usize,
    known: &Known,
    out: &mut [f32],
) {
    let Heads {
        heads, head_dim, ..
    } = call.heads;
    let group = call.heads.group();
    let sums = known.max.iter().zip(&known.sum);
    let rows = known.mixed.chunks_exact(head_dim).zip(sums);
    for (row, (mixed, (&max, &sum))) in (row..).zip(rows) {
        if nothing(max, sum) {
            continue;
        }
        let head = kv_head * group + row % group;
        let at = ((first_row + row / group) * heads + head) * head_dim;
        // Adding 0 turns -0 into 0: it depends on how many invisible slots were read.
        for (out, mixed) in out[at..at + head_dim].iter_mut().zip(mixed) {
            *out = mixed / sum + 0.0;
        }
    }
}

/// Merges what units of one block each computed, in rising order of blocks.
struct Merging<'a, 'b> {
    units: &'a [Unit<'b>],
    known: &'a mut [Known],
    heads: Heads,
}

impl Kernel for Merging<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn call<M: MulAdd>(self) {
        let head_dim = self.heads.head_dim;
        for unit in self.units {
            let to = &mut self.known[unit.sequence * self.heads.kv_heads + unit.kv_head];
            for (index, row) in unit.rows.clone().enumerate() {
                merge::<M>(
                    (&mut to.max[row], &mut to.sum[row]),
                    &mut to.mixed[row * head_dim..][..head_dim],
                    (unit.known.max[index], unit.known.sum[index]),
                    &unit.known.mixed[index * head_dim..][..head_dim],
                );
            }
        }
    }
}

#[cfg(test)]
mod tests;
