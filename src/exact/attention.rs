//! The row-stable attention routine: the only one in the crate, for every backend.

use std::{num::NonZeroUsize, ops::Range};

use burn::tensor::{Tensor, TensorData};

use super::{KV_BLOCK, zeros};
use crate::positions::{Positions, visible};

/// What attention needs to know of a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct AttentionParams {
    /// Factor on the scores, `1 / sqrt(head_dim)` in most models.
    pub scale: f64,
    /// How many keys a query sees, its own included; `None` for all.
    pub window: Option<NonZeroUsize>,
    /// `cap · tanh(score / cap)`, before the mask.
    pub softcap: Option<f64>,
}

impl AttentionParams {
    /// A layer that shows all keys.
    #[must_use]
    pub const fn new(scale: f64) -> Self {
        Self {
            scale,
            window: None,
            softcap: None,
        }
    }

    /// With a window.
    #[must_use]
    pub const fn with_window(mut self, window: Option<NonZeroUsize>) -> Self {
        self.window = window;
        self
    }

    /// With a soft cap.
    #[must_use]
    pub const fn with_softcap(mut self, softcap: Option<f64>) -> Self {
        self.softcap = softcap;
        self
    }
}

/// Softmax attention of `query` over the slots of `keys` and `values`, where a query's result
/// depends on that query, on the rows it may see and on the slots these stand in alone.
///
/// Whether a query sees a slot is decided by [`visible`] over the two positions. A query at
/// [`Positions::EMPTY`] is a pad: its result is finite and means nothing. A slot there is free: it
/// is seen by no query, but what it stores must be finite.
///
/// # Shapes
/// `query` `[batch, heads, tokens, head_dim]` after rotation, `keys`
/// `[batch, kv_heads, head_dim, slots]`, `values` `[batch, kv_heads, slots, head_dim]`, `queries` as
/// wide as `tokens`, `positions` as wide as `slots`, the answer `[batch, tokens, heads · head_dim]`.
/// Query head `h` reads KV head `h / (heads / kv_heads)`; nothing is repeated in memory.
///
/// # Cost
/// Scores are held for a block of 16 to 128 queries at a time, fewer where they see more slots
/// ([`attention_scratch`] says how many bytes that is). Pieces that no query of a block can see are skipped, and so are the slots of
/// the last one behind the last seen, in tiles of 64; that changes no bit.
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
/// let attend = AttentionParams::new(0.5);
/// let out = attention(query, &keys, &values, &Positions::shared(&[[2]]), &Positions::shared(&[slots]), &attend);
/// assert_eq!(out.into_data().as_slice::<f32>().unwrap(), [1.0; 8]);
/// ```
#[must_use]
pub fn attention(
    query: Tensor<4>,
    keys: &Tensor<4>,
    values: &Tensor<4>,
    queries: &Positions,
    positions: &Positions,
    attend: &AttentionParams,
) -> Tensor<3> {
    run(
        query,
        keys,
        values,
        queries,
        positions,
        attend,
        |_, _, _, _| {},
    )
}

/// Bytes of temporaries that [`attention`] holds for the scores of its largest block: a product is held
/// twice while it is made.
#[must_use]
pub fn attention_scratch(
    batch: usize,
    heads: usize,
    tokens: usize,
    slots: usize,
    element: usize,
) -> usize {
    let row = heads * slots;
    let fewest = tokens.min(FEWEST_QUERIES) * row;
    let scores = (tokens.min(QUERY_BLOCK) * row).min(SCORES.max(fewest));
    batch * scores * element * 2
}

/// Queries whose scores are held at a time, at most.
const QUERY_BLOCK: usize = 128;
/// Queries whose scores are held at a time, however many slots they see.
const FEWEST_QUERIES: usize = 16;
/// Scores of a batch row held at a time, unless fewer queries have more.
const SCORES: usize = 1 << 19;
/// Slots that are read or left out together: a piece is read as far as a query of the block sees.
/// What is left out would add zeros at the end of a reduction. Divides [`KV_BLOCK`].
const TILE: usize = 64;

/// Attention block by block. `seen` is given each block of queries, the slots it reads, the
/// exponentials `[batch, kv_heads, group · queries, slots read]` and their sums `[.., 1]`.
pub(super) fn run(
    query: Tensor<4>,
    keys: &Tensor<4>,
    values: &Tensor<4>,
    queries: &Positions,
    positions: &Positions,
    attend: &AttentionParams,
    mut seen: impl FnMut(Range<usize>, Range<usize>, Tensor<4>, Tensor<4>),
) -> Tensor<3> {
    let [batch, heads, tokens, head_dim] = query.dims();
    let [_, kv_heads, _, slots] = keys.dims();
    assert!(
        slots.is_multiple_of(KV_BLOCK),
        "{slots} slots are not whole pieces of {KV_BLOCK}"
    );
    assert_eq!(
        (queries.width(), positions.width()),
        (tokens, slots),
        "a position for every row"
    );
    let group = heads / kv_heads;
    let query = query.mul_scalar(attend.scale);
    let mut blocks = Vec::new();
    let mut from = 0;
    while from < tokens {
        let most = queries.narrow(from..(from + QUERY_BLOCK).min(tokens));
        let fits = block_of(heads, pieces_seen(&most, positions, attend.window).len());
        let block = from..(from + fits).min(tokens);
        from = block.end;
        let count = block.len();
        let at = queries.narrow(block.clone());
        let read = pieces_seen(&at, positions, attend.window);
        let rows = query.clone().slice_dim(2, block.clone()).reshape([
            batch,
            kv_heads,
            group * count,
            head_dim,
        ]);
        let mut scores = rows.matmul(keys.clone().slice_dim(3, read.clone()));
        if let Some(cap) = attend.softcap {
            scores = scores.div_scalar(cap).tanh().mul_scalar(cap);
        }
        let mask = mask(&at, &positions.narrow(read.clone()), attend.window);
        let mask = Tensor::<5>::from_data(mask, (&scores.device(), scores.dtype()));
        let scores = scores.reshape([batch, kv_heads, group, count, read.len()]) + mask;
        let scores = scores.reshape([batch, kv_heads, group * count, read.len()]);
        let max = scores.clone().max_dim(3);
        let weights = (scores - max).exp();

        let mut total: Option<Tensor<4>> = None;
        let mut mixed: Option<Tensor<4>> = None;
        for piece in (0..read.len()).step_by(KV_BLOCK) {
            let end = (piece + KV_BLOCK).min(read.len());
            let part = weights.clone().slice_dim(3, piece..end);
            let slots = read.start + piece..read.start + end;
            let sum = whole(part.clone()).sum_dim(3);
            let mix = part.matmul(values.clone().slice_dim(2, slots));
            total = Some(total.map_or(sum.clone(), |total| total + sum));
            mixed = Some(mixed.map_or(mix.clone(), |mixed| mixed + mix));
        }
        let (total, mixed) = total.zip(mixed).expect("at least one piece is read");
        seen(block, read, weights, total.clone());
        // A sum of nothing but -0 stays -0 only where no zeros of unseen slots were added: make it +0.
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

/// Queries of a block that see this many slots.
const fn block_of(heads: usize, slots: usize) -> usize {
    let fits = SCORES / (heads * slots) / FEWEST_QUERIES * FEWEST_QUERIES;
    if fits < FEWEST_QUERIES {
        FEWEST_QUERIES
    } else if fits > QUERY_BLOCK {
        QUERY_BLOCK
    } else {
        fits
    }
}

/// The smallest range outside which no query sees a slot, from the start of a piece to the end of a
/// tile; never empty.
fn pieces_seen(
    queries: &Positions,
    positions: &Positions,
    window: Option<NonZeroUsize>,
) -> Range<usize> {
    let (mut first, mut last) = (usize::MAX, 0);
    for row in 0..queries.sequences() {
        let real = || {
            queries
                .slots(row, 0)
                .iter()
                .copied()
                .filter(|&q| q != Positions::EMPTY)
        };
        let (Some(low), Some(high)) = (real().min(), real().max()) else {
            continue;
        };
        let reach = window.map_or(0, |window| (low + 1).saturating_sub(window.get()));
        for head in 0..positions.heads() {
            let slots = positions.slots(row, head);
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

/// A piece filled up with zeros, so that its sum is taken in one order however much of it is read.
fn whole(part: Tensor<4>) -> Tensor<4> {
    let [batch, heads, rows, width] = part.dims();
    if width == KV_BLOCK {
        return part;
    }
    let options = (&part.device(), part.dtype());
    let rest = zeros([batch, heads, rows, KV_BLOCK - width], options);
    Tensor::cat(vec![part, rest], 3)
}

/// 0 where a query sees a slot and -∞ where not: `[rows or 1, heads or 1, 1, queries, slots]`.
fn mask(queries: &Positions, positions: &Positions, window: Option<NonZeroUsize>) -> TensorData {
    let rows = if queries.sequences_agree() && positions.sequences_agree() {
        1
    } else {
        queries.sequences()
    };
    let (heads, count, slots) = (positions.heads(), queries.width(), positions.width());
    let mut mask = Vec::with_capacity(rows * heads * count * slots);
    for row in 0..rows {
        for head in 0..heads {
            let keys = positions.slots(row, head);
            for &query in queries.slots(row, 0) {
                mask.extend(keys.iter().map(|&key| {
                    let seen = query == Positions::EMPTY || visible(query, key, window);
                    if seen { 0.0f32 } else { f32::NEG_INFINITY }
                }));
            }
        }
    }
    TensorData::new(mask, [rows, heads, 1, count, slots])
}
