//! Storage shared by the backends: keys and values of one layer in slots, and what each slot holds.
//! All storage bugs live here or nowhere.

use std::ops::Range;

use burn::tensor::{Int, Tensor, TensorData};

use crate::{
    cache::{CacheError, Kept, KeysValues, Projection},
    exact::PIECE,
    positions::Positions,
};

/// Keys and values of one layer. A row of tokens takes the lowest free slots, so until something is
/// dropped the slot of a token is its position.
#[derive(Debug, Clone, Default)]
pub(crate) struct Rows {
    /// `[batch, kv_heads, head_dim, slots]` and `[batch, kv_heads, slots, head_dim]`. A value that
    /// leaves this struct is a second handle: appends copy until it is dropped.
    buffers: Option<(Tensor<4>, Tensor<4>)>,
    /// The position each slot holds, by batch row.
    slots: Vec<Vec<usize>>,
    /// Below this no slot is free, by batch row.
    full_below: Vec<usize>,
    /// The most slots ever needed, where that is known: buffers then grow to it and not beyond.
    limit: Option<usize>,
}

impl Rows {
    /// Rows whose buffers never grow beyond `limit` slots.
    pub(crate) fn limited(limit: usize) -> Self {
        Self {
            limit: Some(limit),
            ..Self::default()
        }
    }

    /// Rows with `slots` free slots, for a batch like that of `like`.
    pub(crate) fn with_slots(slots: usize, like: &Projection) -> Self {
        let mut rows = Self::default();
        rows.grow(slots, &like.keys);
        rows
    }

    /// Stores every row of `new` that has a position, in place unless the buffers must grow.
    pub(crate) fn append(&mut self, new: &Projection, positions: &Positions) {
        let batch = positions.rows();
        self.slots.resize(batch, Vec::new());
        self.full_below.resize(batch, 0);
        let needed = (0..batch)
            .map(|row| self.used(row) + tokens(positions, row))
            .max()
            .unwrap_or(0);
        if needed > self.capacity() {
            let whole = needed.next_multiple_of(PIECE);
            self.grow(
                self.limit
                    .map_or(whole, |limit| whole.min(limit))
                    .max(needed),
                &new.keys,
            );
        }
        let Some((mut keys, mut values)) = self.buffers.take() else {
            return;
        };
        let runs: Vec<Vec<Run>> = (0..batch)
            .map(|row| self.take_slots(row, positions.slots(row, 0)))
            .collect();
        let together = runs.iter().all(|row| *row == runs[0]);
        for (row, runs) in runs
            .iter()
            .enumerate()
            .take(if together { 1 } else { batch })
        {
            let rows = if together { 0..batch } else { row..row + 1 };
            for run in runs {
                let part = |tensor: &Tensor<4>| {
                    tensor
                        .clone()
                        .slice_dim(0, rows.clone())
                        .slice_dim(2, run.from..run.from + run.len)
                };
                let [_, heads, width, _] = keys.dims();
                let slots = run.to..run.to + run.len;
                let at = [rows.clone(), 0..heads, 0..width, slots.clone()];
                keys = keys.slice_assign(at, part(&new.keys).swap_dims(2, 3));
                let at = [rows.clone(), 0..heads, slots, 0..width];
                values = values.slice_assign(at, part(&new.values));
            }
        }
        self.buffers = Some((keys, values));
    }

    /// All slots, as attention reads them. A view, unless the slots are not whole pieces: then a
    /// padded copy, whose bytes [`padded`](Self::padded) tells.
    pub(crate) fn read(&self) -> Result<KeysValues, CacheError> {
        let (keys, values) = self.buffers.clone().ok_or(CacheError::EmptyStep {
            rows: self.slots.len(),
        })?;
        let [batch, heads, width, slots] = keys.dims();
        let whole = slots.next_multiple_of(PIECE);
        let mut positions = self.slots.clone();
        if whole == slots {
            return KeysValues::new(keys, values, Positions::from_rows(&positions));
        }
        let options = (&keys.device(), keys.dtype());
        let all_keys = Tensor::zeros([batch, heads, width, whole], options)
            .slice_assign([0..batch, 0..heads, 0..width, 0..slots], keys);
        let all_values = Tensor::zeros([batch, heads, whole, width], options)
            .slice_assign([0..batch, 0..heads, 0..slots, 0..width], values);
        positions
            .iter_mut()
            .for_each(|row| row.resize(whole, Positions::EMPTY));
        KeysValues::new(all_keys, all_values, Positions::from_rows(&positions))
    }

    /// A copy of the rows held, in rising order of their positions.
    pub(crate) fn ordered(&self) -> Option<(Projection, Positions)> {
        let (keys, values) = self.buffers.as_ref()?;
        let order: Vec<Vec<usize>> = self.slots.iter().map(|row| rising(row)).collect();
        let positions: Vec<Vec<usize>> = order
            .iter()
            .zip(&self.slots)
            .map(|(order, row)| order.iter().map(|&s| row[s]).collect())
            .collect();
        let positions = Positions::from_rows(&positions);
        if positions.width() == 0 {
            return None;
        }
        let (keys, values) = select(keys, values, &order, positions.width());
        Some((
            Projection {
                keys: keys.swap_dims(2, 3),
                values,
            },
            positions,
        ))
    }

    /// Frees the slots whose position `keep(row, position)` declines. What they store stays, finite
    /// and unseen.
    pub(crate) fn retain(&mut self, keep: impl Fn(usize, usize) -> bool) {
        for (row, slots) in self.slots.iter_mut().enumerate() {
            for (slot, position) in slots.iter_mut().enumerate() {
                if *position != Positions::EMPTY && !keep(row, *position) {
                    *position = Positions::EMPTY;
                    self.full_below[row] = self.full_below[row].min(slot);
                }
            }
        }
    }

    /// Overwrites free slots with zeros: what a taken-back call left there may not be finite.
    pub(crate) fn scrub(&mut self) {
        let Some((mut keys, mut values)) = self.buffers.take() else {
            return;
        };
        let [_, heads, width, capacity] = keys.dims();
        for (row, slots) in self.slots.iter().enumerate() {
            for free in ranges(capacity, |slot| slots[slot] == Positions::EMPTY) {
                keys = keys.slice_fill([row..row + 1, 0..heads, 0..width, free.clone()], 0.0f32);
                values = values.slice_fill([row..row + 1, 0..heads, free, 0..width], 0.0f32);
            }
        }
        self.buffers = Some((keys, values));
    }

    /// Moves the rows held into the smallest whole pieces that hold them and one more token, where
    /// that frees at least a piece.
    pub(crate) fn shrink(&mut self) {
        let used = (0..self.slots.len())
            .map(|row| self.used(row))
            .max()
            .unwrap_or(0);
        if self.capacity() < (used + 1).next_multiple_of(PIECE) + PIECE {
            return;
        }
        let held = self.ordered();
        *self = Self {
            limit: self.limit,
            ..Self::default()
        };
        if let Some((rows, positions)) = held {
            let mut moved = Self::with_slots((used + 1).next_multiple_of(PIECE), &rows);
            moved.limit = self.limit;
            moved.append(&rows, &positions);
            *self = moved;
        }
    }

    /// Positions held, rising.
    pub(crate) fn kept(&self) -> Kept {
        Kept::shared(
            self.slots
                .iter()
                .map(|row| rising(row).into_iter().map(|slot| row[slot]).collect())
                .collect(),
        )
    }

    /// Rows held in one batch row.
    pub(crate) fn used(&self, row: usize) -> usize {
        self.slots.get(row).map_or(0, |slots| {
            slots.iter().filter(|&&p| p != Positions::EMPTY).count()
        })
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
        let used: usize = (0..batch).map(|r| self.used(r)).sum();
        let lists = self
            .slots
            .iter()
            .map(|row| row.len() * size_of::<usize>())
            .sum::<usize>();
        (row * used, row * (batch * capacity - used) + lists)
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
        self.slots.resize(batch, Vec::new());
        self.full_below.resize(batch, 0);
        self.slots
            .iter_mut()
            .for_each(|row| row.resize(slots, Positions::EMPTY));
    }

    /// Assigns the lowest free slots of `row` to the positions given, pads left out, and answers
    /// where each stretch of tokens goes.
    fn take_slots(&mut self, row: usize, positions: &[usize]) -> Vec<Run> {
        let (slots, full_below) = (&mut self.slots[row], &mut self.full_below[row]);
        let mut runs: Vec<Run> = Vec::new();
        for (from, &position) in positions
            .iter()
            .enumerate()
            .filter(|(_, p)| **p != Positions::EMPTY)
        {
            while slots[*full_below] != Positions::EMPTY {
                *full_below += 1;
            }
            let to = *full_below;
            slots[to] = position;
            match runs.last_mut() {
                Some(run) if run.from + run.len == from && run.to + run.len == to => run.len += 1,
                _ => runs.push(Run { from, to, len: 1 }),
            }
        }
        runs
    }
}

/// Consecutive tokens that go into consecutive slots.
#[derive(Debug, PartialEq, Eq)]
struct Run {
    from: usize,
    to: usize,
    len: usize,
}

fn tokens(positions: &Positions, row: usize) -> usize {
    positions
        .slots(row, 0)
        .iter()
        .filter(|&&p| p != Positions::EMPTY)
        .count()
}

/// The slots in use, in rising order of what they hold.
fn rising(slots: &[usize]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..slots.len())
        .filter(|&slot| slots[slot] != Positions::EMPTY)
        .collect();
    order.sort_unstable_by_key(|&slot| slots[slot]);
    order
}

/// The maximal ranges below `end` in which `holds` holds.
fn ranges(end: usize, holds: impl Fn(usize) -> bool) -> Vec<Range<usize>> {
    let mut ranges: Vec<Range<usize>> = Vec::new();
    for slot in (0..end).filter(|&slot| holds(slot)) {
        match ranges.last_mut() {
            Some(range) if range.end == slot => range.end += 1,
            _ => ranges.push(slot..slot + 1),
        }
    }
    ranges
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
