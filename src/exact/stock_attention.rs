//! Attention in stock operations, for devices without kernels of this crate: one block of queries after another.

use std::{num::NonZeroUsize, ops::Range};

use burn::tensor::{Tensor, TensorData};

use super::{
    ATTENTION_BLOCK, Segment,
    attention::{AttentionParams, check_all},
    blocks::{Block, Reach, blocks},
    softcap, zeros,
};
use crate::positions::{Positions, visible};

/// Bytes of temporaries that stock operations hold for the scores of the largest block of queries and for one block of
/// slots, with elements of `element` bytes. A product is held twice while it is computed.
pub(crate) fn stock_attention_scratch(
    (heads, kv_width): (usize, usize),
    tokens: usize,
    slots: usize,
    element: usize,
) -> usize {
    let per_query = heads * slots;
    let fewest = tokens.min(FEWEST_QUERIES) * per_query;
    let scores = (tokens.min(QUERY_BLOCK) * per_query).min(SCORES.max(fewest));
    2 * (scores + kv_width * slots.min(ATTENTION_BLOCK)) * element
}

/// The most queries whose scores are held at a time.
const QUERY_BLOCK: usize = 128;
/// The fewest queries whose scores are held at a time, however many slots they see.
const FEWEST_QUERIES: usize = 16;
/// The most scores held at a time, unless [`FEWEST_QUERIES`] queries have more.
const SCORES: usize = 1 << 19;

/// What a block of queries of one sequence gave.
pub(super) struct Weighted<'a> {
    pub(super) sequence: usize,
    pub(super) queries: Range<usize>,
    /// The blocks of slots that were read, and for each the exponentials `[kv_heads, group · queries, width]`.
    pub(super) blocks: &'a [(&'a Block<'a>, Tensor<3>)],
    /// The sums of the exponentials, `[kv_heads, group · queries, 1]`.
    pub(super) total: &'a Tensor<3>,
}

/// Computes attention for one block of queries after another, and shows each to `observe`.
pub(super) fn run(
    query: Tensor<4>,
    query_positions: &Positions,
    segments: &[Vec<Segment>],
    params: &AttentionParams,
    mut observe: impl FnMut(&Weighted<'_>),
) -> Tensor<3> {
    check_all(&query, query_positions, segments);
    let [_, heads, _, head_dim] = query.dims();
    let width = heads * head_dim;
    let (device, dtype) = (query.device(), query.dtype());
    let query = query.mul_scalar(params.scale);
    let mut parts = Vec::new();
    for (sequence, segments) in segments.iter().enumerate() {
        let rows = query_positions.rows(sequence);
        if rows.is_empty() {
            continue;
        }
        let positions = query_positions.slots(sequence, 0);
        let query = query.clone().slice_dim(2, rows.clone()).squeeze_dim(0);
        let of_sequence = attend(
            &query,
            positions,
            segments,
            params,
            |queries, blocks, total| {
                observe(&Weighted {
                    sequence,
                    queries,
                    blocks,
                    total,
                });
            },
        );
        let computed: usize = of_sequence.iter().map(|part| part.dims()[1]).sum();
        parts.extend(of_sequence);
        if computed < rows.len() {
            let shape = [1, rows.len() - computed, width];
            parts.push(zeros(shape, (&device, dtype)));
        }
    }
    match parts.len() {
        0 => zeros([1, 0, width], (&device, dtype)),
        1 => parts.remove(0),
        _ => Tensor::cat(parts, 1),
    }
}

/// Attention of one sequence: the queries `[heads, tokens, head_dim]`, already scaled, up to the last that is no pad.
/// The result is in parts `[1, queries, heads · head_dim]`; it is empty where no query sees a slot.
fn attend(
    query: &Tensor<3>,
    positions: &[usize],
    segments: &[Segment],
    params: &AttentionParams,
    mut observe: impl FnMut(Range<usize>, &[(&Block<'_>, Tensor<3>)], &Tensor<3>),
) -> Vec<Tensor<3>> {
    let [heads, _, head_dim] = query.dims();
    let real = |&position: &usize| position != Positions::EMPTY;
    let count = positions.iter().rposition(real).map_or(0, |last| last + 1);
    let blocks = blocks(segments);
    let seen_by = |positions: &[usize]| {
        let reach = reach(positions);
        let width =
            move |block: &Block<'_>| reach.map_or(0, |reach| block.width(reach, params.window));
        let read = blocks.iter().map(move |block| (block, width(block)));
        read.filter(|(_, width)| *width > 0).collect::<Vec<_>>()
    };
    let mut parts = Vec::new();
    let mut from = 0;
    while from < count {
        let most = seen_by(&positions[from..count.min(from + QUERY_BLOCK)]);
        let slots: usize = most.iter().map(|(_, width)| width).sum();
        let queries = from..count.min(from + queries_per_block(heads, slots.max(1)));
        from = queries.end;
        let (of_block, read) = (queries.len(), seen_by(&positions[queries.clone()]));
        let Some((first, _)) = read.first() else {
            let options = (&query.device(), query.dtype());
            parts.push(zeros([1, of_block, heads * head_dim], options));
            continue;
        };
        let kv_heads = first.kv_heads();
        let rows = heads / kv_heads * of_block;
        let grouped = query
            .clone()
            .slice_dim(1, queries.clone())
            .reshape([kv_heads, rows, head_dim]);

        let mut max: Option<Tensor<3>> = None;
        let mut weights: Vec<(&Block<'_>, Tensor<3>)> = Vec::new();
        for (block, width) in read {
            let mut scores = grouped.clone().matmul(block.keys(width, query.dtype()));
            if let Some(cap) = params.softcap {
                scores = softcap::stock(scores, cap);
            }
            let mask = mask(&positions[queries.clone()], block, width, params.window);
            let mask = Tensor::<3>::from_data(mask, (&scores.device(), scores.dtype()));
            // The query heads that share a KV head have one mask.
            let scores = scores.reshape([kv_heads, rows / of_block, of_block * width]) + mask;
            let scores = scores.reshape([kv_heads, rows, width]);
            let here = scores.clone().max_dim(2);
            max = Some(max.map_or(here.clone(), |max| max.max_pair(here)));
            weights.push((block, scores));
        }
        let max = max.expect("a block is read");
        let (mut total, mut mixed): (Option<Tensor<3>>, Option<Tensor<3>>) = (None, None);
        for (block, weights) in &mut weights {
            weights.inplace(|scores| (scores - max.clone()).exp());
            let sum = padded(weights.clone()).sum_dim(2);
            let mix = weights
                .clone()
                .matmul(block.values(weights.dims()[2], query.dtype()));
            total = Some(total.map_or(sum.clone(), |total| total + sum));
            mixed = Some(mixed.map_or(mix.clone(), |mixed| mixed + mix));
        }
        let (total, mixed) = total.zip(mixed).expect("a block is read");
        observe(queries, &weights, &total);
        // A sum of nothing but -0 is -0, or +0 where invisible slots added zeros. Adding 0 makes it +0 in both cases.
        let out = (mixed / total)
            .add_scalar(0.0)
            .reshape([heads, of_block, head_dim]);
        let out = out.swap_dims(0, 1);
        parts.push(out.reshape([1, of_block, heads * head_dim]));
    }
    parts
}

/// The number of queries in a block that sees this many slots.
const fn queries_per_block(heads: usize, slots: usize) -> usize {
    let fits = SCORES / (heads * slots) / FEWEST_QUERIES * FEWEST_QUERIES;
    if fits < FEWEST_QUERIES {
        FEWEST_QUERIES
    } else if fits > QUERY_BLOCK {
        QUERY_BLOCK
    } else {
        fits
    }
}

/// The lowest and the highest position of these queries; nothing if all are pads.
fn reach(positions: &[usize]) -> Option<Reach> {
    let real = || positions.iter().copied().filter(|&p| p != Positions::EMPTY);
    real().min().zip(real().max())
}

/// A block of slots padded with zeros, so that its sum has one order however much of it is read.
fn padded(part: Tensor<3>) -> Tensor<3> {
    let [heads, queries, width] = part.dims();
    if width == ATTENTION_BLOCK {
        return part;
    }
    let options = (&part.device(), part.dtype());
    let rest = zeros([heads, queries, ATTENTION_BLOCK - width], options);
    Tensor::cat(vec![part, rest], 2)
}

/// 0 where a query sees a slot and -∞ where it does not: `[1 or kv_heads, 1, queries · width]`.
fn mask(
    query_positions: &[usize],
    block: &Block<'_>,
    width: usize,
    window: Option<NonZeroUsize>,
) -> TensorData {
    let (heads, queries) = (block.positions.len(), query_positions.len());
    let mut mask = Vec::with_capacity(heads * queries * width);
    for keys in &block.positions {
        for &query in query_positions {
            mask.extend(keys[..width].iter().map(|&key| {
                let seen = query == Positions::EMPTY || visible(query, key, window);
                if seen { 0.0f32 } else { f32::NEG_INFINITY }
            }));
        }
    }
    TensorData::new(mask, [heads, 1, queries * width])
}
