//! The old rows of a step, in canonical chunks: what a replay carries from layer to layer.
//!
//! A chunk covers a fixed range of positions and always has the same shape, so a row is rebuilt by
//! the same calls in every step.

use burn::tensor::Tensor;

use crate::{
    cache::{
        CacheError, Entry, KeysValues, ModelShape, Projection, Replay, State, TokenIds,
        rows::{Rows, index},
    },
    exact::zeros,
    positions::Positions,
};

/// The rows that are rebuilt in a step: for each chunk its positions, pads beyond the last old row,
/// and the residual stream entering the layer that is due.
#[derive(Debug, Clone, Default)]
pub(super) struct Prefix(Vec<(Positions, Tensor<3>)>);

impl Prefix {
    /// The first `old[row]` tokens of every row as they enter the first layer.
    pub(super) fn embed(
        tokens: &TokenIds,
        old: &[usize],
        chunk: usize,
        replay: &dyn Replay,
    ) -> Result<Self, CacheError> {
        chunks(old, chunk)
            .map(|(from, positions)| {
                let ids = tokens.range(from, from + chunk).padded(chunk, 0);
                Ok((positions, replay.embed(&ids)?))
            })
            .collect::<Result<_, _>>()
            .map(Self)
    }

    /// Rebuilds keys and values of every chunk and hands them to `take` with their positions.
    pub(super) fn project(
        &self,
        replay: &dyn Replay,
        mut take: impl FnMut(&Projection, &Positions) -> Result<(), CacheError>,
    ) -> Result<(), CacheError> {
        for (positions, residual) in &self.0 {
            take(&replay.project(residual.clone(), positions)?, positions)?;
        }
        Ok(())
    }

    /// Carries every chunk through the block, so that it enters the next layer.
    pub(super) fn advance(
        &mut self,
        keys_values: &KeysValues,
        replay: &dyn Replay,
    ) -> Result<(), CacheError> {
        for (positions, residual) in &mut self.0 {
            *residual = replay.forward(residual.clone(), positions, keys_values)?;
        }
        Ok(())
    }

    /// Takes every chunk through a layer with a window, each reading no more than that shows: `reach`
    /// holds it. Keys and values of every chunk are handed to `take`; `on` says whether the rows go on to
    /// the next layer. Answers the most bytes that `reach` held.
    pub(super) fn pass(
        &mut self,
        old: &[usize],
        replay: &dyn Replay,
        on: bool,
        reach: &mut Rows,
        mut take: impl FnMut(&Projection, &Positions),
    ) -> Result<usize, CacheError> {
        let mut most = 0;
        let mut from = 0;
        for (positions, residual) in &mut self.0 {
            let before: Vec<usize> = old.iter().map(|&n| n.min(from)).collect();
            from += positions.width();
            let moved = reach.slide(&before);
            let rows = replay.project(residual.clone(), positions)?;
            let grown = reach.append(&rows, positions);
            let (used, free) = reach.bytes();
            most = most.max(used + free + moved.max(grown));
            take(&rows, positions);
            if on {
                *residual = replay.forward(residual.clone(), positions, &reach.read()?)?;
            }
        }
        Ok(most)
    }

    pub(super) fn bytes(&self) -> usize {
        self.0.iter().map(|(_, residual)| bytes(residual)).sum()
    }
}

/// The residual rows of one layer, kept from the moment they came in, in the same chunks.
#[derive(Debug, Clone)]
pub(super) struct Residuals {
    chunk: usize,
    stored: Vec<Tensor<3>>,
}

impl Residuals {
    /// None yet; chunks will be of `chunk` rows.
    pub(super) const fn new(chunk: usize) -> Self {
        Self {
            chunk,
            stored: Vec::new(),
        }
    }

    /// Stores every row of `residual` that has a position, in place.
    pub(super) fn append(&mut self, residual: &Tensor<3>, positions: &Positions) {
        let [batch, _, hidden] = residual.dims();
        let together = positions.rows_agree();
        for row in 0..if together { 1 } else { batch } {
            let rows = if together { 0..batch } else { row..row + 1 };
            let slots = positions.slots(row, 0);
            let mut from = 0;
            while let Some(&position) = slots
                .get(from)
                .filter(|&&position| position != Positions::EMPTY)
            {
                let (chunk, at) = (position / self.chunk, position % self.chunk);
                let count = slots[from..]
                    .iter()
                    .take(self.chunk - at)
                    .filter(|&&p| p != Positions::EMPTY)
                    .count();
                let options = (&residual.device(), residual.dtype());
                while self.stored.len() <= chunk {
                    self.stored
                        .push(zeros([batch, self.chunk, hidden], options));
                }
                let part = residual
                    .clone()
                    .slice_dim(0, rows.clone())
                    .slice_dim(1, from..from + count);
                let ranges = [rows.clone(), at..at + count, 0..hidden];
                self.stored[chunk].inplace(|stored| stored.slice_assign(ranges, part));
                from += count;
            }
        }
    }

    /// The first `old[row]` rows.
    pub(super) fn prefix(&self, old: &[usize]) -> Prefix {
        Prefix(
            chunks(old, self.chunk)
                .map(|(from, positions)| (positions, self.stored[from / self.chunk].clone()))
                .collect(),
        )
    }

    pub(super) fn select_rows(&mut self, rows: &[usize]) {
        for chunk in &mut self.stored {
            let index = index(rows, &chunk.device());
            chunk.inplace(|stored| stored.select(0, index));
        }
    }

    /// Adds the chunks of a layer to a state.
    pub(super) fn write(&self, layer: usize, state: &mut State) {
        for (chunk, rows) in self.stored.iter().enumerate() {
            let rows = rows.clone().unsqueeze();
            state.insert(name(layer, chunk), Entry::Tensor(rows));
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
        let dims = [1, lengths.len(), self.chunk, shape.hidden];
        let chunk = |chunk| {
            let rows = state.tensor(&name(layer, chunk), dims, shape.dtype)?;
            Ok(rows.reshape([lengths.len(), self.chunk, shape.hidden]))
        };
        let stored = (0..longest.div_ceil(self.chunk)).map(chunk);
        Ok(Self {
            chunk: self.chunk,
            stored: stored.collect::<Result<_, CacheError>>()?,
        })
    }

    /// Lets go of the chunks that hold nothing below `to`.
    pub(super) fn truncate(&mut self, to: usize) {
        self.stored.truncate(to.div_ceil(self.chunk));
    }

    pub(super) fn bytes(&self) -> usize {
        self.stored.iter().map(bytes).sum()
    }
}

/// Where each chunk of the first `old[row]` rows starts, and its positions.
fn chunks(old: &[usize], chunk: usize) -> impl Iterator<Item = (usize, Positions)> {
    let longest = old.iter().copied().max().unwrap_or(0);
    (0..longest).step_by(chunk).map(move |from| {
        let row = |&old: &usize| -> Vec<usize> {
            (from..from + chunk)
                .map(|p| if p < old { p } else { Positions::EMPTY })
                .collect()
        };
        (
            from,
            Positions::from_rows(&old.iter().map(row).collect::<Vec<_>>()),
        )
    })
}

/// The entry of a state for a layer and chunk.
fn name(layer: usize, chunk: usize) -> String {
    format!("layer.{layer}.residuals.{chunk}")
}

fn bytes(residual: &Tensor<3>) -> usize {
    residual.dims().iter().product::<usize>() * residual.dtype().size()
}
