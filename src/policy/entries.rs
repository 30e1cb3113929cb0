//! The entries among which a policy chooses.

use super::select::lowest;
use crate::{positions::Positions, storage::Slots};

/// The entries of one sequence at one layer, of one KV head if these differ.
///
/// A score belongs to each. It starts at what [`Policy::score_keys`](super::Policy::score_keys) says, or at 0, and
/// stays until the entry is evicted.
#[derive(Debug)]
pub struct Entries<'a> {
    slots: &'a mut Slots,
}

impl<'a> Entries<'a> {
    pub(super) const fn new(slots: &'a mut Slots) -> Self {
        Self { slots }
    }

    /// Number of entries.
    #[must_use]
    pub const fn count(&self) -> usize {
        self.slots.used()
    }

    /// The position in every slot; [`Positions::EMPTY`] for a free slot.
    #[must_use]
    pub fn positions(&self) -> &[usize] {
        (*self.slots).as_ref()
    }

    /// The score of every slot; empty if none was ever set.
    #[must_use]
    pub fn scores(&self) -> &[f32] {
        self.slots.scores()
    }

    /// Adds one number to the score of each slot; to those beyond the end of `more`, nothing.
    pub fn add_scores(&mut self, more: &[f32]) {
        self.slots.add_scores(more.iter().copied());
    }

    /// Evicts the entries for whose position `evict` is true.
    pub fn evict_where(&mut self, evict: impl Fn(usize) -> bool) {
        self.slots.retain(|position| !evict(position));
    }

    /// Evicts the entries with the lowest stored scores until `budget` are left. Only positions for which `evictable`
    /// is true are evicted. Of equal scores the lowest position stays; NaN counts as lowest.
    pub fn evict_lowest(&mut self, budget: usize, evictable: impl Fn(usize) -> bool) {
        let excess = self.count().saturating_sub(budget);
        self.free(lowest(self.positions(), self.scores(), excess, evictable));
    }

    /// As [`evict_lowest`](Self::evict_lowest), by these scores, one for each slot; slots beyond their end rank lowest.
    /// They are not stored.
    pub fn evict_lowest_by(
        &mut self,
        scores: &[f32],
        budget: usize,
        evictable: impl Fn(usize) -> bool,
    ) {
        let excess = self.count().saturating_sub(budget);
        self.free(lowest(self.positions(), scores, excess, evictable));
    }

    fn free(&mut self, slots: Vec<usize>) {
        for slot in slots {
            debug_assert_ne!(self.positions()[slot], Positions::EMPTY, "an entry");
            self.slots.free_slot(slot);
        }
    }
}
