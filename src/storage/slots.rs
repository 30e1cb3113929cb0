//! Which position each slot of a list holds: bookkeeping without tensors.

use std::{ops::Range, sync::Arc};

use crate::{
    exact::{PANEL, whole},
    positions::Positions,
};

/// The slots of one sequence, or of one of its KV heads.
#[derive(Debug, Clone, Default)]
pub(crate) struct Slots {
    /// Shared with what attention reads: a change copies it until that is dropped.
    held: Arc<Vec<usize>>,
    used: usize,
    placement: Placement,
    /// The score of each slot; as long as `held`, or empty where nothing was scored.
    scores: Vec<f32>,
}

/// Where a token goes.
#[derive(Debug, Clone, Copy)]
enum Placement {
    /// Into the lowest free slot.
    Lowest {
        /// Below this no slot is free.
        full_below: usize,
    },
    /// Into the slot of its position, counted from `base`, the start of a panel. There is no base while nothing is
    /// held.
    Anchored { base: Option<usize> },
}

impl Default for Placement {
    fn default() -> Self {
        Self::Lowest { full_below: 0 }
    }
}

/// Consecutive tokens that go into consecutive slots.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) len: usize,
}

impl Slots {
    /// Slots that follow positions: counted from the panel of the first, and in their order.
    pub(crate) fn anchored() -> Self {
        Self {
            placement: Placement::Anchored { base: None },
            ..Self::default()
        }
    }

    /// Slots that are positions, from 0 on.
    pub(crate) fn by_position() -> Self {
        Self {
            placement: Placement::Anchored { base: Some(0) },
            ..Self::default()
        }
    }

    /// Like these, with entries at rising `positions` in these slots, and their scores, if any. What cannot be is refused
    /// with the reason. Slots are those of positions where they follow them; else, by default, the first ones.
    pub(crate) fn restored(
        &self,
        positions: &[usize],
        slots: Option<&[usize]>,
        scores: &[f32],
        length: usize,
    ) -> Result<Self, &'static str> {
        if positions.last().is_some_and(|&last| last >= length) {
            return Err("an entry has a position beyond the processed tokens");
        }
        if positions.windows(2).any(|pair| pair[0] >= pair[1]) {
            return Err("positions do not rise");
        }
        let mut new = Self {
            held: Arc::default(),
            used: positions.len(),
            scores: Vec::new(),
            ..self.clone()
        };
        let implied: Vec<usize>;
        let slots = match (&mut new.placement, slots) {
            (Placement::Lowest { .. }, Some(slots)) => slots,
            (Placement::Lowest { .. }, None) => {
                implied = (0..positions.len()).collect();
                &implied
            }
            (Placement::Anchored { base }, _) => {
                let first = positions.first().copied();
                *base = base.or_else(|| first.map(anchor));
                let base = base.unwrap_or(0);
                implied = positions.iter().map(|&position| position - base).collect();
                &implied
            }
        };
        // Buffers shrink before more than half of their slots are free, and two panels.
        let most = 2 * (whole(positions.len() + 1) + PANEL);
        let end = slots.iter().max().map_or(0, |last| last.saturating_add(1));
        if slots.len() != positions.len() || end > most {
            return Err("the slots do not fit the entries");
        }
        let held = Arc::make_mut(&mut new.held);
        held.resize(end, Positions::EMPTY);
        if !scores.is_empty() {
            new.scores.resize(end, 0.0);
        }
        for (index, (&slot, &position)) in slots.iter().zip(positions).enumerate() {
            if std::mem::replace(&mut held[slot], position) != Positions::EMPTY {
                return Err("two entries have one slot");
            }
            if let Some(score) = scores.get(index) {
                new.scores[slot] = *score;
            }
        }
        Ok(new)
    }

    /// The position of the first slot, where slots follow positions.
    pub(crate) const fn base(&self) -> Option<usize> {
        match self.placement {
            Placement::Lowest { .. } => None,
            Placement::Anchored { base } => base,
        }
    }

    /// The position of each slot, shared.
    pub(crate) fn positions(&self) -> Arc<Vec<usize>> {
        Arc::clone(&self.held)
    }

    /// Whether slots follow positions.
    pub(crate) const fn is_anchored(&self) -> bool {
        matches!(self.placement, Placement::Anchored { .. })
    }

    /// The lowest position held.
    pub(crate) fn first(&self) -> Option<usize> {
        let held = self.held.iter().copied();
        held.filter(|&position| position != Positions::EMPTY).min()
    }

    /// Whether every one of these positions is held.
    pub(crate) fn holds_all(&self, positions: Range<usize>) -> bool {
        let held = self.held.iter().filter(|held| positions.contains(held));
        held.count() == positions.len()
    }

    /// Sets the number of slots; new ones are free.
    pub(crate) fn grow(&mut self, slots: usize) {
        let held = Arc::make_mut(&mut self.held);
        held.reserve_exact(slots.saturating_sub(held.len()));
        held.resize(slots, Positions::EMPTY);
    }

    /// The number of slots needed to store these positions too.
    pub(crate) fn needed(&self, positions: &[usize]) -> usize {
        let mut new = positions.iter().filter(|&&p| p != Positions::EMPTY);
        match self.placement {
            Placement::Lowest { .. } => self.used + new.count(),
            Placement::Anchored { base } => new.next().map_or(0, |&first| {
                let last = new.next_back().unwrap_or(&first);
                last + 1 - base.unwrap_or_else(|| anchor(first))
            }),
        }
    }

    /// Assigns a slot to every position that is no pad, and returns where each run of tokens goes.
    ///
    /// # Panics
    /// If there are too few slots.
    pub(crate) fn take(&mut self, positions: &[usize]) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        let held = Arc::make_mut(&mut self.held);
        for (from, &position) in positions.iter().enumerate() {
            if position == Positions::EMPTY {
                continue;
            }
            let to = match &mut self.placement {
                Placement::Lowest { full_below } => {
                    while held[*full_below] != Positions::EMPTY {
                        *full_below += 1;
                    }
                    *full_below
                }
                Placement::Anchored { base } => {
                    position - *base.get_or_insert_with(|| anchor(position))
                }
            };
            held[to] = position;
            self.used += 1;
            if let Some(score) = self.scores.get_mut(to) {
                *score = 0.0;
            }
            match runs.last_mut() {
                Some(run) if run.from + run.len == from && run.to + run.len == to => run.len += 1,
                _ => runs.push(Run { from, to, len: 1 }),
            }
        }
        runs
    }

    /// Adds to the score of every slot. Slots that were not scored start from 0.
    pub(crate) fn add_scores(&mut self, more: impl Iterator<Item = f32>) {
        self.scores.resize(self.held.len(), 0.0);
        for (score, more) in self.scores.iter_mut().zip(more) {
            *score += more;
        }
    }

    /// Sets the scores of the entries at `positions`, the newest that were stored.
    pub(crate) fn set_scores(&mut self, positions: &[usize], scores: &[f32]) {
        self.scores.resize(self.held.len(), 0.0);
        let mut new: Vec<(usize, f32)> = positions
            .iter()
            .copied()
            .zip(scores.iter().copied())
            .collect();
        new.retain(|(position, _)| *position != Positions::EMPTY);
        new.sort_unstable_by_key(|(position, _)| *position);
        for (position, score) in self.held.iter().zip(&mut self.scores) {
            if let Ok(found) = new.binary_search_by_key(position, |(position, _)| *position) {
                *score = new[found].1;
            }
        }
    }

    /// The score of every slot; empty where nothing was scored.
    pub(crate) fn scores(&self) -> &[f32] {
        &self.scores
    }

    /// Moves what the slots in `order` hold, and their scores, into the first of `slots` slots.
    pub(crate) fn reorder(&mut self, order: &[usize], slots: usize) {
        let mut held: Vec<usize> = order.iter().map(|&slot| self.held[slot]).collect();
        held.resize(slots, Positions::EMPTY);
        self.held = Arc::new(held);
        if !self.scores.is_empty() {
            let score = |&slot: &usize| self.scores.get(slot).copied().unwrap_or(0.0);
            self.scores = order.iter().map(score).collect();
            self.scores.resize(slots, 0.0);
        }
        if let Placement::Lowest { full_below } = &mut self.placement {
            *full_below = 0;
        }
    }

    /// Frees one slot.
    pub(crate) fn free_slot(&mut self, slot: usize) {
        if self.held[slot] == Positions::EMPTY {
            return;
        }
        Arc::make_mut(&mut self.held)[slot] = Positions::EMPTY;
        self.used -= 1;
        if let Placement::Lowest { full_below } = &mut self.placement {
            *full_below = slot.min(*full_below);
        }
    }

    /// Frees the slots of positions below `oldest` and moves the others down by whole panels, as far as they can.
    /// Returns by how many slots they moved.
    pub(crate) fn slide(&mut self, oldest: usize) -> usize {
        self.retain(|position| position >= oldest);
        let Placement::Anchored { base } = &mut self.placement else {
            return 0;
        };
        if self.used == 0 {
            *base = None;
        }
        let Some(base) = base else { return 0 };
        let moved = anchor(oldest).saturating_sub(*base);
        *base += moved;
        let slots = self.held.len();
        let held = Arc::make_mut(&mut self.held);
        held.drain(..moved.min(slots));
        held.resize(slots, Positions::EMPTY);
        moved
    }

    /// One more than the last slot in use.
    pub(crate) fn end(&self) -> usize {
        let last = self.held.iter().rposition(|&p| p != Positions::EMPTY);
        last.map_or(0, |last| last + 1)
    }

    /// Frees the slots for whose position `keep` is false.
    pub(crate) fn retain(&mut self, keep: impl Fn(usize) -> bool) {
        for slot in 0..self.held.len() {
            if self.held[slot] != Positions::EMPTY && !keep(self.held[slot]) {
                self.free_slot(slot);
            }
        }
    }

    /// Runs of consecutive slots that hold consecutive positions for which `keep` is true, in rising order of
    /// positions.
    pub(crate) fn runs(&self, keep: impl Fn(usize) -> bool) -> Vec<Range<usize>> {
        let mut runs: Vec<Range<usize>> = Vec::new();
        for (slot, &position) in self.held.iter().enumerate() {
            if position == Positions::EMPTY || !keep(position) {
                continue;
            }
            match runs.last_mut() {
                Some(run) if run.end == slot && self.held[slot - 1] + 1 == position => run.end += 1,
                _ => runs.push(slot..slot + 1),
            }
        }
        runs.sort_unstable_by_key(|run| self.held[run.start]);
        runs
    }

    /// The slots in use, in rising order of their positions.
    pub(crate) fn rising(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.held.len())
            .filter(|&slot| self.held[slot] != Positions::EMPTY)
            .collect();
        order.sort_unstable_by_key(|&slot| self.held[slot]);
        order
    }

    /// The positions held, rising.
    pub(crate) fn cached(&self) -> Vec<usize> {
        self.rising()
            .into_iter()
            .map(|slot| self.held[slot])
            .collect()
    }

    /// Frees the slots of positions `to .. length`, the newest, and returns them as runs. Where slots are in the order
    /// of positions, only these slots are visited.
    pub(crate) fn truncate(&mut self, to: usize, length: usize) -> Vec<Range<usize>> {
        let base = match self.placement {
            Placement::Lowest { .. } => 0,
            Placement::Anchored { base } => base.unwrap_or(0),
        };
        let newest = to.saturating_sub(base)..length.saturating_sub(base);
        let in_order = self.held.get(newest.clone()).is_some_and(|held| {
            let mut held = held.iter().zip(newest.start + base..);
            to >= base && held.all(|(&position, expected)| position == expected)
        });
        let visited = if in_order { newest } else { 0..self.held.len() };
        let mut freed: Vec<Range<usize>> = Vec::new();
        for slot in visited {
            if self.held[slot] == Positions::EMPTY || self.held[slot] < to {
                continue;
            }
            self.free_slot(slot);
            match freed.last_mut() {
                Some(range) if range.end == slot => range.end += 1,
                _ => freed.push(slot..slot + 1),
            }
        }
        freed
    }

    /// Number of slots in use.
    pub(crate) const fn used(&self) -> usize {
        self.used
    }

    /// Bytes of the list, its scores left out.
    pub(crate) fn bytes(&self) -> usize {
        self.held.len() * size_of::<usize>()
    }

    /// Bytes of the scores.
    pub(crate) const fn score_bytes(&self) -> usize {
        self.scores.len() * size_of::<f32>()
    }
}

impl AsRef<[usize]> for Slots {
    /// What each slot holds.
    fn as_ref(&self) -> &[usize] {
        &self.held
    }
}

/// The start of the panel of a position.
const fn anchor(position: usize) -> usize {
    position / PANEL * PANEL
}

#[cfg(test)]
#[allow(
    clippy::single_range_in_vec_init,
    reason = "one stretch of slots is meant"
)]
mod tests;
