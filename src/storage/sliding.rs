//! Entries of a sliding-window layer: what a step frees, and how far a truncation then reaches.

use super::layer::{LayerStore, newest_slots};
use crate::cache::CacheError;

impl LayerStore {
    /// In a sliding-window layer, frees the entries that no query after `lengths` tokens sees, and moves the rest where
    /// that frees a panel. Returns the bytes held in addition meanwhile, one sequence after another.
    pub(crate) fn slide(&mut self, lengths: &[usize]) -> usize {
        let Some(window) = self.window else { return 0 };
        self.resize(lengths.len());
        let sequences = self.sequences.iter_mut().zip(lengths);
        let moved = sequences.map(|(store, length)| {
            let oldest = (length + 1).saturating_sub(window.get());
            store.slide(oldest, newest_slots(window.get()))
        });
        moved.max().unwrap_or(0)
    }

    /// Frees the entries below `oldest[sequence]`, and moves the rest where that frees a panel, in a store of the
    /// [`newest`](Self::newest) entries. Returns the bytes held in addition meanwhile, one sequence after another.
    pub(crate) fn drop_below(&mut self, oldest: &[usize]) -> usize {
        self.resize(oldest.len());
        let limit = self.limit.unwrap_or(usize::MAX);
        let sequences = self.sequences.iter_mut().zip(oldest);
        let moved = sequences.map(|(store, &oldest)| store.slide(oldest, limit));
        moved.max().unwrap_or(0)
    }

    /// The shortest length, apart from 0, that a sequence can be truncated to.
    pub(super) fn shortest(&self, sequence: usize) -> usize {
        let from = self.sequences.get(sequence).map_or(0, |store| store.from);
        match self.window {
            Some(window) if from > 0 => (from - 1).saturating_add(window.get()),
            _ => 0,
        }
    }

    /// Checks that every sequence can be truncated to its length in `to`: in sliding-window layers, and in the others
    /// down to `shortest(sequence, length)`. A length of 0 can always be reached.
    pub(crate) fn can_truncate(
        layers: &[Self],
        lengths: &[usize],
        to: &[usize],
        shortest: impl Fn(usize, usize) -> usize,
    ) -> Result<(), CacheError> {
        let sequences = lengths.iter().zip(to).enumerate();
        let shortened = |&(_, (&length, &to)): &(usize, (&usize, &usize))| 0 < to && to < length;
        for (sequence, (&length, &to)) in sequences.filter(shortened) {
            let windows = layers.iter().map(|store| store.shortest(sequence));
            let reachable = windows.fold(shortest(sequence, length), usize::max);
            if to < reachable {
                return Err(CacheError::Irreversible {
                    sequence,
                    to,
                    shortest: reachable,
                });
            }
        }
        Ok(())
    }
}
