//! Entries copied from store to store, and moved to free memory.

use super::{buffers::Rows, layer::LayerStore, sequence::SequenceStore};
use crate::exact::{PANEL, whole};

impl LayerStore {
    /// Copies the entries for which `keep(sequence, position)` is true to `other`, in rising order of their positions.
    /// All KV heads hold the same entries. What `other` grows by is not reported: reserve before.
    pub(crate) fn copy_into(&self, other: &mut Self, keep: impl Fn(usize, usize) -> bool) {
        other.resize(self.sequences.len().max(other.sequences.len()));
        let growth = other.growth();
        let sequences = self.sequences.iter().zip(&mut other.sequences);
        for (sequence, (store, other)) in sequences.enumerate() {
            let Some(buffers) = &store.buffers else {
                continue;
            };
            let list = &store.lists[0];
            let heads = 0..buffers.dims()[0];
            for run in list.runs(|position| keep(sequence, position)) {
                let positions = &list.as_ref()[run.clone()];
                other.append(&buffers.rows(&heads, run), &[positions], growth);
            }
        }
    }

    /// Frees the panels of each sequence that its entries and one more do not need. Returns the bytes held in addition
    /// meanwhile, one sequence after another. A sliding-window layer does this when it [`slide`](Self::slide)s.
    pub(crate) fn shrink(&mut self) -> usize {
        if self.slides() {
            return 0;
        }
        let moved = self.sequences.iter_mut().map(SequenceStore::shrink);
        moved.max().unwrap_or(0)
    }

    /// [Shrinks](Self::shrink) buffers of which less than half is needed, and a panel. Otherwise a truncation at the edge
    /// of a panel would free a panel that the next token needs again.
    pub(crate) fn settle(&mut self) -> usize {
        if self.slides() {
            return 0;
        }
        let half =
            |store: &&mut SequenceStore| whole(store.used() + 1) + PANEL <= store.capacity() / 2;
        let sequences = self.sequences.iter_mut().filter(half);
        sequences.map(SequenceStore::shrink).max().unwrap_or(0)
    }

    /// Changes the batch to these of its sequences, in this order; one may be repeated. Nothing is copied until it
    /// changes.
    pub(crate) fn select(&mut self, sequences: &[usize]) {
        let most = sequences.iter().max().map_or(0, |most| most + 1);
        self.resize(most.max(self.sequences.len()));
        let of = |&sequence: &usize| self.sequences[sequence].clone();
        self.sequences = sequences.iter().map(of).collect();
    }

    /// The entries of one sequence in rising order of positions, with these and the slots they are in, for each list:
    /// as many rows as the longest list has.
    pub(super) fn rising(store: &SequenceStore) -> Option<(Rows, Vec<Vec<usize>>)> {
        let order: Vec<_> = store.lists.iter().map(|list| list.rising()).collect();
        let count = order
            .iter()
            .map(Vec::len)
            .max()
            .filter(|&count| count > 0)?;
        let rows = store.buffers.as_ref()?.gather(&order, count);
        Some((rows, order))
    }
}
