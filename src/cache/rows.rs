//! Storage shared by the backends: keys and values of one layer in slots, and what each slot holds.
//! All storage bugs live here or nowhere.

mod sliding;

use std::{fmt, num::NonZeroUsize};

use burn::tensor::{Int, Tensor, TensorData};

use crate::{
    cache::{
        CacheError, KeysValues, Projection,
        slots::{Run, Slots},
    },
    exact::PIECE,
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
    /// By batch row.
    slots: Vec<Slots>,
    /// The most slots ever needed, where that is known: buffers then grow to it and not beyond.
    limit: Option<usize>,
    /// The layer's window.
    window: Option<NonZeroUsize>,
    /// By batch row: all positions from here on are held, in a layer with a window.
    from: Vec<usize>,
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

    /// The same kind of rows, none of them held.
    pub(crate) fn emptied(&self) -> Self {
        Self {
            limit: self.limit,
            ..Self::new(self.window)
        }
    }

    /// Whether the layer has a window: what is held is then no policy's business.
    pub(crate) const fn slides(&self) -> bool {
        self.window.is_some()
    }

    /// Rows with `slots` free slots, for a batch like that of `like`.
    pub(crate) fn with_slots(slots: usize, like: &Projection) -> Self {
        let mut rows = Self::default();
        rows.grow(slots, &like.keys);
        rows
    }

    /// Stores every row of `new` that has a position, in place unless the buffers must grow. Answers
    /// the bytes that were held on top while they grew.
    pub(crate) fn append(&mut self, new: &Projection, positions: &Positions) -> usize {
        let batch = positions.rows();
        self.resize(batch);
        let rows = self.slots.iter().enumerate();
        let needed = rows
            .map(|(row, slots)| slots.needed(positions.slots(row, 0)))
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
        let [_, heads, width, _] = keys.dims();
        let runs: Vec<Vec<Run>> = self
            .slots
            .iter_mut()
            .enumerate()
            .map(|(row, slots)| slots.take(positions.slots(row, 0)))
            .collect();
        let together = runs.iter().all(|row| *row == runs[0]);
        for (row, runs) in runs
            .iter()
            .enumerate()
            .take(if together { 1 } else { batch })
        {
            let rows = if together { 0..batch } else { row..row + 1 };
            for &Run { from, to, len } in runs {
                let part = |tensor: &Tensor<4>| {
                    tensor
                        .clone()
                        .slice([rows.clone(), 0..heads, from..from + len])
                };
                let at = [rows.clone(), 0..heads, 0..width, to..to + len];
                keys = keys.slice_assign(at, part(&new.keys).swap_dims(2, 3));
                let at = [rows.clone(), 0..heads, to..to + len, 0..width];
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
            return KeysValues::new(keys, values, Positions::from_rows(&self.slots));
        }
        let options = (&keys.device(), keys.dtype());
        let keys = Tensor::zeros([batch, heads, width, whole], options)
            .slice_assign([0..batch, 0..heads, 0..width, 0..slots], keys);
        let values = Tensor::zeros([batch, heads, whole, width], options)
            .slice_assign([0..batch, 0..heads, 0..slots, 0..width], values);
        let mut padded = self.slots.clone();
        padded.iter_mut().for_each(|row| row.grow(whole));
        KeysValues::new(keys, values, Positions::from_rows(&padded))
    }

    /// A copy of the rows held, in rising order of their positions.
    pub(crate) fn ordered(&self) -> Option<(Projection, Positions)> {
        let (keys, values) = self.buffers.as_ref()?;
        let positions =
            Positions::from_rows(&self.slots.iter().map(Slots::kept).collect::<Vec<_>>());
        if positions.width() == 0 {
            return None;
        }
        let order: Vec<Vec<usize>> = self.slots.iter().map(Slots::rising).collect();
        let (keys, values) = select(keys, values, &order, positions.width());
        Some((Projection::new(keys.swap_dims(2, 3), values), positions))
    }

    /// Frees the slots whose position `keep(row, position)` declines. What they store stays, finite
    /// and unseen.
    pub(crate) fn retain(&mut self, keep: impl Fn(usize, usize) -> bool) {
        for (row, slots) in self.slots.iter_mut().enumerate() {
            slots.retain(|position| keep(row, position));
        }
    }

    /// Overwrites free slots with zeros: what a taken-back call left there may not be finite.
    pub(crate) fn scrub(&mut self) {
        let Some((mut keys, mut values)) = self.buffers.take() else {
            return;
        };
        let [_, heads, width, _] = keys.dims();
        for (row, slots) in self.slots.iter().enumerate() {
            for free in slots.free() {
                keys = keys.slice_fill([row..row + 1, 0..heads, 0..width, free.clone()], 0.0f32);
                values = values.slice_fill([row..row + 1, 0..heads, free, 0..width], 0.0f32);
            }
        }
        self.buffers = Some((keys, values));
    }

    /// Moves the rows held into the smallest whole pieces that hold them and one more token, where
    /// that frees at least a piece. Answers the bytes that were held on top meanwhile. A layer with a
    /// window does that as it [`slide`](Self::slide)s.
    pub(crate) fn shrink(&mut self) -> usize {
        if self.slides() {
            return 0;
        }
        let most = self.slots.iter().map(Slots::used).max().unwrap_or(0);
        let slots = (most + 1).next_multiple_of(PIECE);
        if self.capacity() < slots + PIECE {
            return 0;
        }
        let (used, _) = self.bytes();
        let held = self.ordered();
        *self = self.emptied();
        if let Some((rows, positions)) = held {
            self.grow(slots, &rows.keys);
            self.append(&rows, &positions);
        }
        used
    }

    /// Positions held, rising.
    pub(crate) fn kept(&self) -> Vec<Vec<usize>> {
        self.slots.iter().map(Slots::kept).collect()
    }

    /// Rows held in one batch row.
    pub(crate) fn used(&self, row: usize) -> usize {
        self.slots.get(row).map_or(0, Slots::used)
    }

    /// Slots of the buffers.
    pub(crate) fn capacity(&self) -> usize {
        self.buffers.as_ref().map_or(0, |(keys, _)| keys.dims()[3])
    }

    /// Bytes of the rows in use, and of all that is held beside them.
    pub(crate) fn bytes(&self) -> (usize, usize) {
        let Some((keys, _)) = &self.buffers else {
            return (0, 0);
        };
        let [batch, heads, width, capacity] = keys.dims();
        let row = 2 * heads * width * keys.dtype().size();
        let used: usize = self.slots.iter().map(Slots::used).sum();
        let lists: usize = self.slots.iter().map(Slots::bytes).sum();
        (row * used, row * (batch * capacity - used) + lists)
    }

    /// [`bytes`](Self::bytes) of all layers, as the parts of a report.
    pub(crate) fn report(layers: &[Self]) -> MemoryReport {
        let mut report = MemoryReport::default();
        for rows in layers {
            let (used, reserved) = rows.bytes();
            report.keys_values += used;
            report.reserved += reserved;
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

    /// Gives the buffers at least `slots` slots, for a batch like that of `like`.
    fn grow(&mut self, slots: usize, like: &Tensor<4>) {
        let [batch, heads, _, width] = like.dims();
        let options = (&like.device(), like.dtype());
        let mut keys = Tensor::zeros([batch, heads, width, slots], options);
        let mut values = Tensor::zeros([batch, heads, slots, width], options);
        if let Some((old_keys, old_values)) = self.buffers.take() {
            let old = old_keys.dims()[3];
            keys = keys.slice_assign([0..batch, 0..heads, 0..width, 0..old], old_keys);
            values = values.slice_assign([0..batch, 0..heads, 0..old, 0..width], old_values);
        }
        self.buffers = Some((keys, values));
        self.resize(batch);
        self.slots.iter_mut().for_each(|row| row.grow(slots));
    }

    /// Makes it `batch` rows, the new ones empty.
    fn resize(&mut self, batch: usize) {
        let new = || match self.window {
            Some(_) => Slots::anchored(),
            None => Slots::default(),
        };
        self.slots.resize_with(batch, new);
    }
}

/// Gathers slots in the order given for each batch row, shorter rows filled up with slot 0.
fn select(
    keys: &Tensor<4>,
    values: &Tensor<4>,
    order: &[Vec<usize>],
    width: usize,
) -> (Tensor<4>, Tensor<4>) {
    let index = |order: &[usize]| {
        let mut index: Vec<i64> = order.iter().map(|&slot| slot as i64).collect();
        index.resize(width, 0);
        Tensor::<1, Int>::from_data(TensorData::new(index, [width]), &keys.device())
    };
    if order.iter().all(|row| *row == order[0]) {
        let index = index(&order[0]);
        return (
            keys.clone().select(3, index.clone()),
            values.clone().select(2, index),
        );
    }
    let (keys, values) = order
        .iter()
        .enumerate()
        .map(|(row, order)| {
            let index = index(order);
            let keys = keys
                .clone()
                .slice_dim(0, row..row + 1)
                .select(3, index.clone());
            (
                keys,
                values.clone().slice_dim(0, row..row + 1).select(2, index),
            )
        })
        .unzip();
    (Tensor::cat(keys, 0), Tensor::cat(values, 0))
}
