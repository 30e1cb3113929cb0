//! Entries of one sequence in consecutive slots: what attention reads.

use std::{ops::Range, sync::Arc};

use burn::tensor::Tensor;

use super::zeros;
use crate::positions::Positions;

/// Slots of a panel of keys. Slots are stored in whole panels.
pub const PANEL: usize = 32;

/// Slots that [`attention`](super::attention()) computes together before their sums are added to those of other
/// blocks. Blocks are counted from slot number 0 of a sequence.
pub const ATTENTION_BLOCK: usize = 256;

/// Entries of one sequence in consecutive slots.
///
/// A sequence is a list of segments. Each slot has a number in that list: the slots of a segment are numbered from
/// [`start`](Self::start) on. Attention works in blocks of [`ATTENTION_BLOCK`] numbers, so its bits depend on the
/// numbers of the slots, and not on the segments that hold them. Slots in use do not overlap and rise from segment to
/// segment. Two neighbours may share a panel: one uses its first lanes, the other the rest.
///
/// # Shapes
/// * Keys are `[kv_heads, slots / PANEL, head_dim, PANEL]`: element `(d, lane)` of panel `p` is element `d` of the key
///   in slot `PANEL * p + lane`.
/// * Values are `[kv_heads, slots, head_dim]`.
/// * A position for every slot, in one list for all KV heads or in one for each, or [`Positions::EMPTY`] for a free
///   slot.
///
/// Both tensors are contiguous. Free slots store finite numbers.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use kv_direct::exact::{PANEL, Segment};
///
/// // Three entries of two KV heads fill a part of one panel.
/// let rows = Tensor::<3>::ones([2, 3, 16], &Device::flex());
/// let segment = Segment::from_rows(rows.clone(), rows, vec![vec![0, 1, 2]], 0);
/// assert_eq!((segment.slots(), segment.keys().dims()), (PANEL, [2, 1, 16, PANEL]));
/// assert_eq!(segment.positions(0)[..3], [0, 1, 2]);
/// ```
#[derive(Debug, Clone)]
pub struct Segment {
    keys: Tensor<4>,
    values: Tensor<3>,
    positions: Vec<Arc<Vec<usize>>>,
    start: usize,
}

impl Segment {
    /// Keys, values, and the position of every slot: one list for all KV heads, or one for each. `start` is the number
    /// of the first slot, a multiple of [`PANEL`]. Shapes are those [above](Self); who reads a segment checks them.
    #[must_use]
    pub const fn new(
        keys: Tensor<4>,
        values: Tensor<3>,
        positions: Vec<Arc<Vec<usize>>>,
        start: usize,
    ) -> Self {
        Self {
            keys,
            values,
            positions,
            start,
        }
    }

    /// A copy of entries `[kv_heads, rows, head_dim]` into whole panels. The slots behind the last row are free.
    /// `positions` has a list for all KV heads, or one for each.
    ///
    /// # Panics
    /// If keys and values differ in shape.
    #[must_use]
    pub fn from_rows(
        keys: Tensor<3>,
        values: Tensor<3>,
        mut positions: Vec<Vec<usize>>,
        start: usize,
    ) -> Self {
        let [kv_heads, count, head_dim] = keys.dims();
        assert_eq!(values.dims(), keys.dims(), "values like keys");
        let slots = whole(count.max(1));
        let padded = |rows: Tensor<3>| {
            let free = zeros([kv_heads, slots, head_dim], (&rows.device(), rows.dtype()));
            match count {
                0 => free,
                _ => free.slice_assign([0..kv_heads, 0..count, 0..head_dim], rows),
            }
        };
        for list in &mut positions {
            list.resize(slots, Positions::EMPTY);
        }
        Self {
            keys: panels(padded(keys)),
            values: padded(values),
            positions: positions.into_iter().map(Arc::new).collect(),
            start,
        }
    }

    /// Keys, `[kv_heads, slots / PANEL, head_dim, PANEL]`.
    #[must_use]
    pub const fn keys(&self) -> &Tensor<4> {
        &self.keys
    }

    /// Values, `[kv_heads, slots, head_dim]`.
    #[must_use]
    pub const fn values(&self) -> &Tensor<3> {
        &self.values
    }

    /// A copy of the keys as rows, `[kv_heads, slots, head_dim]`.
    #[must_use]
    pub fn key_rows(&self) -> Tensor<3> {
        rows(self.keys.clone())
    }

    /// The position of every slot, for one KV head. Where heads share one list, any `head` returns it.
    ///
    /// # Panics
    /// If there is no such head.
    #[must_use]
    pub fn positions(&self, head: usize) -> &[usize] {
        match &self.positions[..] {
            [shared] => shared,
            each => &each[head],
        }
    }

    /// 1 where all KV heads share one list of positions, else the number of KV heads.
    #[must_use]
    pub const fn lists(&self) -> usize {
        self.positions.len()
    }

    /// The number of the first slot.
    #[must_use]
    pub const fn start(&self) -> usize {
        self.start
    }

    /// Slots, free ones included.
    #[must_use]
    pub fn slots(&self) -> usize {
        self.values.dims()[1]
    }

    /// The same without the entries at positions from `end` on: their slots count as free.
    pub(crate) fn below(&self, end: usize) -> Self {
        let list = |list: &Arc<Vec<usize>>| {
            let kept = list.iter().map(|&position| match position < end {
                true => position,
                false => Positions::EMPTY,
            });
            Arc::new(kept.collect())
        };
        Self {
            positions: self.positions.iter().map(list).collect(),
            ..self.clone()
        }
    }

    /// The first slot in use, and the one after the last, over all KV heads; nothing if all are free.
    pub(crate) fn used(&self) -> Option<Range<usize>> {
        let ends = |list: &Arc<Vec<usize>>| {
            let used = |&position: &usize| position != Positions::EMPTY;
            let first = list.iter().position(used)?;
            Some((first, list.iter().rposition(used)? + 1))
        };
        let ends = self.positions.iter().filter_map(ends);
        let most = |(first, last): (usize, usize), (f, l)| (first.min(f), last.max(l));
        ends.reduce(most).map(|(first, last)| first..last)
    }

    /// The keys of some slots, `[kv_heads, head_dim, slots]`.
    pub(super) fn keys_of(&self, slots: Range<usize>) -> Tensor<3> {
        let [kv_heads, _, head_dim, _] = self.keys.dims();
        let panels = slots.start / PANEL..slots.end.div_ceil(PANEL);
        let (width, first) = (panels.len() * PANEL, panels.start * PANEL);
        let keys = self.keys.clone().slice_dim(1, panels);
        let keys = keys.swap_dims(1, 2).reshape([kv_heads, head_dim, width]);
        match width == slots.len() {
            true => keys,
            false => keys.slice_dim(2, slots.start - first..slots.end - first),
        }
    }

    /// The values of some slots, `[kv_heads, slots, head_dim]`.
    pub(super) fn values_of(&self, slots: Range<usize>) -> Tensor<3> {
        self.values.clone().slice_dim(1, slots)
    }
}

/// Rows `[kv_heads, slots, head_dim]` as panels. Slots are whole panels.
pub(crate) fn panels(rows: Tensor<3>) -> Tensor<4> {
    let [kv_heads, slots, head_dim] = rows.dims();
    let panels = rows.reshape([kv_heads, slots / PANEL, PANEL, head_dim]);
    // A copy in the order of its dimensions, not a view.
    let options = (&panels.device(), panels.dtype());
    let shape = [kv_heads, slots / PANEL, head_dim, PANEL];
    let ranges = shape.map(|size| 0..size);
    zeros(shape, options).slice_assign(ranges, panels.swap_dims(2, 3))
}

/// Panels as rows `[kv_heads, slots, head_dim]`, copied.
pub(crate) fn rows(panels: Tensor<4>) -> Tensor<3> {
    let [kv_heads, count, head_dim, lanes] = panels.dims();
    let rows = panels.swap_dims(2, 3);
    rows.reshape([kv_heads, count * lanes, head_dim])
}

/// The slots of buffers that grow because `needed` are needed: whole panels, and an eighth of them more. So an append
/// costs a constant on average, and slack is at most an eighth and a panel. It rises with `needed`.
pub(crate) const fn grown(needed: usize) -> usize {
    let slack = needed / 8 / PANEL * PANEL;
    whole(needed).saturating_add(if slack < MOST_SLACK {
        slack
    } else {
        MOST_SLACK
    })
}

/// The most slots that buffers have in advance, beside the last panel.
const MOST_SLACK: usize = 512;

/// This many slots as whole panels.
pub(crate) const fn whole(slots: usize) -> usize {
    match slots.checked_next_multiple_of(PANEL) {
        Some(whole) => whole,
        None => usize::MAX / PANEL * PANEL,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_have_little_slack_and_grow_by_a_share() {
        assert_eq!([1, 32, 33, 255, 256].map(grown), [32, 32, 64, 256, 288]);
        let mut last = 0;
        for needed in 1..20_000 {
            let slots = grown(needed);
            assert!(slots.is_multiple_of(PANEL) && slots >= needed.max(last));
            assert!(slots - needed <= (needed / 8).min(MOST_SLACK) + PANEL);
            // The next time they grow, they grow by a share again.
            assert!(grown(slots + 1) - slots >= (slots / 16).clamp(PANEL, MOST_SLACK));
            last = slots;
        }
        assert_eq!(
            (whole(usize::MAX), grown(0)),
            (usize::MAX / PANEL * PANEL, 0)
        );
    }
}
