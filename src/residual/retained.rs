//! Residuals that a plan retains, by chunk.

use burn::tensor::Tensor;

use super::prefix::{Prefix, bytes, chunks};
use crate::{
    cache::{CacheError, ModelShape, State, StateValue},
    exact::zeros,
    positions::Positions,
    storage::index,
};

/// The residual entering one layer, of all tokens, in the chunks of a [`Prefix`].
#[derive(Debug, Clone)]
pub(super) struct Residuals {
    chunk: usize,
    stored: Vec<Tensor<3>>,
}

impl Residuals {
    /// None yet, in chunks of `chunk` tokens.
    pub(super) const fn new(chunk: usize) -> Self {
        Self {
            chunk,
            stored: Vec::new(),
        }
    }

    /// Stores the residual of every token that has a position, in place.
    pub(super) fn append(&mut self, residual: &Tensor<3>, positions: &Positions) {
        let [batch, _, hidden] = residual.dims();
        let together = positions.sequences_agree();
        for sequence in 0..if together { 1 } else { batch } {
            let sequences = match together {
                true => 0..batch,
                false => sequence..sequence + 1,
            };
            let slots = positions.slots(sequence, 0);
            let held = |&&position: &&usize| position != Positions::EMPTY;
            let mut from = 0;
            while let Some(&position) = slots.get(from).filter(held) {
                let (chunk, at) = (position / self.chunk, position % self.chunk);
                let rest = slots[from..].iter().take(self.chunk - at);
                let count = rest.filter(held).count();
                let options = (&residual.device(), residual.dtype());
                while self.stored.len() <= chunk {
                    self.stored
                        .push(zeros([batch, self.chunk, hidden], options));
                }
                let part = residual.clone().slice_dim(0, sequences.clone());
                let part = part.slice_dim(1, from..from + count);
                let ranges = [sequences.clone(), at..at + count, 0..hidden];
                self.stored[chunk].inplace(|stored| stored.slice_assign(ranges, part));
                from += count;
            }
        }
    }

    /// The first `old[sequence]` tokens.
    pub(super) fn prefix(&self, old: &[usize]) -> Prefix {
        let chunks = chunks(old, self.chunk);
        Prefix::new(chunks.map(|(from, at)| (at, self.stored[from / self.chunk].clone())))
    }

    pub(super) fn select(&mut self, sequences: &[usize]) {
        for chunk in &mut self.stored {
            let index = index(sequences, &chunk.device());
            chunk.inplace(|stored| stored.select(0, index));
        }
    }

    /// Adds the chunks of a layer to a state.
    pub(super) fn write(&self, layer: usize, state: &mut State) {
        for (chunk, residual) in self.stored.iter().enumerate() {
            state.insert(name(layer, chunk), StateValue::Tensor(residual.clone()));
        }
    }

    /// The chunks that tokens of these lengths have in a layer.
    pub(super) fn restored(
        &self,
        layer: usize,
        lengths: &[usize],
        shape: &ModelShape,
        state: &State,
    ) -> Result<Self, CacheError> {
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let dims = [lengths.len(), self.chunk, shape.hidden];
        let chunk = |chunk| state.tensor(&name(layer, chunk), dims, shape.dtype);
        let stored = (0..longest.div_ceil(self.chunk)).map(chunk);
        Ok(Self {
            chunk: self.chunk,
            stored: stored.collect::<Result<_, CacheError>>()?,
        })
    }

    /// Drops the chunks that hold nothing below `to`.
    pub(super) fn truncate(&mut self, to: usize) {
        self.stored.truncate(to.div_ceil(self.chunk));
    }

    pub(super) fn bytes(&self) -> usize {
        self.stored.iter().map(bytes).sum()
    }
}

/// The name of a value of a state, for a layer and chunk.
fn name(layer: usize, chunk: usize) -> String {
    format!("layer.{layer}.residuals.{chunk}")
}
