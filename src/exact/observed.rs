//! Attention that also tells what it saw: sums over queries, or the rows of the last ones.

use burn::tensor::{DType, Tensor, TensorData};

use super::{
    attention::{AttentionParams, run},
    zeros,
};
use crate::positions::Positions;

/// [`attention()`](super::attention()), and for every query head the probabilities that all queries of
/// the call gave to each slot, added up: `[batch, heads, slots]` in f32. Pads give nothing.
///
/// The sums are taken block by block, so the full `[tokens, slots]` matrix is never held.
///
/// # Shapes
/// As [`attention()`](super::attention()); the sums `[batch, heads, slots]`.
///
/// # Panics
/// As [`attention()`](super::attention()).
#[must_use]
pub fn attention_with_column_sums(
    query: Tensor<4>,
    keys: &Tensor<4>,
    values: &Tensor<4>,
    queries: &Positions,
    positions: &Positions,
    attend: &AttentionParams,
) -> (Tensor<3>, Tensor<3>) {
    let [batch, heads, ..] = query.dims();
    let slots = positions.width();
    let device = query.device();
    let options = (&device, DType::F32);
    let mut sums: Option<Tensor<4>> = None;
    let out = run(
        query,
        keys,
        values,
        queries,
        positions,
        attend,
        |block, seen, weights, total| {
            let tokens = block.len();
            let width = weights.dims()[3];
            let mut factors = total
                .cast(DType::F32)
                .recip()
                .reshape([batch, heads, 1, tokens]);
            if (0..batch).any(|row| queries.count(row) < block.end) {
                let real: Vec<f32> = (0..batch)
                    .flat_map(|row| queries.slots(row, 0)[block.clone()].iter())
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
                // A product with the row of factors reads the weights once and divides none of them.
                factors.matmul(weights)
            };
            let ranges = [0..batch, 0..heads, 0..1, seen];
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

/// [`attention()`](super::attention()), and the probabilities that the last `last` queries of every
/// batch row gave to each slot: `[batch, heads, rows, slots]` in f32, `rows` the smaller of `last` and
/// the tokens of the call.
///
/// The newest query stands last; pads do not count, and a batch row with fewer queries begins with
/// rows of zeros. Blocks that hold none of these queries cost what they cost in
/// [`attention()`](super::attention()).
///
/// # Shapes
/// As [`attention()`](super::attention()); the probabilities `[batch, heads, rows, slots]`.
///
/// # Panics
/// As [`attention()`](super::attention()).
#[must_use]
pub fn attention_with_last_queries(
    query: Tensor<4>,
    keys: &Tensor<4>,
    values: &Tensor<4>,
    queries: &Positions,
    positions: &Positions,
    attend: &AttentionParams,
    last: usize,
) -> (Tensor<3>, Tensor<4>) {
    let [batch, heads, tokens, _] = query.dims();
    let slots = positions.width();
    let last = last.min(tokens);
    let options = (&query.device(), DType::F32);
    let mut rows = zeros([batch, heads, last, slots], options);
    let together = queries.sequences_agree();
    let out = run(
        query,
        keys,
        values,
        queries,
        positions,
        attend,
        |block, seen, weights, total| {
            for row in 0..if together { 1 } else { batch } {
                let count = queries.count(row);
                let from = block.start.max(count.saturating_sub(last));
                let to = block.end.min(count);
                if from >= to {
                    continue;
                }
                let all = if together { 0..batch } else { row..row + 1 };
                let of_row = |tensor: &Tensor<4>| {
                    let width = tensor.dims()[3];
                    tensor
                        .clone()
                        .slice_dim(0, all.clone())
                        .reshape([all.len(), heads, block.len(), width])
                        .slice_dim(2, from - block.start..to - block.start)
                };
                let probabilities = (of_row(&weights) / of_row(&total)).cast(DType::F32);
                let at = last + from - count..last + to - count;
                let ranges = [all, 0..heads, at, seen.clone()];
                rows.inplace(|rows| rows.slice_assign(ranges, probabilities));
            }
        },
    );
    (out, rows)
}
