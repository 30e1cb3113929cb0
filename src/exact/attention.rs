//! Attention: the result of a query does not depend on other queries. The only routine in the crate, for every
//! backend.

use std::{num::NonZeroUsize, ops::Range};

use burn::tensor::{Tensor, TensorData};

use super::{KV_BLOCK, zeros};
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

/// Softmax attention of `query` over the slots of `keys` and `values`.
///
/// The result of a query depends only on that query, on the entries that it sees, and on the slots that hold them.
/// [`visible`] decides from two positions whether a query sees a slot. A query at [`Positions::EMPTY`] is a pad: its
/// result is finite and has no meaning. A slot at [`Positions::EMPTY`] is free: no query sees it, but it must store
/// finite numbers.
///
/// # Shapes
/// * `query`: `[batch, heads, tokens, head_dim]`, after rotation
/// * `keys`: `[batch, kv_heads, head_dim, slots]`
/// * `values`: `[batch, kv_heads, slots, head_dim]`
/// * `query_positions`: as wide as `tokens`
/// * `key_positions`: as wide as `slots`
/// * result: `[batch, tokens, heads · head_dim]`
///
/// Query head `h` reads KV head `h / (heads / kv_heads)`. Nothing is repeated in memory.
///
/// # Cost
/// Scores are held for 16 to 128 queries at a time: the more slots they see, the fewer queries. Blocks of slots that
/// none of these queries sees are skipped. So are the slots of the last block behind the last visible one, in tiles of
/// 64. Skipping changes no bit.
///
/// # Panics
/// If the shapes do not fit one another, or `slots` is not a multiple of [`KV_BLOCK`].
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use kv_direct::{exact::{AttentionParams, attention}, positions::Positions};
///
/// let device = Device::flex();
/// let query = Tensor::zeros([1, 2, 1, 4], &device);
/// let keys = Tensor::zeros([1, 1, 4, 512], &device);
/// let values = Tensor::<4>::ones([1, 1, 512, 4], &device);
/// let mut slots = vec![Positions::EMPTY; 512];
/// slots[..3].copy_from_slice(&[0, 1, 2]);
/// let params = AttentionParams::new(0.5);
/// let out = attention(query, &keys, &values, &Positions::shared(&[[2]]), &Positions::shared(&[slots]), &params);
/// assert_eq!(out.into_data().as_slice::<f32>().unwrap(), [1.0; 8]);
/// ```
#[must_use]
pub fn attention(
    query: Tensor<4>,
    keys: &Tensor<4>,
    values: &Tensor<4>,
    query_positions: &Positions,
    key_positions: &Positions,
    params: &AttentionParams,
) -> Tensor<3> {
    run(
        query,
        keys,
        values,
        query_positions,
        key_positions,
        params,
        |_, _, _, _| {},
    )
}

/// Bytes of temporaries that [`attention`] holds for the scores of its largest block of queries, with elements of
/// `element` bytes. A product is held twice while it is computed.
pub(crate) fn attention_scratch(
    batch: usize,
    heads: usize,
    tokens: usize,
    slots: usize,
    element: usize,
) -> usize {
    let per_query = heads * slots;
    let fewest = tokens.min(FEWEST_QUERIES) * per_query;
    let scores = (tokens.min(QUERY_BLOCK) * per_query).min(SCORES.max(fewest));
    batch * scores * element * 2
}

/// The most queries whose scores are held at a time.
const QUERY_BLOCK: usize = 128;
/// The fewest queries whose scores are held at a time, however many slots they see.
const FEWEST_QUERIES: usize = 16;
/// The most scores of a sequence held at a time, unless [`FEWEST_QUERIES`] queries have more.
const SCORES: usize = 1 << 19;
/// Slots that are read or skipped together. A block of slots is read up to the last tile that a query sees. Skipped
/// slots would add zeros at the end of a reduction. Divides [`KV_BLOCK`].
const TILE: usize = 64;

/// Computes attention for one block of queries after another. `observe` receives each block of queries, the slots
/// that it reads, the exponentials `[batch, kv_heads, group · queries, slots read]` and their sums `[.., 1]`.
pub(super) fn run(
    query: Tensor<4>,
    keys: &Tensor<4>,
    values: &Tensor<4>,
    query_positions: &Positions,
    key_positions: &Positions,
    params: &AttentionParams,
    mut observe: impl FnMut(Range<usize>, Range<usize>, Tensor<4>, Tensor<4>),
) -> Tensor<3> {
    let [batch, heads, tokens, head_dim] = query.dims();
    let [_, kv_heads, _, slots] = keys.dims();
    assert!(
        slots.is_multiple_of(KV_BLOCK),
        "{slots} slots are not whole blocks of {KV_BLOCK}"
    );
    assert_eq!(
        (query_positions.width(), key_positions.width()),
        (tokens, slots),
        "a position for every query and slot"
    );
    let group = heads / kv_heads;
    let query = query.mul_scalar(params.scale);
    let mut blocks = Vec::new();
    let mut from = 0;
    while from < tokens {
        let most = query_positions.narrow(from..(from + QUERY_BLOCK).min(tokens));
        let fits = queries_per_block(
            heads,
            visible_slots(&most, key_positions, params.window).len(),
        );
        let block = from..(from + fits).min(tokens);
        from = block.end;
        let count = block.len();
        let at = query_positions.narrow(block.clone());
        let read = visible_slots(&at, key_positions, params.window);
        let grouped = query.clone().slice_dim(2, block.clone()).reshape([
            batch,
            kv_heads,
            group * count,
            head_dim,
        ]);
        let mut scores = grouped.matmul(keys.clone().slice_dim(3, read.clone()));
        if let Some(cap) = params.softcap {
            scores = scores.div_scalar(cap).tanh().mul_scalar(cap);
        }
        let mask = mask(&at, &key_positions.narrow(read.clone()), params.window);
        let mask = Tensor::<5>::from_data(mask, (&scores.device(), scores.dtype()));
        let scores = scores.reshape([batch, kv_heads, group, count, read.len()]) + mask;
        let scores = scores.reshape([batch, kv_heads, group * count, read.len()]);
        let max = scores.clone().max_dim(3);
        let weights = (scores - max).exp();

        let mut total: Option<Tensor<4>> = None;
        let mut mixed: Option<Tensor<4>> = None;
        for start in (0..read.len()).step_by(KV_BLOCK) {
            let end = (start + KV_BLOCK).min(read.len());
            let part = weights.clone().slice_dim(3, start..end);
            let slots = read.start + start..read.start + end;
            let sum = padded(part.clone()).sum_dim(3);
            let mix = part.matmul(values.clone().slice_dim(2, slots));
            total = Some(total.map_or(sum.clone(), |total| total + sum));
            mixed = Some(mixed.map_or(mix.clone(), |mixed| mixed + mix));
        }
        let (total, mixed) = total
            .zip(mixed)
            .expect("at least one block of slots is read");
        observe(block, read, weights, total.clone());
        // A sum of nothing but -0 is -0, or +0 where invisible slots added zeros. Adding 0 makes it +0 in both cases.
        let out = (mixed / total)
            .add_scalar(0.0)
            .reshape([batch, heads, count, head_dim]);
        blocks.push(
            out.swap_dims(1, 2)
                .reshape([batch, count, heads * head_dim]),
        );
    }
    if blocks.len() == 1 {
        blocks.remove(0)
    } else {
        Tensor::cat(blocks, 1)
    }
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

/// The smallest range of slots outside which no query sees a slot. It begins at the start of a block, ends at the end
/// of a tile, and is never empty.
fn visible_slots(
    query_positions: &Positions,
    key_positions: &Positions,
    window: Option<NonZeroUsize>,
) -> Range<usize> {
    let (mut first, mut last) = (usize::MAX, 0);
    for sequence in 0..query_positions.sequences() {
        let real = || {
            query_positions
                .slots(sequence, 0)
                .iter()
                .copied()
                .filter(|&q| q != Positions::EMPTY)
        };
        let (Some(low), Some(high)) = (real().min(), real().max()) else {
            continue;
        };
        let reach = window.map_or(0, |window| (low + 1).saturating_sub(window.get()));
        for head in 0..key_positions.heads() {
            let slots = key_positions.slots(sequence, head);
            let seen = |&position: &usize| position <= high && position >= reach;
            if let Some(slot) = slots.iter().position(seen) {
                first = first.min(slot);
            }
            if let Some(slot) = slots.iter().rposition(seen) {
                last = last.max(slot);
            }
        }
    }
    let from = if first == usize::MAX {
        0
    } else {
        first / KV_BLOCK * KV_BLOCK
    };
    from..(last / TILE + 1) * TILE
}

/// A block of slots padded with zeros, so that its sum has one order however much of it is read.
fn padded(part: Tensor<4>) -> Tensor<4> {
    let [batch, heads, queries, width] = part.dims();
    if width == KV_BLOCK {
        return part;
    }
    let options = (&part.device(), part.dtype());
    let rest = zeros([batch, heads, queries, KV_BLOCK - width], options);
    Tensor::cat(vec![part, rest], 3)
}

/// 0 where a query sees a slot and -∞ where it does not: `[batch or 1, heads or 1, 1, queries, slots]`.
fn mask(
    query_positions: &Positions,
    key_positions: &Positions,
    window: Option<NonZeroUsize>,
) -> TensorData {
    let sequences = if query_positions.sequences_agree() && key_positions.sequences_agree() {
        1
    } else {
        query_positions.sequences()
    };
    let (heads, count, slots) = (
        key_positions.heads(),
        query_positions.width(),
        key_positions.width(),
    );
    let mut mask = Vec::with_capacity(sequences * heads * count * slots);
    for sequence in 0..sequences {
        for head in 0..heads {
            let keys = key_positions.slots(sequence, head);
            for &query in query_positions.slots(sequence, 0) {
                mask.extend(keys.iter().map(|&key| {
                    let seen = query == Positions::EMPTY || visible(query, key, window);
                    if seen { 0.0f32 } else { f32::NEG_INFINITY }
                }));
            }
        }
    }
    TensorData::new(mask, [sequences, heads, 1, count, slots])
}
