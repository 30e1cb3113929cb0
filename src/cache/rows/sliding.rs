//! Rows of a layer with a window: what a step lets go of, and how far back one can go then.

use burn::tensor::Tensor;

use super::Rows;
use crate::{
    cache::{CacheError, slots::Slots},
    exact::{PIECE, zeros},
};

impl Rows {
    /// In a layer with a window, lets go of what the queries after `lengths` tokens cannot see, and
    /// moves the rest where that frees at least a piece. Answers the bytes that were held on top
    /// meanwhile.
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
        let whole = (most + 1).next_multiple_of(PIECE);
        if moved.iter().all(|&by| by == 0) && self.capacity() < whole + PIECE {
            return 0;
        }
        let (used, free) = self.bytes();
        let Some((old_keys, old_values)) = self.buffers.take() else {
            return 0;
        };
        let [batch, heads, width, _] = old_keys.dims();
        let options = (&old_keys.device(), old_keys.dtype());
        let mut keys = zeros([batch, heads, width, whole], options);
        let mut values = zeros([batch, heads, whole, width], options);
        let together = moved.iter().all(|by| *by == moved[0]);
        for row in 0..if together { 1 } else { batch } {
            let (rows, end) = if together {
                (0..batch, most)
            } else {
                (row..row + 1, ends[row])
            };
            if end == 0 {
                continue;
            }
            let from = moved[row]..moved[row] + end;
            let part = |tensor: &Tensor<4>, dim| {
                let rows = tensor.clone().slice_dim(0, rows.clone());
                rows.slice_dim(dim, from.clone())
            };
            let at = [rows.clone(), 0..heads, 0..width, 0..end];
            keys = keys.slice_assign(at, part(&old_keys, 3));
            let at = [rows.clone(), 0..heads, 0..end, 0..width];
            values = values.slice_assign(at, part(&old_values, 2));
        }
        self.buffers = Some((keys, values));
        self.slots.iter_mut().for_each(|row| row.grow(whole));
        used + free
    }

    /// The shortest length, apart from 0, that a batch row can be taken back to.
    pub(crate) fn oldest(&self, row: usize) -> usize {
        match (self.window, self.from.get(row)) {
            (Some(window), Some(&from)) if from > 0 => from + window.get() - 1,
            _ => 0,
        }
    }

    /// Checks that every batch row can be taken back to its length in `to`: in layers with a window, and
    /// as far as `oldest(row, length)` says for the others. Nothing at all can always be reached.
    pub(crate) fn reachable(
        layers: &[Self],
        lengths: &[usize],
        to: &[usize],
        oldest: impl Fn(usize, usize) -> usize,
    ) -> Result<(), CacheError> {
        let rows = lengths.iter().zip(to).enumerate();
        let shortened = |&(_, (&length, &to)): &(usize, (&usize, &usize))| 0 < to && to < length;
        for (row, (&length, &to)) in rows.filter(shortened) {
            let windows = layers.iter().map(|rows| rows.oldest(row));
            let oldest = windows.fold(oldest(row, length), usize::max);
            if to < oldest {
                return Err(CacheError::Irreversible { row, to, oldest });
            }
        }
        Ok(())
    }
}
