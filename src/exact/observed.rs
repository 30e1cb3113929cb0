//! Attention that also returns probabilities: sums over all queries, or those of the last queries.

use std::ops::Range;

use burn::tensor::{DType, Tensor, TensorData};

use super::{
    Segment,
    attention::AttentionParams,
    stock_attention::{Weighted, run},
    zeros,
};
#[cfg(feature = "flex")]
use super::{
    attention::checked,
    ops::{self, Wanted},
};
use crate::positions::Positions;

/// Attention, and the sum of the probabilities that each slot received from all queries, for every query head.
///
/// The sums are in f32. Pads add nothing. The sums are computed for one block of queries after another, so the full
/// `[tokens, slots]` matrix is never held.
///
/// # Shapes
/// As [`attention()`](super::attention()). The sums are `[batch, heads, slots]`, with the slots of the longest sequence.
/// A sequence has those of its segments one after another, then zeros.
///
/// # Panics
/// As [`attention()`](super::attention()).
#[must_use]
pub fn attention_with_column_sums(
    query: Tensor<4>,
    query_positions: &Positions,
    segments: &[Vec<Segment>],
    params: &AttentionParams,
) -> (Tensor<3>, Tensor<3>) {
    #[cfg(feature = "flex")]
    if ops::owns_attention(&query, segments) {
        let wanted = Wanted::ColumnSums;
        return ops::attention(
            query.clone(),
            checked(&query, query_positions, segments, params, wanted),
        );
    }
    let (batch, heads) = (segments.len(), query.dims()[1]);
    let device = query.device();
    let options = (&device, DType::F32);
    let mut sums = zeros([batch, heads, most_slots(segments)], options);
    let out = run(query, query_positions, segments, params, |seen| {
        let queries = seen.queries.len();
        let total = seen.total.clone().cast(DType::F32);
        let mut factors = total.recip().reshape([heads, 1, queries]);
        let positions = &query_positions.slots(seen.sequence, 0)[seen.queries.clone()];
        if positions.contains(&Positions::EMPTY) {
            let real = |&position: &usize| f32::from(u8::from(position != Positions::EMPTY));
            let real = TensorData::new(positions.iter().map(real).collect(), [1, 1, queries]);
            factors = factors * Tensor::<3>::from_data(real, options);
        }
        for (slots, weights) in by_slot(seen, heads) {
            let weights = weights.cast(DType::F32);
            let column = if queries == 1 {
                weights * factors.clone()
            } else {
                // A product with the factors reads the weights once and needs no division of the weights.
                factors.clone().matmul(weights)
            };
            let ranges = [seen.sequence..seen.sequence + 1, 0..heads, slots.clone()];
            let column = column.reshape([1, heads, slots.len()]);
            sums.inplace(|sums| {
                let more = sums.clone().slice(ranges.clone()) + column;
                sums.slice_assign(ranges, more)
            });
        }
    });
    (out, sums)
}

/// Attention, and the probabilities that each slot received from the last `last` queries of every sequence.
///
/// The probabilities are in f32. The newest query comes last. Pads do not count, and a sequence with fewer queries
/// begins with zeros.
///
/// # Shapes
/// As [`attention()`](super::attention()). The probabilities are `[batch, heads, queries, slots]`, where `queries` is
/// the smaller of `last` and the queries of the longest sequence, and `slots` as in [`attention_with_column_sums`].
///
/// # Cost
/// Blocks without any of these queries cost what they cost in [`attention()`](super::attention()).
///
/// # Panics
/// As [`attention()`](super::attention()).
#[must_use]
pub fn attention_with_last_queries(
    query: Tensor<4>,
    query_positions: &Positions,
    segments: &[Vec<Segment>],
    params: &AttentionParams,
    last: usize,
) -> (Tensor<3>, Tensor<4>) {
    #[cfg(feature = "flex")]
    if ops::owns_attention(&query, segments) {
        let wanted = Wanted::LastQueries(last);
        return ops::attention(
            query.clone(),
            checked(&query, query_positions, segments, params, wanted),
        );
    }
    let (batch, heads) = (segments.len(), query.dims()[1]);
    let last = last.min(query_positions.longest());
    let options = (&query.device(), DType::F32);
    let mut probabilities = zeros([batch, heads, last, most_slots(segments)], options);
    let out = run(query, query_positions, segments, params, |seen| {
        let Weighted {
            sequence, queries, ..
        } = seen;
        let count = query_positions.count(*sequence);
        let from = queries.start.max(count.saturating_sub(last));
        let to = queries.end.min(count);
        if from >= to {
            return;
        }
        let newest = from - queries.start..to - queries.start;
        let total = seen.total.clone().reshape([heads, queries.len(), 1]);
        let total = total.slice_dim(1, newest.clone());
        for (slots, weights) in by_slot(seen, heads) {
            let part = (weights.slice_dim(1, newest.clone()) / total.clone()).cast(DType::F32);
            let at = last + from - count..last + to - count;
            let part = part.reshape([1, heads, at.len(), slots.len()]);
            let ranges = [*sequence..sequence + 1, 0..heads, at, slots];
            probabilities.inplace(|all| all.slice_assign(ranges, part));
        }
    });
    (out, probabilities)
}

/// Slots of the sequence that has most.
fn most_slots(segments: &[Vec<Segment>]) -> usize {
    let slots = |segments: &Vec<Segment>| segments.iter().map(Segment::slots).sum();
    segments.iter().map(slots).max().unwrap_or(0)
}

/// The exponentials `[heads, queries, slots]` of every piece that was read, with its slots in the report.
fn by_slot(seen: &Weighted<'_>, heads: usize) -> impl Iterator<Item = (Range<usize>, Tensor<3>)> {
    let queries = seen.queries.len();
    seen.blocks.iter().flat_map(move |(block, weights)| {
        let width = weights.dims()[2];
        let weights = weights.clone().reshape([heads, queries, width]);
        block.pieces.iter().filter_map(move |piece| {
            let count = piece.within(width);
            let slots = piece.index..piece.index + count;
            let of_piece = || weights.clone().slice_dim(2, piece.at..piece.at + count);
            (count > 0).then(|| (slots, of_piece()))
        })
    })
}
