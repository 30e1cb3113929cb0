//! The keys and values of one sequence, in the layout that attention reads. Nothing else in `storage` knows it.

use std::{ops::Range, sync::Arc};

use burn::tensor::{Device, Int, Tensor, TensorData};

#[cfg(feature = "flex")]
use crate::exact::write;
use crate::exact::{PANEL, Segment, panels, rows, zeros};

/// Entries as rows: keys and values `[kv_heads, rows, head_dim]`.
#[derive(Debug, Clone)]
pub(crate) struct Rows {
    pub(crate) keys: Tensor<3>,
    pub(crate) values: Tensor<3>,
}

impl Rows {
    /// Some of the rows of some KV heads.
    pub(crate) fn slice(&self, heads: Range<usize>, rows: Range<usize>) -> Self {
        let part = |of: &Tensor<3>| of.clone().slice([heads.clone(), rows.clone()]);
        Self {
            keys: part(&self.keys),
            values: part(&self.values),
        }
    }
}

/// The keys and values of one sequence, slot by slot, as a [`Segment`] describes them.
///
/// A tensor that leaves this struct is a second handle: writes copy until it is dropped.
#[derive(Debug, Clone)]
pub(super) struct Buffers {
    keys: Tensor<4>,
    values: Tensor<3>,
}

impl Buffers {
    /// Free slots, as many as `slots`, for rows like these.
    pub(super) fn new(slots: usize, like: &Rows) -> Self {
        let [kv_heads, _, head_dim] = like.values.dims();
        let options = (&like.values.device(), like.values.dtype());
        Self {
            keys: zeros([kv_heads, slots / PANEL, head_dim, PANEL], options),
            values: zeros([kv_heads, slots, head_dim], options),
        }
    }

    /// KV heads, slots and the width of a head.
    pub(super) fn dims(&self) -> [usize; 3] {
        self.values.dims()
    }

    /// Bytes of the entry in one slot and KV head.
    pub(super) fn entry_bytes(&self) -> usize {
        2 * self.dims()[2] * self.values.dtype().size()
    }

    /// What attention reads, with these positions.
    pub(super) fn segment(&self, positions: Vec<Arc<Vec<usize>>>, start: usize) -> Segment {
        Segment::new(self.keys.clone(), self.values.clone(), positions, start)
    }

    /// Moves `from`, whole panels, to the start of other buffers of `slots` slots.
    pub(super) fn resize(&mut self, from: Range<usize>, slots: usize) {
        let [kv_heads, _, head_dim] = self.dims();
        let options = (&self.values.device(), self.values.dtype());
        let (count, held) = (from.len() / PANEL, from.start / PANEL..from.end / PANEL);
        let mut keys = zeros([kv_heads, slots / PANEL, head_dim, PANEL], options);
        let mut values = zeros([kv_heads, slots, head_dim], options);
        if count > 0 {
            let at = [0..kv_heads, 0..count, 0..head_dim, 0..PANEL];
            keys = keys.slice_assign(at, self.keys.clone().slice_dim(1, held));
            let at = [0..kv_heads, 0..from.len(), 0..head_dim];
            values = values.slice_assign(at, self.values.clone().slice_dim(1, from));
        }
        *self = Self { keys, values };
    }

    /// Writes rows into the slots from `at` on, for the KV heads from `head` on, in place.
    pub(super) fn write(&mut self, head: usize, at: usize, new: Rows) {
        let [heads, count, head_dim] = new.values.dims();
        self.write_keys(head, at, new.keys);
        #[cfg(feature = "flex")]
        if written(&mut self.values, &new.values, head, at) {
            return;
        }
        let ranges = [head..head + heads, at..at + count, 0..head_dim];
        let assigned = |all: Tensor<3>| all.slice_assign(ranges, new.values);
        self.values.inplace(assigned);
    }

    /// As [`write`](Self::write), the keys alone.
    pub(super) fn write_keys(&mut self, head: usize, at: usize, new: Tensor<3>) {
        let [heads, count, head_dim] = new.dims();
        #[cfg(feature = "flex")]
        if written(&mut self.keys, &new, head, at) {
            return;
        }
        for Part {
            panels,
            lanes,
            from,
        } in parts(at..at + count)
        {
            let rows = from - at..from - at + panels.len() * lanes.len();
            let keys = new.clone().slice_dim(1, rows);
            let keys = keys.reshape([heads, panels.len(), lanes.len(), head_dim]);
            let ranges = [head..head + heads, panels, 0..head_dim, lanes];
            let assigned = |all: Tensor<4>| all.slice_assign(ranges, keys.swap_dims(2, 3));
            self.keys.inplace(assigned);
        }
    }

    /// Overwrites slots of some KV heads with zeros, in place.
    pub(super) fn clear(&mut self, heads: &Range<usize>, slots: Range<usize>) {
        let head_dim = self.dims()[2];
        for Part { panels, lanes, .. } in parts(slots.clone()) {
            let ranges = [heads.clone(), panels, 0..head_dim, lanes];
            self.keys.inplace(|all| all.slice_fill(ranges, 0.0f32));
        }
        let ranges = [heads.clone(), slots, 0..head_dim];
        self.values.inplace(|all| all.slice_fill(ranges, 0.0f32));
    }

    /// A copy of consecutive slots of some KV heads, as rows.
    pub(super) fn rows(&self, heads: &Range<usize>, slots: Range<usize>) -> Rows {
        let (first, last) = (slots.start / PANEL, slots.end.div_ceil(PANEL));
        let keys = self.keys.clone().slice([heads.clone(), first..last]);
        let from = first * PANEL;
        Rows {
            keys: rows(keys).slice_dim(1, slots.start - from..slots.end - from),
            values: self.values.clone().slice([heads.clone(), slots]),
        }
    }

    /// The slots in `order` as rows, in that order: a list for all KV heads, or one for each. Lists that are shorter
    /// than `count` are filled up with zeros.
    pub(super) fn gather(&self, order: &[Vec<usize>], count: usize) -> Rows {
        Rows {
            keys: picked(rows(self.keys.clone()), order, count),
            values: picked(self.values.clone(), order, count),
        }
    }

    /// These buffers with `slots` slots, the first of which hold the slots in `order`, as [`gather`](Self::gather)
    /// reads them.
    pub(super) fn reordered(self, order: &[Vec<usize>], slots: usize) -> Self {
        let Self { keys, values } = self;
        // One after the other, so that little is held twice.
        let keys = panels(picked(rows(keys), order, slots));
        let values = picked(values, order, slots);
        Self { keys, values }
    }
}

/// Whether a kernel wrote the rows into the buffer.
#[cfg(feature = "flex")]
fn written<const D: usize>(
    buffer: &mut Tensor<D>,
    rows: &Tensor<3>,
    head: usize,
    at: usize,
) -> bool {
    let mut done = false;
    buffer.inplace(|buffer| {
        let (buffer, written) = write(buffer, rows, head, at);
        done = written;
        buffer
    });
    done
}

/// Whole panels, or some lanes of one.
struct Part {
    panels: Range<usize>,
    lanes: Range<usize>,
    /// The first slot.
    from: usize,
}

/// Consecutive slots as parts: lanes of the first panel, whole panels, lanes of the last.
fn parts(slots: Range<usize>) -> impl Iterator<Item = Part> {
    let mut from = slots.start;
    std::iter::from_fn(move || {
        let (panel, lane, left) = (from / PANEL, from % PANEL, slots.end - from);
        let (count, lanes) = match (lane, left / PANEL) {
            _ if left == 0 => return None,
            (0, whole @ 1..) => (whole, 0..PANEL),
            _ => (1, lane..PANEL.min(lane + left)),
        };
        let part = Part {
            panels: panel..panel + count,
            lanes: lanes.clone(),
            from,
        };
        from += count * lanes.len();
        Some(part)
    })
}

/// Rows in the order given for all KV heads or for each, filled up with zeros.
fn picked(rows: Tensor<3>, order: &[Vec<usize>], count: usize) -> Tensor<3> {
    let [kv_heads, _, head_dim] = rows.dims();
    let (device, dtype) = (rows.device(), rows.dtype());
    if let [list] = order
        && list.len() == count
    {
        return rows.select(1, index(list, &device));
    }
    let mut all = zeros([kv_heads, count, head_dim], (&device, dtype));
    for (head, list) in order
        .iter()
        .enumerate()
        .filter(|(_, list)| !list.is_empty())
    {
        let heads = match order.len() {
            1 => 0..kv_heads,
            _ => head..head + 1,
        };
        let part = rows.clone().slice_dim(0, heads.clone());
        let part = part.select(1, index(list, &device));
        all = all.slice_assign([heads, 0..list.len(), 0..head_dim], part);
    }
    all
}

/// The argument of [`Tensor::select`].
fn index(of: &[usize], device: &Device) -> Tensor<1, Int> {
    let index: Vec<i64> = of.iter().map(|&one| one as i64).collect();
    Tensor::from_data(TensorData::new(index, [of.len()]), device)
}
