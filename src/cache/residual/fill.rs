//! All rows of a layer, put together from those that are rebuilt, held and new.

use super::{
    certify::{Certified, same},
    prefix::Prefix,
};
use crate::{
    cache::{CacheError, KeysValues, Projection, Replay, rows::Rows},
    exact::PIECE,
    positions::Positions,
};

/// What the rows of a layer come from, by batch row.
pub(super) struct Filling<'a> {
    /// Rows that are rebuilt: those that are not held, and those that are to be compared.
    pub(super) prefix: &'a Prefix,
    /// How many of the first rows are not held.
    pub(super) dropped: &'a [usize],
    /// The first row that is held afterwards.
    pub(super) oldest: &'a [usize],
    /// Rows there are afterwards.
    pub(super) after: &'a [usize],
    /// The rows of the step, with their positions.
    pub(super) new: Option<(&'a Projection, &'a Positions)>,
    /// Counts the blocks that were compared, where they are before they leave. Then the batch has one row.
    pub(super) certified: Option<&'a mut Certified>,
}

/// All rows of a layer, and what that took.
pub(super) struct Filled {
    pub(super) keys_values: KeysValues,
    /// Bytes of rows that were copied to be moved.
    pub(super) copied: usize,
    /// Bytes of the answer, where it is neither the store nor the shared buffers.
    pub(super) beside: usize,
}

impl Filling<'_> {
    /// Brings the rows together in the buffers of `answer`, or in `store` where nothing is let go of, and leaves in
    /// `store` those from the oldest on.
    pub(super) fn fill(
        mut self,
        store: &mut Rows,
        answer: &mut Rows,
        replay: &dyn Replay,
    ) -> Result<Filled, CacheError> {
        let (used, free) = store.bytes();
        let drops = self.oldest.iter().any(|&oldest| oldest > 0);
        if !drops && self.certified.is_none() {
            self.refill(store, replay)?;
            return Ok(Filled {
                keys_values: store.read()?,
                copied: used + free,
                beside: store.padded(),
            });
        }
        let kept = self.assemble(store, answer, replay)?;
        let oldest = self.oldest;
        let stays = |row: usize, position: usize| {
            position >= oldest[row] || kept.binary_search(&position).is_ok()
        };
        // After a truncation the store is short of rows, and rebuilt ones fill it up again: all of it is then
        // stored anew in rising order, because a store that holds every row is read as it is.
        if oldest
            .iter()
            .zip(self.dropped)
            .any(|(oldest, dropped)| oldest < dropped)
        {
            *store = store.emptied();
            answer.copy_into(store, stays);
        } else {
            store.retain(stays);
            if let Some((rows, positions)) = self.new {
                store.append(rows, &positions.filter(stays));
            }
        }
        Ok(Filled {
            keys_values: answer.read()?,
            copied: used,
            beside: 0,
        })
    }

    /// Slots of all rows.
    fn slots(&self) -> usize {
        let longest = self.after.iter().copied().max().unwrap_or(0);
        longest.next_multiple_of(PIECE)
    }

    /// Stores every row anew, in rising order.
    fn refill(&self, store: &mut Rows, replay: &dyn Replay) -> Result<(), CacheError> {
        let held = std::mem::replace(store, store.emptied());
        self.prefix.project(replay, |rows, positions| {
            store.reserve(self.slots(), rows);
            store.append(rows, &positions.filter(|row, p| p < self.dropped[row]));
            Ok(())
        })?;
        held.copy_into(store, |_, _| true);
        if let Some((rows, positions)) = self.new {
            store.append(rows, positions);
        }
        Ok(())
    }

    /// Puts every row into its slot of `answer`. Answers which old ones stay because they differ from what was
    /// rebuilt, now or before.
    fn assemble(
        &mut self,
        store: &Rows,
        answer: &mut Rows,
        replay: &dyn Replay,
    ) -> Result<Vec<usize>, CacheError> {
        answer.vacate();
        if let Some((rows, positions)) = self.new {
            answer.reserve(self.slots(), rows);
            answer.append(rows, positions);
        }
        let (slots, dropped, oldest) = (self.slots(), self.dropped, self.oldest);
        let mut kept = match self.certified {
            Some(_) => store.positions_below(0, dropped[0]),
            None => Vec::new(),
        };
        let before = kept.clone();
        let mut held = Some(store);
        self.prefix.project(replay, |rows, positions| {
            answer.reserve(slots, rows);
            if let Some(held) = held.take() {
                held.copy_into(answer, |_, _| true);
            }
            let missing = |row: usize, position: usize| {
                position < dropped[row] && before.binary_search(&position).is_err()
            };
            answer.append(rows, &positions.filter(missing));
            if let Some(blocks) = &mut self.certified {
                let start = positions.slots(0, 0)[0];
                let leaving = start.max(dropped[0])..(start + positions.width()).min(oldest[0]);
                if !leaving.is_empty()
                    && !blocks.note(same(&answer.read()?, rows, start, leaving.clone()))
                {
                    kept.extend(leaving);
                }
            }
            Ok(())
        })?;
        if let Some(held) = held {
            held.copy_into(answer, |_, _| true);
        }
        Ok(kept)
    }
}
