//! Storage shared by the backends: keys and values of one layer in slots, and what each slot holds.
//! All storage bugs live here or nowhere.

mod gather;
mod sliding;
mod stored;

use std::{fmt, num::NonZeroUsize, ops::Range};

use burn::tensor::Tensor;

pub(crate) use self::gather::index;
use crate::{
    cache::{
        CacheError, KeysValues, Projection,
        slots::{Run, Slots},
    },
    exact::{PIECE, zeros},
    memory::MemoryReport,
    positions::Positions,
};

/// Keys and values of one layer. In a layer that shows all keys a token takes the lowest free slot, so
/// until something is dropped the slot of a token is its position. In a layer with a window it takes
/// the slot of its position, counted from the start of the oldest piece in use.
#[derive(Clone, Default)]
pub(crate) struct Rows {
    /// `[batch, kv_heads, head_dim, slots]` and `[batch, kv_heads, slots, head_dim]`. A value that
    /// leaves this struct is a second handle: appends copy until it is dropped.
    buffers: Option<(Tensor<4>, Tensor<4>)>,
    /// By batch row and, where KV heads differ, by head within it.
    slots: Vec<Slots>,
    /// KV heads, where each may hold other rows.
    per_head: Option<usize>,
    /// The most slots ever needed, where that is known: buffers then grow to it and not beyond.
    limit: Option<usize>,
    /// The layer's window.
    window: Option<NonZeroUsize>,
    /// By batch row: all positions from here on are held, in a layer with a window.
    from: Vec<usize>,
    /// Whether the slot of a token is its position whatever came before it.
    by_position: bool,
}

impl fmt::Debug for Rows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let used: Vec<usize> = self.slots.iter().map(Slots::used).collect();
        f.debug_struct("Rows")
            .field("used", &used)
            .field("capacity", &self.capacity())
            .finish_non_exhaustive()
    }
}

impl Rows {
    /// Rows of a layer with this window; without one everything is held until a policy drops it.
    pub(crate) fn new(window: Option<NonZeroUsize>) -> Self {
        Self {
            window,
            ..Self::default()
        }
    }

    /// As [`new`](Self::new), but without a window buffers never grow beyond `limit` slots.
    pub(crate) fn limited(window: Option<NonZeroUsize>, limit: usize) -> Self {
        Self {
            limit: window.is_none().then_some(limit),
            ..Self::new(window)
        }
    }

    /// Rows of which each of `kv_heads` heads may hold others.
    pub(crate) fn per_head(kv_heads: usize) -> Self {
        Self {
            per_head: Some(kv_heads),
            ..Self::default()
        }
    }

    /// Rows whose slots are their positions, in whatever order they come.
    pub(crate) fn by_position() -> Self {
        Self {
            by_position: true,
            ..Self::default()
        }
    }

    /// The same kind of rows, none of them held.
    pub(crate) fn emptied(&self) -> Self {
        Self {
            limit: self.limit,
            per_head: self.per_head,
            by_position: self.by_position,
            ..Self::new(self.window)
        }
    }

    /// Whether the layer has a window: what is held is then no policy's business.
    pub(crate) const fn slides(&self) -> bool {
        self.window.is_some()
    }

    /// Makes room for `slots` slots, as far as the limit goes, for a batch like that of `like`.
    pub(crate) fn reserve(&mut self, slots: usize, like: &Projection) {
        let slots = self.limit.map_or(slots, |limit| slots.min(limit));
        if slots > self.capacity() {
            self.resize(like.keys.dims()[0]);
            self.grow(slots, &like.keys);
        }
    }

    /// Holds no row any more, and keeps its buffers for others.
    pub(crate) fn vacate(&mut self) {
        self.retain(|_, _| false);
    }

    /// Sets how far buffers grow from now on.
    pub(crate) const fn limit_to(&mut self, limit: Option<usize>) {
        self.limit = limit;
    }

    /// The positions below `end` that a batch row holds, rising.
    pub(crate) fn positions_below(&self, row: usize, end: usize) -> Vec<usize> {
        let held = self.slots.get(row * self.lists()).map(AsRef::as_ref);
        let held = held.unwrap_or_default().iter().copied();
        let mut below: Vec<usize> = held.filter(|&position| position < end).collect();
        below.sort_unstable();
        below
    }

    /// Stores every row of `new` that has a position, in place unless the buffers must grow. Answers
    /// the bytes that were held on top while they grew.
    pub(crate) fn append(&mut self, new: &Projection, positions: &Positions) -> usize {
        self.resize(positions.rows());
        self.append_from(0, new, positions)
    }

    /// [`append`](Self::append)s to as many batch rows as `new` has, from `first` on.
    pub(crate) fn append_from(
        &mut self,
        first: usize,
        new: &Projection,
        positions: &Positions,
    ) -> usize {
        let lists = self.lists();
        self.resize((self.slots.len() / lists).max(first + positions.rows()));
        let new_of = |list: usize| positions.slots(list / lists, list % lists);
        let taking = first * lists..(first + positions.rows()) * lists;
        let slots = self.slots[taking.clone()].iter().enumerate();
        let needed = slots
            .map(|(list, slots)| slots.needed(new_of(list)))
            .max()
            .unwrap_or(0);
        let mut moved = 0;
        if needed > self.capacity() {
            let (used, free) = self.bytes();
            moved = used + free;
            let whole = needed.next_multiple_of(PIECE);
            self.grow(
                self.limit
                    .map_or(whole, |limit| whole.min(limit))
                    .max(needed),
                &new.keys,
            );
        }
        let Some((mut keys, mut values)) = self.buffers.take() else {
            return moved;
        };
        let [_, kv_heads, width, _] = keys.dims();
        let slots = self.slots[taking].iter_mut().enumerate();
        let runs: Vec<Vec<Run>> = slots
            .map(|(list, slots)| slots.take(new_of(list)))
            .collect();
        for (rows, heads, list) in parts(&runs, lists, kv_heads) {
            let stored = rows.start + first..rows.end + first;
            for &Run { from, to, len } in &runs[list] {
                let part = |tensor: &Tensor<4>| {
                    tensor
                        .clone()
                        .slice([rows.clone(), heads.clone(), from..from + len])
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

    /// All slots, as attention reads them. A view, unless the slots are not whole pieces: then a
    /// padded copy, whose bytes [`padded`](Self::padded) tells.
    pub(crate) fn read(&self) -> Result<KeysValues, CacheError> {
        let (keys, values) = self
            .buffers
            .clone()
            .expect("rows are read after some were stored");
        let [batch, heads, width, slots] = keys.dims();
        let whole = slots.next_multiple_of(PIECE);
        if whole == slots {
            return KeysValues::new(keys, values, self.positions(&self.slots));
        }
        let options = (&keys.device(), keys.dtype());
        let keys = zeros([batch, heads, width, whole], options)
            .slice_assign([0..batch, 0..heads, 0..width, 0..slots], keys);
        let values = zeros([batch, heads, whole, width], options)
            .slice_assign([0..batch, 0..heads, 0..slots, 0..width], values);
        let mut padded = self.slots.clone();
        padded.iter_mut().for_each(|row| row.grow(whole));
        KeysValues::new(keys, values, self.positions(&padded))
    }

    /// What the slots of these lists hold; one list for each batch row where its heads agree.
    fn positions<R: AsRef<[usize]>>(&self, of: &[R]) -> Positions {
        Positions::from_lists(self.lists(), of)
    }

    /// Lists of slots that a batch row has.
    const fn lists(&self) -> usize {
        match self.per_head {
            Some(kv_heads) => kv_heads,
            None => 1,
        }
    }

    /// Frees the slots whose position `keep(row, position)` declines. What they store stays, finite
    /// and unseen.
    pub(crate) fn retain(&mut self, keep: impl Fn(usize, usize) -> bool) {
        let lists = self.lists();
        for (list, slots) in self.slots.iter_mut().enumerate() {
            slots.retain(|position| keep(list / lists, position));
        }
    }

    /// Every list of slots, with its batch row and its head (0 where heads do not differ).
    pub(crate) fn lists_mut(&mut self) -> impl Iterator<Item = (usize, usize, &mut Slots)> {
        let lists = self.lists();
        let slots = self.slots.iter_mut().enumerate();
        slots.map(move |(list, slots)| (list / lists, list % lists, slots))
    }

    /// A copy of the keys in the first slots of a batch row: `[1, kv_heads, count, head_dim]`.
    ///
    /// # Panics
    /// If there are fewer slots.
    pub(crate) fn first_keys(&self, row: usize, count: usize) -> Tensor<4> {
        let (keys, _) = self.buffers.as_ref().expect("rows were stored");
        let [_, kv_heads, width, _] = keys.dims();
        let copy = zeros([1, kv_heads, count, width], (&keys.device(), keys.dtype()));
        let first = keys
            .clone()
            .slice([row..row + 1, 0..kv_heads, 0..width, 0..count]);
        // Not a view of the buffer: that would be a second handle.
        copy.slice_assign(
            [0..1, 0..kv_heads, 0..count, 0..width],
            first.swap_dims(2, 3),
        )
    }

    /// Overwrites the keys in the first slots of a batch row, in place.
    pub(crate) fn set_first_keys(&mut self, row: usize, new: Tensor<4>) {
        let Some((keys, values)) = self.buffers.take() else {
            return;
        };
        let [_, kv_heads, count, width] = new.dims();
        let at = [row..row + 1, 0..kv_heads, 0..width, 0..count];
        self.buffers = Some((keys.slice_assign(at, new.swap_dims(2, 3)), values));
    }

    /// Takes every batch row back from its length to that in `to`. Freed slots are overwritten with zeros:
    /// what a call left there that was taken back may not be finite. Rows that stay are not touched.
    pub(crate) fn cut(&mut self, lengths: &[usize], to: &[usize]) {
        let lists = self.lists();
        let slots = self.slots.iter_mut().enumerate();
        let freed: Vec<Vec<Range<usize>>> = slots
            .map(|(list, slots)| slots.cut(to[list / lists], lengths[list / lists]))
            .collect();
        for (from, _) in self.from.iter_mut().zip(to).filter(|(_, to)| **to == 0) {
            *from = 0;
        }
        let Some((mut keys, mut values)) = self.buffers.take() else {
            return;
        };
        let [_, kv_heads, width, _] = keys.dims();
        for (rows, heads, list) in parts(&freed, lists, kv_heads) {
            for free in &freed[list] {
                let at = [rows.clone(), heads.clone(), 0..width, free.clone()];
                keys = keys.slice_fill(at, 0.0f32);
                let at = [rows.clone(), heads.clone(), free.clone(), 0..width];
                values = values.slice_fill(at, 0.0f32);
            }
        }
        self.buffers = Some((keys, values));
    }

    /// [Shrinks](Self::shrink) buffers of which no more than half is needed: what a truncation frees would
    /// otherwise be given back and asked for again with every token at the edge of a piece.
    pub(crate) fn settle(&mut self) -> usize {
        let used = self.slots.iter().map(Slots::used).max().unwrap_or(0);
        if (used + 1).next_multiple_of(PIECE) <= self.capacity() / 2 {
            self.shrink()
        } else {
            0
        }
    }

    /// Makes the batch these rows of it, in this order; a row may come more than once.
    pub(crate) fn select_rows(&mut self, rows: &[usize]) {
        let lists = self.lists();
        let of_row = |&row: &usize| {
            let slots = self.slots.get(row * lists..(row + 1) * lists);
            slots.unwrap_or_default().to_vec()
        };
        self.slots = rows.iter().flat_map(of_row).collect();
        self.from = rows
            .iter()
            .filter_map(|&row| self.from.get(row).copied())
            .collect();
        self.buffers = self
            .buffers
            .take()
            .filter(|_| !rows.is_empty())
            .map(|(keys, values)| {
                let index = index(rows, &keys.device());
                (keys.select(0, index.clone()), values.select(0, index))
            });
        self.shrink();
    }

    /// Positions held, rising, by batch row and, where they differ, by KV head.
    pub(crate) fn kept(&self) -> Vec<Vec<Vec<usize>>> {
        let rows = self.slots.chunks(self.lists());
        let rows = rows.map(|row| row.iter().map(Slots::kept).collect());
        let mut rows: Vec<Vec<Vec<usize>>> = rows.collect();
        if rows
            .iter()
            .all(|row| row.iter().all(|list| *list == row[0]))
        {
            rows.iter_mut().for_each(|row| row.truncate(1));
        }
        rows
    }

    /// Rows held in one batch row, by its first head.
    pub(crate) fn used(&self, row: usize) -> usize {
        self.slots.get(row * self.lists()).map_or(0, Slots::used)
    }

    /// Whether the first slots of a batch row hold its first rows, this many, in order.
    pub(crate) fn starts_with(&self, row: usize, count: usize) -> bool {
        let slots = self.slots.get(row * self.lists()).map(AsRef::as_ref);
        let first = slots.and_then(|slots| slots.get(..count));
        first.is_some_and(|first| first.iter().copied().eq(0..count))
    }

    /// Slots of the buffers.
    pub(crate) fn capacity(&self) -> usize {
        self.buffers.as_ref().map_or(0, |(keys, _)| keys.dims()[3])
    }

    /// Bytes of the rows in use, and of all that is held beside them, scores left out.
    pub(crate) fn bytes(&self) -> (usize, usize) {
        let Some((keys, _)) = &self.buffers else {
            return (0, 0);
        };
        let [_, kv_heads, width, capacity] = keys.dims();
        let row = 2 * kv_heads / self.lists() * width * keys.dtype().size();
        let used: usize = self.slots.iter().map(Slots::used).sum();
        let lists: usize = self.slots.iter().map(Slots::bytes).sum();
        let slots = self.slots.len() * capacity;
        (row * used, row * (slots - used) + lists)
    }

    /// [`bytes`](Self::bytes) of all layers, and their scores, as the parts of a report.
    pub(crate) fn report(layers: &[Self]) -> MemoryReport {
        let mut report = MemoryReport::default();
        for rows in layers {
            let (used, reserved) = rows.bytes();
            report.keys_values += used;
            report.reserved += reserved;
            report.scores += rows.slots.iter().map(Slots::score_bytes).sum::<usize>();
        }
        report
    }

    /// Bytes of the padded copy that [`read`](Self::read) makes, 0 where it makes none.
    pub(crate) fn padded(&self) -> usize {
        let (used, free) = self.bytes();
        match self.capacity() {
            0 => 0,
            slots if slots.is_multiple_of(PIECE) => 0,
            slots => (used + free) / slots * slots.next_multiple_of(PIECE),
        }
    }

    /// Gives the buffers at least `slots` slots, for as many batch rows as there are slot lists for and heads like
    /// those of `like`.
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
        self.slots.iter_mut().for_each(|row| row.grow(slots));
    }

    /// Makes it `batch` rows, the new ones empty.
    fn resize(&mut self, batch: usize) {
        let new = || match self.window {
            Some(_) => Slots::anchored(),
            None if self.by_position => Slots::by_position(),
            None => Slots::default(),
        };
        self.slots.resize_with(batch * self.lists(), new);
    }
}

/// The parts of a batch that are treated alike: its rows, its KV heads, and the list that stands for
/// them all. `of` has an entry for each of `lists` lists of every batch row.
fn parts<T: PartialEq>(
    of: &[T],
    lists: usize,
    kv_heads: usize,
) -> Vec<(Range<usize>, Range<usize>, usize)> {
    let batch = of.len() / lists;
    if of.iter().all(|one| *one == of[0]) {
        return vec![(0..batch, 0..kv_heads, 0)];
    }
    let each = of.chunks(lists).enumerate().flat_map(|(row, of)| {
        let alike = of.iter().all(|one| *one == of[0]);
        let count = if alike { 1 } else { lists };
        (0..count).map(move |head| {
            let heads = if alike { 0..kv_heads } else { head..head + 1 };
            (row..row + 1, heads, row * lists + head)
        })
    });
    each.collect()
}
