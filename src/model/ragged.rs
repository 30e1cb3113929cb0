//! Rows of a step's tensors, in which the tokens of all sequences stand one after another.

use burn::tensor::Tensor;

use crate::{exact::zeros, positions::Positions};

/// The last token of every sequence: `[1, batch, hidden]`. A sequence without tokens has that of another.
pub(super) fn last_tokens(residual: Tensor<3>, positions: &Positions) -> Tensor<3> {
    if positions.tokens() == positions.sequences() && positions.longest() == 1 {
        return residual;
    }
    let last = (0..positions.sequences()).map(|sequence| {
        let end = positions.rows(sequence).end.max(1);
        residual.clone().slice_dim(1, end - 1..end)
    });
    Tensor::cat(last.collect(), 1)
}

/// `[1, tokens, vocab]` as `[batch, longest, vocab]`, shorter sequences filled up with zeros.
pub(super) fn by_sequence(logits: Tensor<3>, positions: &Positions) -> Tensor<3> {
    let (sequences, longest) = (positions.sequences(), positions.longest());
    let [_, tokens, vocab] = logits.dims();
    if tokens == sequences * longest {
        return logits.reshape([sequences, longest, vocab]);
    }
    let shape = [sequences, longest, vocab];
    let mut all = zeros(shape, (&logits.device(), logits.dtype()));
    for sequence in 0..sequences {
        let rows = positions.rows(sequence);
        if rows.is_empty() {
            continue;
        }
        let ranges = [sequence..sequence + 1, 0..rows.len(), 0..vocab];
        let part = logits.clone().slice_dim(1, rows);
        all.inplace(|all| all.slice_assign(ranges, part));
    }
    all
}
