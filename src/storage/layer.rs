//! The keys and values of one layer, in slots.

use std::{fmt, num::NonZeroUsize, ops::Range};

use burn::tensor::Tensor;

use super::slots::{Run, Slots};
use crate::{
    cache::{CacheError, KeysValues, Projection},
    exact::{KV_BLOCK, zeros},
    positions::Positions,
};

/// The keys and values of one layer, in slots.
///
/// In a full-attention layer a new entry takes the lowest free slot. So until something is evicted, the slot of an
/// entry is its position. In a sliding-window layer the slot is the position, counted from the start of the oldest
/// block in use. Appends happen in place, unless the buffers must grow.
#[derive(Clone, Default)]
pub(crate) struct LayerStore {
    /// `[batch, kv_heads, head_dim, slots]` and `[batch, kv_heads, slots, head_dim]`. A tensor that leaves this
    /// struct is a second handle: appends copy until it is dropped.
    pub(super) buffers: Option<(Tensor<4>, Tensor<4>)>,
    /// A list for each sequence, or for each of its KV heads where these hold different entries.
    pub(super) slots: Vec<Slots>,
    /// KV heads, where each may hold different entries.
    pub(super) per_head: Option<usize>,
    /// The most slots ever needed, where that is known: buffers then grow to it and not beyond.
    pub(super) limit: Option<usize>,
    /// The layer's sliding window.
    pub(super) window: Option<NonZeroUsize>,
    /// In a sliding-window layer, the position from which on a sequence holds every entry.
    pub(super) from: Vec<usize>,
    /// Whether the slot of an entry is its position, whatever came before.
    pub(super) by_position: bool,
}

impl fmt::Debug for LayerStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let used: Vec<usize> = self.slots.iter().map(Slots::used).collect();
        f.debug_struct("LayerStore")
            .field("used", &used)
            .field("capacity", &self.capacity())
            .finish_non_exhaustive()
    }
}

impl LayerStore {
    /// An empty store for a layer with this sliding window. A full-attention layer (`None`) holds everything until
    /// it is evicted.
    pub(crate) fn new(window: Option<NonZeroUsize>) -> Self {
        Self {
            window,
            ..Self::default()
        }
    }

    /// An empty store for a full-attention layer, of which each of `kv_heads` heads may hold different entries.
    pub(crate) fn per_head(kv_heads: usize) -> Self {
        Self {
            per_head: Some(kv_heads),
            ..Self::default()
        }
    }

    /// An empty store for a full-attention layer whose buffers never grow beyond `limit` slots.
    pub(crate) fn limited(limit: usize) -> Self {
        Self {
            limit: Some(limit),
            ..Self::default()
        }
    }

    /// An empty store whose slots are positions, in whatever order entries come.
    pub(crate) fn by_position() -> Self {
        Self {
            by_position: true,
            ..Self::default()
        }
    }

    /// The same kind of store, empty.
    pub(crate) fn emptied(&self) -> Self {
        Self {
            limit: self.limit,
            per_head: self.per_head,
            by_position: self.by_position,
            ..Self::new(self.window)
        }
    }

    /// Whether the layer has a sliding window: no policy evicts from it.
    pub(crate) const fn slides(&self) -> bool {
        self.window.is_some()
    }

    /// Sets how far buffers grow from now on.
    pub(crate) const fn limit_to(&mut self, limit: Option<usize>) {
        self.limit = limit;
    }

    /// Makes room for `slots` slots, as far as the limit allows, for a batch and heads like those of `like`.
    pub(crate) fn reserve(&mut self, slots: usize, like: &Projection) {
        let slots = self.limit.map_or(slots, |limit| slots.min(limit));
        if slots > self.capacity() {
            self.resize(like.keys.dims()[0]);
            self.grow(slots, &like.keys);
        }
    }

    /// Removes all entries and keeps the buffers.
    pub(crate) fn vacate(&mut self) {
        self.retain(|_, _| false);
    }

    /// Stores every entry of `new` that has a position. Returns the bytes that were held in addition while the
    /// buffers grew.
    ///
    /// # Shapes
    /// `positions` is `[batch, 1, tokens]` for keys and values `[batch, kv_heads, tokens, head_dim]`.
    ///
    /// # Panics
    /// If batch, heads or `head_dim` differ from those of the entries held.
    pub(crate) fn append(&mut self, new: &Projection, positions: &Positions) -> usize {
        self.resize(positions.sequences());
        self.append_from(0, new, positions)
    }

    /// [`append`](Self::append)s to as many sequences as `new` has, from `first` on.
    pub(crate) fn append_from(
        &mut self,
        first: usize,
        new: &Projection,
        positions: &Positions,
    ) -> usize {
        let lists = self.lists();
        self.resize((self.slots.len() / lists).max(first + positions.sequences()));
        let new_of = |list: usize| positions.slots(list / lists, list % lists);
        let taking = first * lists..(first + positions.sequences()) * lists;
        let slots = self.slots[taking.clone()].iter().enumerate();
        let needed = slots.map(|(list, slots)| slots.needed(new_of(list))).max();
        let needed = needed.unwrap_or(0);
        let mut moved = 0;
        if needed > self.capacity() {
            moved = self.held();
            let whole = needed.next_multiple_of(KV_BLOCK);
            let limited = self.limit.map_or(whole, |limit| whole.min(limit));
            self.grow(limited.max(needed), &new.keys);
        }
        let Some((mut keys, mut values)) = self.buffers.take() else {
            return moved;
        };
        let [_, kv_heads, width, _] = keys.dims();
        let slots = self.slots[taking].iter_mut().enumerate();
        let runs: Vec<Vec<Run>> = slots
            .map(|(list, slots)| slots.take(new_of(list)))
            .collect();
        for (sequences, heads, list) in parts(&runs, lists, kv_heads) {
            let stored = sequences.start + first..sequences.end + first;
            for &Run { from, to, len } in &runs[list] {
                let part = |tensor: &Tensor<4>| {
                    let at = [sequences.clone(), heads.clone(), from..from + len];
                    tensor.clone().slice(at)
                };
                let at = [stored.clone(), heads.clone(), 0..width, to..to + len];
                keys = keys.slice_assign(at, part(&new.keys).swap_dims(2, 3));
                let at = [stored.clone(), heads.clone(), to..to + len, 0..width];
                values = values.slice_assign(at, part(&new.values));
            }
        }
        self.buffers = Some((keys, values));
        moved
    }

    /// All slots, as attention reads them. A view, unless the slots are not whole blocks: then a padded copy.
    ///
    /// # Errors
    /// [`Shape`](CacheError::Shape); never for a store filled by [`append`](Self::append).
    ///
    /// # Panics
    /// If nothing was ever stored.
    pub(crate) fn read(&self) -> Result<KeysValues, CacheError> {
        let (keys, values) = self
            .buffers
            .clone()
            .expect("a store is read after something was stored");
        let [batch, heads, width, slots] = keys.dims();
        let whole = slots.next_multiple_of(KV_BLOCK);
        if whole == slots {
            return KeysValues::new(keys, values, self.positions(&self.slots));
        }
        let options = (&keys.device(), keys.dtype());
        let keys = zeros([batch, heads, width, whole], options)
            .slice_assign([0..batch, 0..heads, 0..width, 0..slots], keys);
        let values = zeros([batch, heads, whole, width], options)
            .slice_assign([0..batch, 0..heads, 0..slots, 0..width], values);
        let mut padded = self.slots.clone();
        padded.iter_mut().for_each(|list| list.grow(whole));
        KeysValues::new(keys, values, self.positions(&padded))
    }

    /// The positions in these lists; one list for each sequence whose heads agree.
    fn positions<L: AsRef<[usize]>>(&self, of: &[L]) -> Positions {
        Positions::from_lists(self.lists(), of)
    }

    /// Lists of slots for each sequence.
    pub(super) const fn lists(&self) -> usize {
        match self.per_head {
            Some(kv_heads) => kv_heads,
            None => 1,
        }
    }

    /// Evicts the entries for which `keep(sequence, position)` is false, in all KV heads. Their slots are free and
    /// still store finite numbers.
    pub(crate) fn retain(&mut self, keep: impl Fn(usize, usize) -> bool) {
        let lists = self.lists();
        for (list, slots) in self.slots.iter_mut().enumerate() {
            slots.retain(|position| keep(list / lists, position));
        }
    }

    /// Every list of slots, with its sequence and its KV head (0 where heads share a list).
    pub(crate) fn lists_mut(&mut self) -> impl Iterator<Item = (usize, usize, &mut Slots)> {
        let lists = self.lists();
        let slots = self.slots.iter_mut().enumerate();
        slots.map(move |(list, slots)| (list / lists, list % lists, slots))
    }

    /// A copy of the keys in the first `count` slots of a sequence: `[1, kv_heads, count, head_dim]`.
    ///
    /// # Panics
    /// If there are fewer slots.
    pub(crate) fn first_keys(&self, sequence: usize, count: usize) -> Tensor<4> {
        let (keys, _) = self.buffers.as_ref().expect("entries were stored");
        let [_, kv_heads, width, _] = keys.dims();
        let copy = zeros([1, kv_heads, count, width], (&keys.device(), keys.dtype()));
        let at = [sequence..sequence + 1, 0..kv_heads, 0..width, 0..count];
        let first = keys.clone().slice(at).swap_dims(2, 3);
        // Not a view of the buffer: that would be a second handle.
        copy.slice_assign([0..1, 0..kv_heads, 0..count, 0..width], first)
    }

    /// Overwrites the keys in the first slots of a sequence, in place.
    pub(crate) fn set_first_keys(&mut self, sequence: usize, new: Tensor<4>) {
        let Some((keys, values)) = self.buffers.take() else {
            return;
        };
        let [_, kv_heads, count, width] = new.dims();
        let at = [sequence..sequence + 1, 0..kv_heads, 0..width, 0..count];
        self.buffers = Some((keys.slice_assign(at, new.swap_dims(2, 3)), values));
    }

    /// Shortens every sequence from its length to that in `to`. Freed slots are overwritten with zeros, because a
    /// rejected token may have left numbers there that are not finite. Entries that stay are not touched.
    pub(crate) fn truncate(&mut self, lengths: &[usize], to: &[usize]) {
        let lists = self.lists();
        let slots = self.slots.iter_mut().enumerate();
        let freed: Vec<Vec<Range<usize>>> = slots
            .map(|(list, slots)| slots.truncate(to[list / lists], lengths[list / lists]))
            .collect();
        for (from, _) in self.from.iter_mut().zip(to).filter(|(_, to)| **to == 0) {
            *from = 0;
        }
        let Some((mut keys, mut values)) = self.buffers.take() else {
            return;
        };
        let [_, kv_heads, width, _] = keys.dims();
        for (sequences, heads, list) in parts(&freed, lists, kv_heads) {
            for free in &freed[list] {
                let at = [sequences.clone(), heads.clone(), 0..width, free.clone()];
                keys = keys.slice_fill(at, 0.0f32);
                let at = [sequences.clone(), heads.clone(), free.clone(), 0..width];
                values = values.slice_fill(at, 0.0f32);
            }
        }
        self.buffers = Some((keys, values));
    }

    /// Gives the buffers `slots` slots, for as many sequences as there are lists and heads like those of `like`.
    fn grow(&mut self, slots: usize, like: &Tensor<4>) {
        let [_, heads, _, width] = like.dims();
        let batch = self.slots.len() / self.lists();
        let options = (&like.device(), like.dtype());
        let mut keys = zeros([batch, heads, width, slots], options);
        let mut values = zeros([batch, heads, slots, width], options);
        if let Some((old_keys, old_values)) = self.buffers.take() {
            let old = old_keys.dims()[3];
            keys = keys.slice_assign([0..batch, 0..heads, 0..width, 0..old], old_keys);
            values = values.slice_assign([0..batch, 0..heads, 0..old, 0..width], old_values);
        }
        self.buffers = Some((keys, values));
        self.slots.iter_mut().for_each(|list| list.grow(slots));
    }

    /// Sets the number of sequences; new ones are empty.
    pub(super) fn resize(&mut self, batch: usize) {
        let new = || match self.window {
            Some(_) => Slots::anchored(),
            None if self.by_position => Slots::by_position(),
            None => Slots::default(),
        };
        self.slots.resize_with(batch * self.lists(), new);
    }
}

/// The parts of a batch that are treated alike: their sequences, their KV heads, and the list that stands for all
/// of them. `of` has an element for each of `lists` lists of every sequence.
pub(super) fn parts<T: PartialEq>(
    of: &[T],
    lists: usize,
    kv_heads: usize,
) -> Vec<(Range<usize>, Range<usize>, usize)> {
    let batch = of.len() / lists;
    if of.iter().all(|one| *one == of[0]) {
        return vec![(0..batch, 0..kv_heads, 0)];
    }
    let each = of.chunks(lists).enumerate().flat_map(|(sequence, of)| {
        let alike = of.iter().all(|one| *one == of[0]);
        let count = if alike { 1 } else { lists };
        (0..count).map(move |head| {
            let heads = if alike { 0..kv_heads } else { head..head + 1 };
            (sequence..sequence + 1, heads, sequence * lists + head)
        })
    });
    each.collect()
}
