//! Entries copied out of their slots, and moved to free memory.

use std::ops::Range;

use burn::tensor::{Device, Int, Tensor, TensorData};

use super::{
    layer::{LayerStore, parts},
    slots::Slots,
};
use crate::{
    cache::Projection,
    exact::{KV_BLOCK, zeros},
    positions::Positions,
};

impl LayerStore {
    /// Copies the entries for which `keep(sequence, position)` is true to `other`, in rising order of their positions.
    /// What `other` grows by is not reported: reserve before.
    pub(crate) fn copy_into(&self, other: &mut Self, keep: impl Fn(usize, usize) -> bool) {
        let Some((keys, values)) = &self.buffers else {
            return;
        };
        other.resize(self.slots.len());
        let lists = self.slots.iter().enumerate();
        let runs: Vec<Vec<Range<usize>>> = lists
            .map(|(sequence, slots)| slots.runs(|position| keep(sequence, position)))
            .collect();
        for (sequences, heads, list) in parts(&runs, self.lists(), keys.dims()[1]) {
            for run in &runs[list] {
                let part = |tensor: &Tensor<4>, dim| {
                    let part = tensor.clone().slice([sequences.clone(), heads.clone()]);
                    part.slice_dim(dim, run.clone())
                };
                let held = Projection {
                    keys: part(keys, 3).swap_dims(2, 3),
                    values: part(values, 2),
                };
                let positions: Vec<&[usize]> = sequences
                    .clone()
                    .map(|sequence| &self.slots[sequence].as_ref()[run.clone()])
                    .collect();
                other.append_from(sequences.start, &held, &Positions::shared(&positions));
            }
        }
    }

    /// Frees the blocks that the entries held and one more do not need. A list that reaches beyond the slots it needs
    /// moves into its first slots, in rising order of positions. The other lists stay in place, so that a sequence
    /// never depends on the others. Returns the bytes held in addition meanwhile. A sliding-window layer does this
    /// when it [`slide`](Self::slide)s.
    pub(crate) fn shrink(&mut self) -> usize {
        if self.slides() {
            return 0;
        }
        let whole = |slots: &Slots| (slots.used() + 1).next_multiple_of(KV_BLOCK);
        let moves = |slots: &Slots| self.limit.is_none() && slots.end() > whole(slots);
        let most = self.slots.iter().map(whole).max().unwrap_or(KV_BLOCK);
        if self.capacity() < most + KV_BLOCK && !self.slots.iter().any(moves) {
            return 0;
        }
        let order = self.slots.iter().map(|slots| match slots.end() {
            end if end > whole(slots) => slots.rising(),
            end => (0..end).collect(),
        });
        let order: Vec<Vec<usize>> = order.collect();
        let width = order.iter().map(Vec::len).max().unwrap_or(0);
        let ((used, _), capacity) = (self.bytes(), most.min(self.capacity()));
        let Some((old_keys, old_values)) = self.buffers.take() else {
            return 0;
        };
        let [batch, heads, head_dim, _] = old_keys.dims();
        let (device, dtype) = (old_keys.device(), old_keys.dtype());
        let held = (width > 0).then(|| select(&old_keys, &old_values, &order, self.lists(), width));
        // Apart from the copy, only the old buffers or the new ones are held.
        drop((old_keys, old_values));
        let mut keys = zeros([batch, heads, head_dim, capacity], (&device, dtype));
        let mut values = zeros([batch, heads, capacity, head_dim], (&device, dtype));
        if let Some((held_keys, held_values)) = held {
            keys = keys.slice_assign([0..batch, 0..heads, 0..head_dim, 0..width], held_keys);
            values = values.slice_assign([0..batch, 0..heads, 0..width, 0..head_dim], held_values);
        }
        self.buffers = Some((keys, values));
        let lists = self.slots.iter_mut().zip(&order);
        lists.for_each(|(slots, order)| slots.reorder(order, capacity));
        used
    }

    /// [Shrinks](Self::shrink) buffers of which at most half is needed. Otherwise a truncation at the edge of a block
    /// would free a block that the next token needs again.
    pub(crate) fn settle(&mut self) -> usize {
        let used = self.slots.iter().map(Slots::used).max().unwrap_or(0);
        if (used + 1).next_multiple_of(KV_BLOCK) <= self.capacity() / 2 {
            self.shrink()
        } else {
            0
        }
    }

    /// Changes the batch to these of its sequences, in this order; one may be repeated.
    pub(crate) fn select(&mut self, sequences: &[usize]) {
        let lists = self.lists();
        let of_sequence = |&sequence: &usize| {
            let slots = self.slots.get(sequence * lists..(sequence + 1) * lists);
            slots.unwrap_or_default().to_vec()
        };
        self.slots = sequences.iter().flat_map(of_sequence).collect();
        let from = sequences.iter().filter_map(|&i| self.from.get(i).copied());
        self.from = from.collect();
        let buffers = self.buffers.take().filter(|_| !sequences.is_empty());
        self.buffers = buffers.map(|(keys, values)| {
            let index = index(sequences, &keys.device());
            (keys.select(0, index.clone()), values.select(0, index))
        });
        self.shrink();
    }
}

/// The argument of [`Tensor::select`].
pub(crate) fn index(of: &[usize], device: &Device) -> Tensor<1, Int> {
    let index: Vec<i64> = of.iter().map(|&one| one as i64).collect();
    Tensor::from_data(TensorData::new(index, [of.len()]), device)
}

/// Gathers slots in the order given for each list. Shorter lists are filled up with zeros.
fn select(
    keys: &Tensor<4>,
    values: &Tensor<4>,
    order: &[Vec<usize>],
    lists: usize,
    width: usize,
) -> (Tensor<4>, Tensor<4>) {
    let [batch, kv_heads, head_dim, _] = keys.dims();
    let options = (&keys.device(), keys.dtype());
    let slots = |list: &[usize]| index(list, &keys.device());
    let parts = parts(order, lists, kv_heads);
    if parts.len() == 1 {
        let index = slots(&order[0]);
        return (
            keys.clone().select(3, index.clone()),
            values.clone().select(2, index),
        );
    }
    let mut all = (
        zeros([batch, kv_heads, head_dim, width], options),
        zeros([batch, kv_heads, width, head_dim], options),
    );
    for (sequences, heads, list) in parts {
        let count = order[list].len();
        if count == 0 {
            continue;
        }
        let index = slots(&order[list]);
        let of = |tensor: &Tensor<4>| tensor.clone().slice([sequences.clone(), heads.clone()]);
        let at = [sequences.clone(), heads.clone(), 0..head_dim, 0..count];
        let picked = of(keys).select(3, index.clone());
        all.0 = all.0.slice_assign(at, picked);
        let at = [sequences.clone(), heads.clone(), 0..count, 0..head_dim];
        all.1 = all.1.slice_assign(at, of(values).select(2, index));
    }
    all
}
