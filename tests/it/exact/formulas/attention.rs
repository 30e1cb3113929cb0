//! Attention by its formula.

use std::{collections::BTreeMap, num::NonZeroUsize};

use burn::tensor::{DType, Tensor, bf16, f16};
use kv_direct::{
    exact::{
        ATTENTION_BLOCK, AttentionParams, PANEL, Segment, attention, attention_with_column_sums,
        attention_with_last_queries,
    },
    positions::Positions,
};

use super::{chain, equal, exp, fma, fold, numbers, tanh, tensor};

/// Some slots of one sequence.
struct Part {
    start: usize,
    /// For each KV head, or for all: the position of each slot.
    positions: Vec<Vec<usize>>,
    /// `[kv_heads, slots, head_dim]`.
    keys: Vec<f32>,
    values: Vec<f32>,
}

/// A call of attention.
struct Case {
    name: &'static str,
    sizes: Sizes,
    queries: Positions,
    sequences: Vec<Vec<Part>>,
    stored: DType,
    window: Option<usize>,
    softcap: Option<f32>,
}

#[derive(Clone, Copy)]
struct Sizes {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
}

/// What attention returns: the outputs, the column sums, and the probabilities of the last queries.
struct Expected {
    out: Vec<f32>,
    sums: Vec<f32>,
    last: Vec<f32>,
}

const SCALE: f32 = 0.3;
const LAST: usize = 6;

impl Part {
    fn slots(&self) -> usize {
        self.positions[0].len()
    }
}

impl Case {
    fn slots(&self) -> usize {
        let slots = |parts: &Vec<Part>| parts.iter().map(Part::slots).sum();
        self.sequences.iter().map(slots).max().unwrap_or(0)
    }

    fn expected(&self, query: &[f32]) -> Expected {
        let Sizes {
            heads,
            kv_heads,
            head_dim,
        } = self.sizes;
        let (tokens, slots) = (self.queries.tokens(), self.slots());
        let batch = self.sequences.len();
        let mut out = vec![0.0; tokens * heads * head_dim];
        let mut sums = vec![0.0; batch * heads * slots];
        let lengths = (0..batch).map(|sequence| self.queries.rows(sequence).len());
        let rows = LAST.min(lengths.max().unwrap_or(0));
        let mut last = vec![0.0; batch * heads * rows * slots];
        for (sequence, parts) in self.sequences.iter().enumerate() {
            let positions = self.queries.slots(sequence, 0);
            let count = positions.iter().filter(|p| **p != Positions::EMPTY).count();
            for (head, token) in (0..heads).flat_map(|h| (0..count).map(move |t| (h, t))) {
                let row = self.queries.rows(sequence).start + token;
                let from = (head * tokens + row) * head_dim;
                let query: Vec<f32> = query[from..from + head_dim]
                    .iter()
                    .map(|x| x * SCALE)
                    .collect();
                let kv_head = head / (heads / kv_heads);
                let blocks = self.blocks(parts, kv_head, &query, positions[token]);
                let Some((max, sum, mixed)) = merged(&blocks) else {
                    continue;
                };
                let at = (row * heads + head) * head_dim;
                for (out, mixed) in out[at..].iter_mut().zip(mixed) {
                    *out = mixed / sum + 0.0;
                }
                for block in &blocks {
                    let factor = exp(block.max - max) / sum;
                    for (slot, weight) in &block.weights {
                        let total = &mut sums[(sequence * heads + head) * slots + slot];
                        *total = fma(*weight, factor, *total);
                        if token + rows >= count {
                            let row = token + rows - count;
                            let at = ((sequence * heads + head) * rows + row) * slots + slot;
                            last[at] = weight * factor;
                        }
                    }
                }
            }
        }
        Expected { out, sums, last }
    }

    /// The blocks that this query sees, in rising order. Slots that it does not see are left out.
    fn blocks(&self, parts: &[Part], kv_head: usize, query: &[f32], at: usize) -> Vec<Block> {
        let head_dim = self.sizes.head_dim;
        let mut blocks: BTreeMap<usize, Vec<Seen<'_>>> = BTreeMap::new();
        let mut before = 0;
        for part in parts {
            let list = &part.positions[kv_head.min(part.positions.len() - 1)];
            for (slot, &position) in list.iter().enumerate() {
                let seen = position != Positions::EMPTY
                    && position <= at
                    && self.window.is_none_or(|window| at - position < window);
                if seen {
                    let row = (kv_head * part.slots() + slot) * head_dim;
                    let key = &part.keys[row..row + head_dim];
                    let mut score = chain(query.iter().copied().zip(key.iter().copied()));
                    if let Some(cap) = self.softcap {
                        score = cap * tanh(score / cap);
                    }
                    let value = &part.values[row..row + head_dim];
                    let number = part.start + slot;
                    let block = blocks.entry(number / ATTENTION_BLOCK).or_default();
                    block.push(Seen {
                        number,
                        slot: before + slot,
                        score,
                        value,
                    });
                }
            }
            before += part.slots();
        }
        let block = |slots: Vec<Seen<'_>>| {
            let scores = slots.iter().map(|seen| seen.score);
            let max = scores.fold(f32::NEG_INFINITY, f32::max);
            let (mut lanes, mut mixed) = (vec![0.0; 32], vec![0.0; head_dim]);
            let mut weights = Vec::new();
            for seen in slots {
                let weight = exp(seen.score - max);
                lanes[seen.number % 32] += weight;
                for (mixed, value) in mixed.iter_mut().zip(seen.value) {
                    *mixed = fma(weight, *value, *mixed);
                }
                weights.push((seen.slot, weight));
            }
            Block {
                max,
                sum: fold(lanes),
                mixed,
                weights,
            }
        };
        blocks.into_values().map(block).collect()
    }

    fn check(&self) {
        let Sizes {
            heads, head_dim, ..
        } = self.sizes;
        let tokens = self.queries.tokens();
        let query = numbers(13, heads * tokens * head_dim, 2.0);
        let expected = self.expected(&query);
        let segments: Vec<Vec<Segment>> = self
            .sequences
            .iter()
            .map(|parts| parts.iter().map(|part| self.segment(part)).collect())
            .collect();
        let query = tensor(&query, [1, heads, tokens, head_dim]);
        let mut params = AttentionParams::new(f64::from(SCALE));
        params.window = self.window.and_then(NonZeroUsize::new);
        params.softcap = self.softcap.map(f64::from);
        let (name, positions) = (self.name, &self.queries);
        let out = attention(query.clone(), positions, &segments, &params);
        self.outputs(&out, &expected.out, name);
        let (out, sums) = attention_with_column_sums(query.clone(), positions, &segments, &params);
        self.outputs(&out, &expected.out, name);
        equal(&sums, &expected.sums, &format!("{name}, column sums"));
        let (out, last) = attention_with_last_queries(query, positions, &segments, &params, LAST);
        self.outputs(&out, &expected.out, name);
        equal(&last, &expected.last, &format!("{name}, last queries"));
    }

    /// Compares the outputs of real queries: pads have no meaning.
    fn outputs(&self, found: &Tensor<3>, expected: &[f32], name: &str) {
        let width = self.sizes.heads * self.sizes.head_dim;
        for sequence in 0..self.sequences.len() {
            let real = self.queries.slots(sequence, 0).iter();
            let count = real.filter(|p| **p != Positions::EMPTY).count();
            if count > 0 {
                let row = self.queries.rows(sequence).start;
                let found = found.clone().slice_dim(1, row..row + count);
                let from = row * width;
                equal(&found, &expected[from..from + count * width], name);
            }
        }
    }

    fn segment(&self, part: &Part) -> Segment {
        let shape = [self.sizes.kv_heads, part.slots(), self.sizes.head_dim];
        let rows = |of: &[f32]| tensor(of, shape).cast(self.stored);
        Segment::from_rows(
            rows(&part.keys),
            rows(&part.values),
            part.positions.clone(),
            part.start,
        )
    }
}

/// A slot that a query sees.
struct Seen<'a> {
    number: usize,
    /// Its index in the report.
    slot: usize,
    score: f32,
    value: &'a [f32],
}

struct Block {
    max: f32,
    sum: f32,
    mixed: Vec<f32>,
    /// Slots in the report, and their exponentials.
    weights: Vec<(usize, f32)>,
}

/// The blocks merged in rising order; nothing if there is none.
fn merged(blocks: &[Block]) -> Option<(f32, f32, Vec<f32>)> {
    let mut blocks = blocks.iter();
    let first = blocks.next()?;
    let (mut max, mut sum, mut mixed) = (first.max, first.sum, first.mixed.clone());
    for block in blocks {
        let most = max.max(block.max);
        let (old, new) = (exp(max - most), exp(block.max - most));
        (max, sum) = (most, fma(block.sum, new, sum * old));
        for (mixed, value) in mixed.iter_mut().zip(&block.mixed) {
            *mixed = fma(*value, new, *mixed * old);
        }
    }
    Some((max, sum, mixed))
}

/// Slots from number `start` on, with these positions and entries of noise, rounded to `stored`.
fn part(
    seed: u64,
    sizes: Sizes,
    stored: DType,
    start: usize,
    mut positions: Vec<Vec<usize>>,
) -> Part {
    for list in &mut positions {
        list.resize(list.len().next_multiple_of(PANEL), Positions::EMPTY);
    }
    let count = sizes.kv_heads * positions[0].len() * sizes.head_dim;
    let entries = |seed| {
        let numbers = numbers(seed, count, 2.0).into_iter();
        let rounded = numbers.map(|x| match stored {
            DType::BF16 => bf16::from_f32(x).to_f32(),
            DType::F16 => f16::from_f32(x).to_f32(),
            _ => x,
        });
        rounded.collect()
    };
    Part {
        start,
        positions,
        keys: entries(seed),
        values: entries(seed + 100),
    }
}

const GROUPED: Sizes = Sizes {
    heads: 4,
    kv_heads: 2,
    head_dim: 20,
};

/// Positions in order behind `free` slots without an entry.
fn behind(free: usize, positions: std::ops::Range<usize>) -> Vec<Vec<usize>> {
    let free = std::iter::repeat_n(Positions::EMPTY, free);
    vec![free.chain(positions).collect()]
}

/// Three segments with every position once. Neighbours share a panel.
fn cut(stored: DType) -> Vec<Part> {
    let part = |seed, start, positions| part(seed, GROUPED, stored, start, positions);
    vec![
        part(20, 0, behind(0, 0..70)),
        part(21, 64, behind(6, 70..505)),
        part(22, 480, behind(25, 505..600)),
    ]
}

#[test]
fn attention_is_blocks_that_are_merged_in_rising_order() {
    for (name, stored) in [
        ("f32", DType::F32),
        ("bf16", DType::BF16),
        ("f16", DType::F16),
    ] {
        for (window, softcap) in [(None, None), (Some(90), Some(1.5)), (Some(300), None)] {
            Case {
                name,
                sizes: GROUPED,
                queries: Positions::contiguous(&[530], &[70]),
                sequences: vec![cut(stored)],
                stored,
                window,
                softcap,
            }
            .check();
        }
    }
}

#[test]
fn attention_of_a_single_query_has_the_same_formula() {
    for (heads, kv_heads, head_dim) in [(3, 1, 64), (4, 4, 16), (14, 2, 8), (1, 1, 100)] {
        let sizes = Sizes {
            heads,
            kv_heads,
            head_dim,
        };
        Case {
            name: "a single query",
            sizes,
            queries: Positions::contiguous(&[699], &[1]),
            sequences: vec![vec![part(23, sizes, DType::F32, 0, behind(0, 0..700))]],
            stored: DType::F32,
            window: None,
            softcap: None,
        }
        .check();
    }
}

/// Free slots among others, positions in no order, and those of each head its own.
#[test]
fn attention_of_heads_with_their_own_positions_has_the_same_formula() {
    let positions = [7, 11].map(|step| {
        let slot = |slot: usize| match slot % 5 {
            0 => Positions::EMPTY,
            _ => slot * step % 509,
        };
        (0..509).map(slot).collect()
    });
    Case {
        name: "heads with their own positions",
        sizes: GROUPED,
        queries: Positions::contiguous(&[300], &[40]),
        sequences: vec![vec![part(24, GROUPED, DType::F32, 32, positions.to_vec())]],
        stored: DType::F32,
        window: Some(120),
        softcap: None,
    }
    .check();
}

/// A long sequence, one without queries, a new one that ends in pads, and one whose first queries see nothing.
#[test]
fn attention_of_a_ragged_batch_has_the_same_formula() {
    let part = |seed, positions| part(seed, GROUPED, DType::F32, 0, positions);
    Case {
        name: "a ragged batch",
        sizes: GROUPED,
        queries: Positions::shared(&[
            (580..600).collect(),
            vec![],
            vec![0, 1, 2, Positions::EMPTY, Positions::EMPTY],
            (95..106).collect::<Vec<_>>(),
        ]),
        sequences: vec![
            cut(DType::F32),
            vec![],
            vec![part(25, behind(0, 0..3))],
            vec![part(26, behind(3, 100..106))],
        ],
        stored: DType::F32,
        window: None,
        softcap: None,
    }
    .check();
}
