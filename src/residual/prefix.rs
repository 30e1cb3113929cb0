//! The old tokens of a step in chunks, as a replay carries them from layer to layer.

use std::ops::Range;

use burn::tensor::Tensor;

use crate::{
    cache::{CacheError, KeysValues, Projection, Replay, TokenIds},
    positions::Positions,
    storage::LayerStore,
};

/// Old tokens that go through a layer together, of one sequence or of several short ones.
#[derive(Debug, Clone)]
pub(super) struct Chunk {
    /// For each sequence its tokens in this chunk, none for most.
    pub(super) tokens: Vec<Range<usize>>,
    /// Their positions, with pads where chunks are padded.
    pub(super) positions: Positions,
}

/// How old tokens are cut into chunks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cut {
    /// Tokens of a chunk at most. A sequence is cut at multiples of it.
    pub(super) chunk: usize,
    /// Whether each chunk has tokens of one sequence and is filled up with pads. So an entry is rebuilt by the same
    /// calls in every step, on devices where bits may depend on the shape of a call.
    pub(super) padded: bool,
}

impl Cut {
    /// The chunks of the first `old[sequence]` tokens.
    pub(super) fn chunks(self, old: &[usize]) -> Vec<Chunk> {
        let mut chunks: Vec<Vec<Range<usize>>> = Vec::new();
        let mut room = 0;
        for (sequence, &old) in old.iter().enumerate() {
            for from in (0..old).step_by(self.chunk) {
                let tokens = from..(from + self.chunk).min(old);
                if tokens.len() > room || self.padded {
                    chunks.push(vec![0..0; sequence]);
                    room = self.chunk;
                }
                room -= tokens.len();
                let last = chunks.last_mut().expect("a chunk was begun");
                last.resize(sequence, 0..0);
                last.push(tokens);
            }
        }
        let sequences = old.len();
        let chunks = chunks.into_iter().map(|mut tokens| {
            tokens.resize(sequences, 0..0);
            let list = |tokens: &Range<usize>| {
                let mut list: Vec<usize> = tokens.clone().collect();
                if self.padded && !list.is_empty() {
                    list.resize(self.chunk, Positions::EMPTY);
                }
                list
            };
            let lists: Vec<Vec<usize>> = tokens.iter().map(list).collect();
            let positions = Positions::shared(&lists);
            Chunk { tokens, positions }
        });
        chunks.collect()
    }
}

/// The tokens that are rebuilt in a step: chunks, and for each the residual entering the layer that is due.
#[derive(Debug, Clone, Default)]
pub(super) struct Prefix(Vec<(Chunk, Tensor<3>)>);

impl Prefix {
    /// From the residual of each chunk.
    pub(super) fn new(chunks: impl Iterator<Item = (Chunk, Tensor<3>)>) -> Self {
        Self(chunks.collect())
    }

    /// The first `old[sequence]` tokens of every sequence as they enter the first layer.
    pub(super) fn embed(
        tokens: &TokenIds,
        old: &[usize],
        cut: Cut,
        replay: &dyn Replay,
    ) -> Result<Self, CacheError> {
        let embedded = cut.chunks(old).into_iter().map(|chunk| {
            let ids = tokens.at(&chunk.positions);
            let residual = replay.embed(&ids, &chunk.positions)?;
            Ok((chunk, residual))
        });
        embedded.collect::<Result<_, _>>().map(Self)
    }

    /// Rebuilds keys and values of every chunk and hands them to `take` with their positions.
    pub(super) fn project(
        &self,
        replay: &dyn Replay,
        mut take: impl FnMut(&Projection, &Positions) -> Result<(), CacheError>,
    ) -> Result<(), CacheError> {
        for (Chunk { positions, .. }, residual) in &self.0 {
            take(&replay.project(residual.clone(), positions)?, positions)?;
        }
        Ok(())
    }

    /// Carries every chunk through the block, so that it enters the next layer. With `alike`, a chunk's call is the same
    /// in every replay: entries behind the chunk are left out. The batch then has one sequence.
    pub(super) fn advance(
        &mut self,
        keys_values: &KeysValues,
        alike: bool,
        replay: &dyn Replay,
    ) -> Result<(), CacheError> {
        for (Chunk { tokens, positions }, residual) in &mut self.0 {
            let entering = residual.clone();
            *residual = match alike {
                true => {
                    let seen = keys_values.below(tokens[0].end);
                    replay.forward(entering, positions, &seen)?
                }
                false => replay.forward(entering, positions, keys_values)?,
            };
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
        let mut before = vec![0; old.len()];
        for (Chunk { tokens, positions }, residual) in &mut self.0 {
            for (before, tokens) in before.iter_mut().zip(tokens) {
                *before = tokens.start.max(*before);
            }
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

pub(super) fn bytes(residual: &Tensor<3>) -> usize {
    residual.dims().iter().product::<usize>() * residual.dtype().size()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_every_old_token_once_and_in_order() {
        let olds: [&[usize]; 5] = [&[200], &[0, 5, 0, 300, 3, 4], &[128; 3], &[40; 9], &[0, 0]];
        for (old, padded) in olds.into_iter().flat_map(|old| [(old, false), (old, true)]) {
            let mut next = vec![0; old.len()];
            let mut rows = 0;
            for chunk in (Cut { chunk: 128, padded }).chunks(old) {
                for (sequence, tokens) in chunk.tokens.iter().enumerate() {
                    assert_eq!(tokens.len(), chunk.positions.count(sequence));
                    if !tokens.is_empty() {
                        assert_eq!(tokens.start, next[sequence]);
                        assert_eq!(tokens.start / 128, (tokens.end - 1) / 128);
                        next[sequence] = tokens.end;
                    }
                }
                let found = chunk.positions.tokens();
                assert!(0 < found && found <= 128);
                assert!(!padded || found == 128, "{found} rows of a padded chunk");
                rows += found;
            }
            assert_eq!(next, old);
            assert!(padded || rows == old.iter().sum::<usize>());
        }
    }

    #[test]
    fn short_sequences_share_a_chunk() {
        let cut = Cut {
            chunk: 128,
            padded: false,
        };
        assert_eq!(cut.chunks(&[40; 9]).len(), 3);
        assert_eq!(cut.chunks(&[10, 200, 50]).len(), 3, "10; 128; 72 and 50");
    }
}
