//! Attention that also returns probabilities: sums over all queries, or those of the last queries.

use burn::tensor::{DType, Tensor, TensorData};

use super::{
    attention::{AttentionParams, run},
    zeros,
};
use crate::positions::Positions;

/// Attention, and the sum of the probabilities that each slot received from all queries, for every query head.
///
/// The sums are in f32. Pads add nothing. The sums are computed for one block of queries after another, so the full
/// `[tokens, slots]` matrix is never held.
///
/// # Shapes
/// As [`attention()`](super::attention()). The sums are `[batch, heads, slots]`.
///
/// # Panics
/// As [`attention()`](super::attention()).
#[must_use]
pub fn attention_with_column_sums(
    query: Tensor<4>,
    keys: &Tensor<4>,
    values: &Tensor<4>,
    query_positions: &Positions,
    key_positions: &Positions,
    params: &AttentionParams,
) -> (Tensor<3>, Tensor<3>) {
    let [batch, heads, ..] = query.dims();
    let slots = key_positions.width();
    let device = query.device();
    let options = (&device, DType::F32);
    let mut sums: Option<Tensor<4>> = None;
    let out = run(
        query,
        keys,
        values,
        query_positions,
        key_positions,
        params,
        |block, read, weights, total| {
            let tokens = block.len();
            let width = weights.dims()[3];
            let mut factors = total
                .cast(DType::F32)
                .recip()
                .reshape([batch, heads, 1, tokens]);
            if (0..batch).any(|i| query_positions.count(i) < block.end) {
                let real: Vec<f32> = (0..batch)
                    .flat_map(|i| query_positions.slots(i, 0)[block.clone()].iter())
                    .map(|&position| f32::from(u8::from(position != Positions::EMPTY)))
                    .collect();
                let real = TensorData::new(real, [batch, 1, 1, tokens]);
                factors = factors * Tensor::<4>::from_data(real, options);
            }
            let weights = weights
                .cast(DType::F32)
                .reshape([batch, heads, tokens, width]);
            let column = if tokens == 1 {
                weights * factors
            } else {
                // A product with the factors reads the weights once and needs no division of the weights.
                factors.matmul(weights)
            };
            let ranges = [0..batch, 0..heads, 0..1, read];
            let (all, column) = match sums.take() {
                None => (zeros([batch, heads, 1, slots], options), column),
                Some(sums) => (sums.clone(), sums.slice(ranges.clone()) + column),
            };
            sums = Some(all.slice_assign(ranges, column));
        },
    );
    let sums = sums.unwrap_or_else(|| zeros([batch, heads, 1, slots], options));
    (out, sums.reshape([batch, heads, slots]))
}

/// Attention, and the probabilities that each slot received from the last `last` queries of every sequence.
///
/// The probabilities are in f32. The newest query comes last. Pads do not count, and a sequence with fewer queries
/// begins with zeros.
///
/// # Shapes
/// As [`attention()`](super::attention()). The probabilities are `[batch, heads, queries, slots]`, where `queries` is
/// the smaller of `last` and `tokens`.
///
/// # Cost
/// Blocks without any of these queries cost what they cost in [`attention()`](super::attention()).
///
/// # Panics
/// As [`attention()`](super::attention()).
#[must_use]
pub fn attention_with_last_queries(
    query: Tensor<4>,
    keys: &Tensor<4>,
    values: &Tensor<4>,
    query_positions: &Positions,
    key_positions: &Positions,
    params: &AttentionParams,
    last: usize,
) -> (Tensor<3>, Tensor<4>) {
    let [batch, heads, tokens, _] = query.dims();
    let slots = key_positions.width();
    let last = last.min(tokens);
    let options = (&query.device(), DType::F32);
    let mut probabilities = zeros([batch, heads, last, slots], options);
    let together = query_positions.sequences_agree();
    let out = run(
        query,
        keys,
        values,
        query_positions,
        key_positions,
        params,
        |block, read, weights, total| {
            for sequence in 0..if together { 1 } else { batch } {
                let count = query_positions.count(sequence);
                let from = block.start.max(count.saturating_sub(last));
                let to = block.end.min(count);
                if from >= to {
                    continue;
                }
                let sequences = match together {
                    true => 0..batch,
                    false => sequence..sequence + 1,
                };
                let last_of = |tensor: &Tensor<4>| {
                    let width = tensor.dims()[3];
                    tensor
                        .clone()
                        .slice_dim(0, sequences.clone())
                        .reshape([sequences.len(), heads, block.len(), width])
                        .slice_dim(2, from - block.start..to - block.start)
                };
                let part = (last_of(&weights) / last_of(&total)).cast(DType::F32);
                let at = last + from - count..last + to - count;
                let ranges = [sequences, 0..heads, at, read.clone()];
                probabilities.inplace(|all| all.slice_assign(ranges, part));
            }
        },
    );
    (out, probabilities)
}
