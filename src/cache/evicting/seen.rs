//! What attention saw, on the host.

use std::ops::Range;

use crate::cache::Group;

/// What attention saw, on the host.
pub(crate) struct Seen<'a> {
    pub(crate) values: &'a [f32],
    /// Query heads, and queries and slots of each.
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) queries: usize,
    pub(crate) slots: usize,
}

impl Seen<'_> {
    /// What one query of one head gave to every slot.
    pub(crate) fn row(&self, row: usize, head: usize, query: usize) -> &[f32] {
        let from = ((row * self.heads + head) * self.queries + query) * self.slots;
        &self.values[from..from + self.slots]
    }

    /// The query heads that share a KV head.
    pub(crate) fn of_group(&self, kv_head: usize) -> Range<usize> {
        let group = self.heads / self.kv_heads;
        kv_head * group..(kv_head + 1) * group
    }

    /// What one query of all heads that share a KV head gave to every slot, as one.
    pub(crate) fn group(&self, row: usize, kv_head: usize, query: usize, by: Group) -> Vec<f32> {
        let heads = self.of_group(kv_head);
        by.reduce(heads.map(|head| self.row(row, head, query)))
    }
}
