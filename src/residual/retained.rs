//! Residuals that a plan retains, in chunks.

use burn::tensor::Tensor;

use super::prefix::{Chunk, Cut, Prefix, bytes};
use crate::{
    cache::{CacheError, ModelShape, State, StateValue},
    exact::zeros,
    positions::Positions,
};

/// The residual entering one layer, of all tokens: for each sequence, buffers of `chunk` tokens.
#[derive(Debug, Clone)]
pub(super) struct Residuals {
    chunk: usize,
    sequences: Vec<Vec<Tensor<3>>>,
}

impl Residuals {
    /// None yet, in buffers of `chunk` tokens.
    pub(super) const fn new(chunk: usize) -> Self {
        Self {
            chunk,
            sequences: Vec::new(),
        }
    }

    /// Stores the residual of every token, in place.
    pub(super) fn append(&mut self, residual: &Tensor<3>, positions: &Positions) {
        let [_, _, hidden] = residual.dims();
        let options = (&residual.device(), residual.dtype());
        self.sequences.resize(positions.sequences(), Vec::new());
        for (sequence, stored) in self.sequences.iter_mut().enumerate() {
            let rows = positions.rows(sequence);
            let mut from = rows.start;
            while from < rows.end {
                let position = positions.slots(sequence, 0)[from - rows.start];
                let (chunk, at) = (position / self.chunk, position % self.chunk);
                let count = (self.chunk - at).min(rows.end - from);
                while stored.len() <= chunk {
                    stored.push(zeros([1, self.chunk, hidden], options));
                }
                let part = residual.clone().slice_dim(1, from..from + count);
                let ranges = [0..1, at..at + count, 0..hidden];
                stored[chunk].inplace(|stored| stored.slice_assign(ranges, part));
                from += count;
            }
        }
    }

    /// The first `old[sequence]` tokens.
    pub(super) fn prefix(&self, old: &[usize], padded: bool) -> Prefix {
        let chunk = self.chunk;
        let cut = Cut { chunk, padded };
        let residual = |Chunk { tokens, .. }: &Chunk| {
            let tokens = tokens.iter().enumerate();
            let some = tokens.filter(|(_, tokens)| !tokens.is_empty());
            let mut parts: Vec<Tensor<3>> = some
                .map(|(sequence, tokens)| {
                    let stored = self.sequences[sequence][tokens.start / chunk].clone();
                    match padded {
                        true => stored,
                        false => stored.slice_dim(1, 0..tokens.len()),
                    }
                })
                .collect();
            match parts.len() {
                1 => parts.remove(0),
                _ => Tensor::cat(parts, 1),
            }
        };
        let chunks = cut.chunks(old).into_iter();
        Prefix::new(chunks.map(|chunk| {
            let residual = residual(&chunk);
            (chunk, residual)
        }))
    }

    pub(super) fn select(&mut self, sequences: &[usize]) {
        let of = |&sequence: &usize| self.sequences.get(sequence).cloned().unwrap_or_default();
        self.sequences = sequences.iter().map(of).collect();
    }

    /// Adds the residuals of a layer to a state, for sequences of these lengths: `[1, tokens, hidden]` each.
    pub(super) fn write(&self, layer: usize, lengths: &[usize], state: &mut State) {
        let sequences = self.sequences.iter().zip(lengths).enumerate();
        for (sequence, (stored, &length)) in sequences.filter(|(_, (_, length))| **length > 0) {
            let starts = (0..length).step_by(self.chunk);
            let parts = stored.iter().zip(starts).map(|(residual, start)| {
                let tokens = self.chunk.min(length - start);
                residual.clone().slice_dim(1, 0..tokens)
            });
            let residuals = Tensor::cat(parts.collect(), 1);
            state.insert(name(layer, sequence), StateValue::Tensor(residuals));
        }
    }

    /// The residuals that a state has for tokens of these lengths in a layer.
    pub(super) fn restored(
        &self,
        layer: usize,
        lengths: &[usize],
        shape: &ModelShape,
        state: &State,
    ) -> Result<Self, CacheError> {
        let sequence = |(sequence, &length): (usize, &usize)| {
            if length == 0 {
                return Ok(Vec::new());
            }
            let dims = [1, length, shape.hidden];
            let all = state.tensor(&name(layer, sequence), dims, shape.dtype)?;
            let options = (&all.device(), shape.dtype);
            let stored = (0..length).step_by(self.chunk).map(|start| {
                let tokens = self.chunk.min(length - start);
                let part = all.clone().slice_dim(1, start..start + tokens);
                let ranges = [0..1, 0..tokens, 0..shape.hidden];
                zeros([1, self.chunk, shape.hidden], options).slice_assign(ranges, part)
            });
            Ok(stored.collect())
        };
        let sequences = lengths.iter().enumerate().map(sequence);
        Ok(Self {
            chunk: self.chunk,
            sequences: sequences.collect::<Result<_, CacheError>>()?,
        })
    }

    /// Drops the buffers of each sequence that hold nothing below its length in `to`.
    pub(super) fn truncate(&mut self, to: &[usize]) {
        for (stored, to) in self.sequences.iter_mut().zip(to) {
            stored.truncate(to.div_ceil(self.chunk));
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.sequences.iter().flatten().map(bytes).sum()
    }
}

/// The name of a value of a state, for a layer and sequence.
fn name(layer: usize, sequence: usize) -> String {
    format!("layer.{layer}.residuals.{sequence}")
}
