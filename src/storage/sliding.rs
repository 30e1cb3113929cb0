//! Entries of a sliding-window layer: what a step frees, and how far a truncation then reaches.

use burn::tensor::Tensor;

use super::{layer::LayerStore, slots::Slots};
use crate::{
    cache::CacheError,
    exact::{KV_BLOCK, zeros},
};

impl LayerStore {
    /// In a sliding-window layer, frees the entries that no query after `lengths` tokens sees, and moves the rest where
    /// that frees at least a block. Returns the bytes held in addition meanwhile.
    pub(crate) fn slide(&mut self, lengths: &[usize]) -> usize {
        let Some(window) = self.window else { return 0 };
        self.resize(lengths.len());
        let oldest = |&length: &usize| (length + 1).saturating_sub(window.get());
        self.from = lengths.iter().map(oldest).collect();
        let moved: Vec<usize> = self
            .slots
            .iter_mut()
            .zip(&self.from)
            .map(|(slots, &oldest)| slots.slide(oldest))
            .collect();
        let ends: Vec<usize> = self.slots.iter().map(Slots::end).collect();
        let most = ends.iter().copied().max().unwrap_or(0);
        let whole = (most + 1).next_multiple_of(KV_BLOCK);
        if moved.iter().all(|&by| by == 0) && self.capacity() < whole + KV_BLOCK {
            return 0;
        }
        let held = self.held();
        let Some((old_keys, old_values)) = self.buffers.take() else {
            return 0;
        };
        let [batch, heads, width, _] = old_keys.dims();
        let options = (&old_keys.device(), old_keys.dtype());
        let mut keys = zeros([batch, heads, width, whole], options);
        let mut values = zeros([batch, heads, whole, width], options);
        let together = moved.iter().all(|by| *by == moved[0]);
        let groups = match together {
            true => vec![(0..batch, most)],
            false => (0..batch).map(|i| (i..i + 1, ends[i])).collect(),
        };
        for (sequences, end) in groups.into_iter().filter(|(_, end)| *end > 0) {
            let by = moved[sequences.start];
            let part = |tensor: &Tensor<4>, dim| {
                let part = tensor.clone().slice_dim(0, sequences.clone());
                part.slice_dim(dim, by..by + end)
            };
            let at = [sequences.clone(), 0..heads, 0..width, 0..end];
            keys = keys.slice_assign(at, part(&old_keys, 3));
            let at = [sequences.clone(), 0..heads, 0..end, 0..width];
            values = values.slice_assign(at, part(&old_values, 2));
        }
        self.buffers = Some((keys, values));
        self.slots.iter_mut().for_each(|list| list.grow(whole));
        held
    }

    /// The shortest length, apart from 0, that a sequence can be truncated to.
    pub(super) fn shortest(&self, sequence: usize) -> usize {
        match (self.window, self.from.get(sequence)) {
            (Some(window), Some(&from)) if from > 0 => (from - 1).saturating_add(window.get()),
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
