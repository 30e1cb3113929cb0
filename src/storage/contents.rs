//! What a layer store holds: positions and bytes.

use super::{layer::LayerStore, sequence::SequenceStore, slots::Slots};
use crate::memory::MemoryReport;

impl LayerStore {
    /// Positions held, rising, by sequence and, where they differ, by KV head.
    pub(crate) fn cached(&self) -> Vec<Vec<Vec<usize>>> {
        let sequences = self.sequences.iter();
        let mut cached: Vec<Vec<Vec<usize>>> = sequences
            .map(|store| store.lists.iter().map(Slots::cached).collect())
            .collect();
        let shared = |lists: &Vec<Vec<usize>>| lists.iter().all(|list| *list == lists[0]);
        if cached.iter().all(shared) {
            cached.iter_mut().for_each(|lists| lists.truncate(1));
        }
        cached
    }

    /// Entries that a sequence holds in its first KV head.
    pub(crate) fn used(&self, sequence: usize) -> usize {
        self.lists_of(sequence).first().map_or(0, Slots::used)
    }

    /// The positions below `end` that a sequence holds in its first KV head, rising.
    pub(crate) fn positions_below(&self, sequence: usize, end: usize) -> Vec<usize> {
        let held = self.lists_of(sequence).first().map(AsRef::as_ref);
        let held = held.unwrap_or_default().iter().copied();
        let mut below: Vec<usize> = held.filter(|&position| position < end).collect();
        below.sort_unstable();
        below
    }

    /// The lists of one sequence; none if there is no such sequence.
    fn lists_of(&self, sequence: usize) -> &[Slots] {
        let store = self.sequences.get(sequence);
        store.map_or(&[], |store| &store.lists)
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

    /// Slots of each sequence.
    pub(crate) fn capacities(&self) -> Vec<usize> {
        let sequences = self.sequences.iter();
        sequences.map(SequenceStore::capacity).collect()
    }

    /// Slots of the sequence that has most.
    pub(crate) fn capacity(&self) -> usize {
        self.capacities().into_iter().max().unwrap_or(0)
    }

    /// Bytes of the entries held, and of everything held beside them, without scores.
    pub(crate) fn bytes(&self) -> (usize, usize) {
        let each = self.sequences.iter().map(SequenceStore::bytes);
        each.fold((0, 0), |(used, free), (u, f)| (used + u, free + f))
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
            let lists = store.sequences.iter().flat_map(|store| &store.lists);
            report.scores += lists.map(Slots::score_bytes).sum::<usize>();
        }
        report
    }
}
