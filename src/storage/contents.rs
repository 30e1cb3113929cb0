//! What a layer store holds: positions and bytes.

use super::{layer::LayerStore, slots::Slots};
use crate::{exact::KV_BLOCK, memory::MemoryReport};

impl LayerStore {
    /// Positions held, rising, by sequence and, where they differ, by KV head.
    pub(crate) fn cached(&self) -> Vec<Vec<Vec<usize>>> {
        let sequences = self.slots.chunks(self.lists());
        let mut cached: Vec<Vec<Vec<usize>>> = sequences
            .map(|lists| lists.iter().map(Slots::cached).collect())
            .collect();
        let shared = |lists: &Vec<Vec<usize>>| lists.iter().all(|list| *list == lists[0]);
        if cached.iter().all(shared) {
            cached.iter_mut().for_each(|lists| lists.truncate(1));
        }
        cached
    }

    /// Entries that a sequence holds in its first KV head.
    pub(crate) fn used(&self, sequence: usize) -> usize {
        let slots = self.slots.get(sequence * self.lists());
        slots.map_or(0, Slots::used)
    }

    /// The positions below `end` that a sequence holds in its first KV head, rising.
    pub(crate) fn positions_below(&self, sequence: usize, end: usize) -> Vec<usize> {
        let held = self.slots.get(sequence * self.lists()).map(AsRef::as_ref);
        let held = held.unwrap_or_default().iter().copied();
        let mut below: Vec<usize> = held.filter(|&position| position < end).collect();
        below.sort_unstable();
        below
    }

    /// The lists of one sequence; none if there is no such sequence.
    fn lists_of(&self, sequence: usize) -> &[Slots] {
        let lists = self.lists();
        let of_sequence = self.slots.get(sequence * lists..(sequence + 1) * lists);
        of_sequence.unwrap_or_default()
    }

    /// Whether every KV head of a sequence holds at least `count` entries.
    pub(crate) fn holds(&self, sequence: usize, count: usize) -> bool {
        let lists = self.lists_of(sequence);
        count == 0 || !lists.is_empty() && lists.iter().all(|slots| slots.used() >= count)
    }

    /// Whether the first `count` slots of a sequence hold its first `count` entries, in order, in every KV head.
    pub(crate) fn starts_with(&self, sequence: usize, count: usize) -> bool {
        let starts = |slots: &Slots| {
            let first = slots.as_ref().get(..count);
            first.is_some_and(|first| first.iter().copied().eq(0..count))
        };
        let lists = self.lists_of(sequence);
        !lists.is_empty() && lists.iter().all(starts)
    }

    /// Whether every sequence holds its newest entries and no others, at least `least(sequence)` of them, in every KV
    /// head.
    pub(crate) fn holds_newest(&self, lengths: &[usize], least: impl Fn(usize) -> usize) -> bool {
        lengths.iter().enumerate().all(|(sequence, &length)| {
            let newest = |slots: &Slots| {
                let used = slots.used();
                used == 0 || slots.holds_all(length - used.min(length)..length)
            };
            self.holds(sequence, least(sequence)) && self.lists_of(sequence).iter().all(newest)
        })
    }

    /// Slots of the buffers.
    pub(crate) fn capacity(&self) -> usize {
        self.buffers.as_ref().map_or(0, |(keys, _)| keys.dims()[3])
    }

    /// Bytes of the entries held, and of everything held beside them, without scores.
    pub(crate) fn bytes(&self) -> (usize, usize) {
        let Some((keys, _)) = &self.buffers else {
            return (0, 0);
        };
        let [_, kv_heads, width, capacity] = keys.dims();
        let entry = 2 * kv_heads / self.lists() * width * keys.dtype().size();
        let used: usize = self.slots.iter().map(Slots::used).sum();
        let lists: usize = self.slots.iter().map(Slots::bytes).sum();
        let slots = self.slots.len() * capacity;
        (entry * used, entry * (slots - used) + lists)
    }

    /// All [`bytes`](Self::bytes).
    pub(crate) fn held(&self) -> usize {
        let (used, free) = self.bytes();
        used + free
    }

    /// [`bytes`](Self::bytes) of all layers, and their scores, as the parts of a report.
    pub(crate) fn report(layers: &[Self]) -> MemoryReport {
        let mut report = MemoryReport::default();
        for store in layers {
            let (used, reserved) = store.bytes();
            report.keys_values += used;
            report.reserved += reserved;
            report.scores += store.slots.iter().map(Slots::score_bytes).sum::<usize>();
        }
        report
    }

    /// Bytes of the padded copy that [`read`](Self::read) makes, 0 where it makes none.
    pub(crate) fn padded(&self) -> usize {
        match self.capacity() {
            0 => 0,
            slots if slots.is_multiple_of(KV_BLOCK) => 0,
            slots => self.held() / slots * slots.next_multiple_of(KV_BLOCK),
        }
    }
}
