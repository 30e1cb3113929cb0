//! Attention: the result of a query does not depend on other queries. The only routine in the crate, for every
//! backend.

use std::{num::NonZeroUsize, ops::Range};

use burn::tensor::{Tensor, TensorData};

#[cfg(feature = "flex")]
use super::ops::{self, Reads, Wanted};
use super::{
    ATTENTION_BLOCK, PANEL, Segment,
    blocks::{Block, Reach, blocks},
    zeros,
};
use crate::positions::{Positions, visible};

/// The parameters of attention in one layer.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct AttentionParams {
    /// Factor on the scores: `1 / sqrt(head_dim)` in most models.
    pub scale: f64,
    /// How many keys a query sees, its own included; `None` for a full-attention layer.
    pub window: Option<NonZeroUsize>,
    /// Soft cap on the scores, `cap · tanh(score / cap)`, applied before the mask.
    pub softcap: Option<f64>,
}

impl AttentionParams {
    /// A full-attention layer without a soft cap.
    #[must_use]
    pub const fn new(scale: f64) -> Self {
        Self {
            scale,
            window: None,
            softcap: None,
        }
    }
}

/// Softmax attention of `query` over the entries of every sequence.
///
/// The result of a query depends only on that query, on the entries that it sees, and on the numbers of the slots that
/// hold them. [`visible`] decides from two positions whether a query sees a slot. A query at [`Positions::EMPTY`] is a
/// pad: its result is finite and has no meaning. A slot at [`Positions::EMPTY`] is free: no query sees it.
///
/// # Shapes
/// * `query`: `[batch, heads, tokens, head_dim]`, after rotation
/// * `query_positions`: as wide as `tokens`
/// * `segments`: a list for each sequence, as [`Segment`] describes it. It may be empty for a sequence of pads.
/// * result: `[batch, tokens, heads · head_dim]`
///
/// Query head `h` reads KV head `h / (heads / kv_heads)`. Nothing is repeated in memory.
///
/// # Cost
/// Every sequence is computed by itself, so it costs what it costs alone. Blocks of slots that no query of a part sees
/// are skipped, which changes no bit. On `flex` in f32, entries are read where they are stored. Elsewhere scores are
/// held for 16 to 128 queries at a time: the more slots they see, the fewer queries. The keys and values of one block
/// are copied at a time.
///
/// # Panics
/// If the shapes do not fit one another.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use kv_direct::{exact::{AttentionParams, Segment, attention}, positions::Positions};
///
/// let device = Device::flex();
/// let query = Tensor::zeros([1, 2, 1, 4], &device);
/// let keys = Tensor::zeros([1, 3, 4], &device);
/// let values = Tensor::<3>::ones([1, 3, 4], &device);
/// let segment = Segment::from_rows(keys, values, vec![vec![0, 1, 2]], 0);
/// let params = AttentionParams::new(0.5);
/// let out = attention(query, &Positions::shared(&[[2]]), &[vec![segment]], &params);
/// assert_eq!(out.into_data().as_slice::<f32>().unwrap(), [1.0; 8]);
/// ```
#[must_use]
pub fn attention(
    query: Tensor<4>,
    query_positions: &Positions,
    segments: &[Vec<Segment>],
    params: &AttentionParams,
) -> Tensor<3> {
    #[cfg(feature = "flex")]
    if ops::owns_attention(&query, segments) {
        let reads = checked(&query, query_positions, segments, params, Wanted::Nothing);
        return ops::attention::<1>(query, reads).0;
    }
    run(query, query_positions, segments, params, |_| {})
}

/// The same arguments for the kernel, checked.
#[cfg(feature = "flex")]
pub(super) fn checked<'a>(
    query: &Tensor<4>,
    positions: &'a Positions,
    segments: &'a [Vec<Segment>],
    params: &'a AttentionParams,
    report: Wanted,
) -> Reads<'a> {
    check_all(query, positions, segments);
    Reads {
        positions,
        segments,
        params,
        report,
    }
}

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
    let [_, heads, tokens, head_dim] = query.dims();
    let width = heads * head_dim;
    let (device, dtype) = (query.device(), query.dtype());
    let query = query.mul_scalar(params.scale);
    let outputs = segments.iter().enumerate().map(|(sequence, segments)| {
        let positions = query_positions.slots(sequence, 0);
        let at = [sequence..sequence + 1, 0..heads, 0..tokens, 0..head_dim];
        let query = query.clone().slice(at).reshape([heads, tokens, head_dim]);
        let mut parts = attend(
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
        let computed: usize = parts.iter().map(|part| part.dims()[1]).sum();
        if computed < tokens {
            let shape = [1, tokens - computed, width];
            parts.push(zeros(shape, (&device, dtype)));
        }
        joined(parts, 1)
    });
    joined(outputs.collect(), 0)
}

fn joined(mut parts: Vec<Tensor<3>>, dim: usize) -> Tensor<3> {
    match parts.len() {
        1 => parts.remove(0),
        _ => Tensor::cat(parts, dim),
    }
}

fn check_all(query: &Tensor<4>, query_positions: &Positions, segments: &[Vec<Segment>]) {
    let [batch, heads, tokens, head_dim] = query.dims();
    assert_eq!(
        (
            query_positions.sequences(),
            query_positions.width(),
            segments.len()
        ),
        (batch, tokens, batch),
        "a position for every query, and a list of segments for every sequence"
    );
    for segment in segments.iter().flatten() {
        check(segment, heads, head_dim);
    }
}

fn check(segment: &Segment, heads: usize, head_dim: usize) {
    let [kv_heads, slots, width] = segment.values().dims();
    let panels = [kv_heads, slots / PANEL, head_dim, PANEL];
    assert!(
        segment.keys().dims() == panels
            && width == head_dim
            && slots.is_multiple_of(PANEL)
            && segment.start().is_multiple_of(PANEL)
            && heads.is_multiple_of(kv_heads)
            && (segment.lists() == 1 || segment.lists() == kv_heads)
            && (0..segment.lists()).all(|head| segment.positions(head).len() == slots),
        "a segment of {slots} slots with keys {:?} for {heads} heads of {head_dim}",
        segment.keys().dims(),
    );
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
                scores = scores.div_scalar(cap).tanh().mul_scalar(cap);
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
