//! Which position each slot of a batch row holds: bookkeeping without tensors.

use std::ops::Range;

use crate::positions::Positions;

/// The slots of one batch row. Tokens take the lowest free slots.
#[derive(Debug, Clone, Default)]
pub(crate) struct Slots {
    held: Vec<usize>,
    used: usize,
    /// Below this no slot is free.
    full_below: usize,
}

/// Consecutive tokens that go into consecutive slots.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) len: usize,
}

impl Slots {
    /// Makes it `slots` slots, the new ones free.
    pub(crate) fn grow(&mut self, slots: usize) {
        self.held.resize(slots, Positions::EMPTY);
    }

    /// Gives every position its slot, pads left out, and answers where each stretch of tokens goes.
    ///
    /// # Panics
    /// If too few slots are free.
    pub(crate) fn take(&mut self, positions: &[usize]) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        for (from, &position) in positions.iter().enumerate() {
            if position == Positions::EMPTY {
                continue;
            }
            while self.held[self.full_below] != Positions::EMPTY {
                self.full_below += 1;
            }
            let to = self.full_below;
            self.held[to] = position;
            self.used += 1;
            match runs.last_mut() {
                Some(run) if run.from + run.len == from && run.to + run.len == to => run.len += 1,
                _ => runs.push(Run { from, to, len: 1 }),
            }
        }
        runs
    }

    /// Frees the slots whose position `keep` declines.
    pub(crate) fn retain(&mut self, keep: impl Fn(usize) -> bool) {
        for (slot, position) in self.held.iter_mut().enumerate() {
            if *position != Positions::EMPTY && !keep(*position) {
                *position = Positions::EMPTY;
                self.used -= 1;
                self.full_below = self.full_below.min(slot);
            }
        }
    }

    /// The slots in use, in rising order of what they hold.
    pub(crate) fn rising(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.held.len())
            .filter(|&slot| self.held[slot] != Positions::EMPTY)
            .collect();
        order.sort_unstable_by_key(|&slot| self.held[slot]);
        order
    }

    /// The positions held, rising.
    pub(crate) fn kept(&self) -> Vec<usize> {
        self.rising()
            .into_iter()
            .map(|slot| self.held[slot])
            .collect()
    }

    /// The free slots, stretch by stretch.
    pub(crate) fn free(&self) -> Vec<Range<usize>> {
        let mut free: Vec<Range<usize>> = Vec::new();
        for slot in (0..self.held.len()).filter(|&slot| self.held[slot] == Positions::EMPTY) {
            match free.last_mut() {
                Some(range) if range.end == slot => range.end += 1,
                _ => free.push(slot..slot + 1),
            }
        }
        free
    }

    /// Number of slots in use.
    pub(crate) const fn used(&self) -> usize {
        self.used
    }

    /// Bytes of the list.
    pub(crate) const fn bytes(&self) -> usize {
        self.held.len() * size_of::<usize>()
    }
}

impl AsRef<[usize]> for Slots {
    /// What each slot holds.
    fn as_ref(&self) -> &[usize] {
        &self.held
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_token_takes_the_lowest_slot_that_was_freed() {
        let mut slots = Slots::default();
        slots.grow(5);
        assert_eq!(
            slots.take(&[0, 1, 2, 3]),
            [Run {
                from: 0,
                to: 0,
                len: 4
            }]
        );
        slots.retain(|position| position != 1);
        assert_eq!(
            slots.take(&[4, 5]),
            [
                Run {
                    from: 0,
                    to: 1,
                    len: 1
                },
                Run {
                    from: 1,
                    to: 4,
                    len: 1
                }
            ]
        );
        assert_eq!(slots.as_ref(), [0, 4, 2, 3, 5]);
        assert_eq!(
            (slots.kept(), slots.rising()),
            (vec![0, 2, 3, 4, 5], vec![0, 2, 3, 1, 4])
        );
    }

    #[test]
    fn a_pad_takes_no_slot_and_parts_what_is_around_it() {
        let mut slots = Slots::default();
        slots.grow(3);
        let pad = Positions::EMPTY;
        assert_eq!(
            slots.take(&[7, pad, 8]),
            [
                Run {
                    from: 0,
                    to: 0,
                    len: 1
                },
                Run {
                    from: 2,
                    to: 1,
                    len: 1
                }
            ]
        );
        assert_eq!((slots.used(), slots.free().pop()), (2, Some(2..3)));
        slots.retain(|position| position == 8);
        assert_eq!((slots.used(), slots.free()), (1, vec![0..1, 2..3]));
    }
}
