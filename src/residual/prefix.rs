//! The old tokens of a step in canonical chunks, as a replay carries them from layer to layer.
//!
//! A chunk covers a fixed range of positions and always has the same shape. So an entry is rebuilt by the same calls in
//! every step.

use burn::tensor::Tensor;

use crate::{
    cache::{CacheError, KeysValues, Projection, Replay, TokenIds},
    positions::Positions,
    storage::LayerStore,
};

/// The tokens that are rebuilt in a step: for each chunk its positions, pads after the last old token, and the residual
/// entering the layer that is due.
#[derive(Debug, Clone, Default)]
pub(super) struct Prefix(Vec<(Positions, Tensor<3>)>);

impl Prefix {
    /// From the residual of each chunk.
    pub(super) fn new(chunks: impl Iterator<Item = (Positions, Tensor<3>)>) -> Self {
        Self(chunks.collect())
    }

    /// The first `old[sequence]` tokens of every sequence as they enter the first layer.
    pub(super) fn embed(
        tokens: &TokenIds,
        old: &[usize],
        chunk: usize,
        replay: &dyn Replay,
    ) -> Result<Self, CacheError> {
        let embedded = chunks(old, chunk).map(|(from, positions)| {
            let ids = tokens.padded_range(from, from + chunk);
            Ok((positions, replay.embed(&ids)?))
        });
        embedded.collect::<Result<_, _>>().map(Self)
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

    /// Carries every chunk through a sliding-window layer. Each reads no more than its window, which `reach` holds.
    /// Keys and values of every chunk are handed to `take`. `leaves` says whether the tokens go on to the next layer.
    /// Returns the most bytes that `reach` held.
    pub(super) fn pass(
        &mut self,
        old: &[usize],
        replay: &dyn Replay,
        leaves: bool,
        reach: &mut LayerStore,
        mut take: impl FnMut(&Projection, &Positions),
    ) -> Result<usize, CacheError> {
        let mut most = 0;
        let mut from = 0;
        for (positions, residual) in &mut self.0 {
            let before: Vec<usize> = old.iter().map(|&n| n.min(from)).collect();
            from += positions.width();
            let moved = reach.slide(&before);
            let projection = replay.project(residual.clone(), positions)?;
            let grown = reach.append(&projection, positions);
            most = most.max(reach.held() + moved.max(grown));
            take(&projection, positions);
            if leaves {
                *residual = replay.forward(residual.clone(), positions, &reach.read()?)?;
            }
        }
        Ok(most)
    }

    pub(super) fn bytes(&self) -> usize {
        self.0.iter().map(|(_, residual)| bytes(residual)).sum()
    }
}

/// Where each chunk of the first `old[sequence]` tokens starts, and its positions.
pub(super) fn chunks(old: &[usize], chunk: usize) -> impl Iterator<Item = (usize, Positions)> {
    let longest = old.iter().copied().max().unwrap_or(0);
    (0..longest).step_by(chunk).map(move |from| {
        let position = |p: usize, old: usize| if p < old { p } else { Positions::EMPTY };
        let list = |&old: &usize| (from..from + chunk).map(|p| position(p, old)).collect();
        let lists: Vec<Vec<usize>> = old.iter().map(list).collect();
        (from, Positions::shared(&lists))
    })
}

pub(super) fn bytes(residual: &Tensor<3>) -> usize {
    residual.dims().iter().product::<usize>() * residual.dtype().size()
}
