//! All entries of a layer, assembled from rebuilt, stored and new ones.

use super::{
    certify::{Blocks, same},
    prefix::Prefix,
};
use crate::{
    cache::{CacheError, KeysValues, Projection, Replay},
    exact::whole,
    positions::Positions,
    storage::LayerStore,
};

/// What the entries of a layer are assembled from, by sequence.
pub(super) struct Filling<'a> {
    /// Tokens that are rebuilt: those that are not stored, and those that are to be compared.
    pub(super) prefix: &'a Prefix,
    /// How many of the first entries are not stored.
    pub(super) dropped: &'a [usize],
    /// The first entry that is stored afterwards.
    pub(super) first_held: &'a [usize],
    /// Tokens afterwards.
    pub(super) after: &'a [usize],
    /// The entries of the step, with their positions.
    pub(super) new: Option<(&'a Projection, &'a Positions)>,
    /// Counts the blocks that were compared, with certified eviction. The batch then has one sequence.
    pub(super) certified: Option<&'a mut Blocks>,
}

/// All entries of a layer, and the bytes that assembling them took.
pub(super) struct Filled {
    pub(super) keys_values: KeysValues,
    /// Bytes of entries that were copied to be moved.
    pub(super) copied: usize,
}

impl Filling<'_> {
    /// Assembles the entries in the buffers of `all`, or in `store` if nothing is dropped. Leaves those from
    /// `first_held` on in `store`.
    pub(super) fn fill(
        mut self,
        store: &mut LayerStore,
        all: &mut LayerStore,
        replay: &dyn Replay,
    ) -> Result<Filled, CacheError> {
        let (used, free) = store.bytes();
        let drops = self.first_held.iter().any(|&first_held| first_held > 0);
        if !drops && self.certified.is_none() {
            self.refill(store, replay)?;
            return Ok(Filled {
                keys_values: store.read()?,
                copied: used + free,
            });
        }
        let differing = self.assemble(store, all, replay)?;
        let first_held = self.first_held;
        let stays = |sequence: usize, position: usize| {
            position >= first_held[sequence] || differing.binary_search(&position).is_ok()
        };
        // After a truncation the store is short of entries, and rebuilt ones fill it up. Then all of it is stored anew
        // in rising order, because a store that holds every entry is read in its own order.
        let mut pairs = first_held.iter().zip(self.dropped);
        if pairs.any(|(first_held, dropped)| first_held < dropped) {
            *store = store.emptied();
            all.copy_into(store, stays);
        } else {
            store.retain(stays);
            if let Some((entries, positions)) = self.new {
                store.append(entries, &positions.filter(stays));
            }
        }
        Ok(Filled {
            keys_values: all.read()?,
            copied: used,
        })
    }

    /// Slots for all entries, of each sequence.
    fn slots(&self) -> Vec<usize> {
        self.after.iter().map(|&length| whole(length)).collect()
    }

    /// Stores every entry anew, in rising order.
    fn refill(&self, store: &mut LayerStore, replay: &dyn Replay) -> Result<(), CacheError> {
        let held = std::mem::replace(store, store.emptied());
        self.prefix.project(replay, |entries, positions| {
            store.reserve(&self.slots(), entries);
            store.append(entries, &positions.filter(|i, p| p < self.dropped[i]));
            Ok(())
        })?;
        held.copy_into(store, |_, _| true);
        if let Some((entries, positions)) = self.new {
            store.append(entries, positions);
        }
        Ok(())
    }

    /// Puts every entry into its slot of `all`. Returns the positions of old entries that stay because they differ from
    /// the rebuilt ones, now or before.
    fn assemble(
        &mut self,
        store: &LayerStore,
        all: &mut LayerStore,
        replay: &dyn Replay,
    ) -> Result<Vec<usize>, CacheError> {
        all.vacate();
        if let Some((entries, positions)) = self.new {
            all.reserve(&self.slots(), entries);
            all.append(entries, positions);
        }
        let (slots, dropped, first_held) = (self.slots(), self.dropped, self.first_held);
        let mut differing = match self.certified {
            Some(_) => store.positions_below(0, dropped[0]),
            None => Vec::new(),
        };
        let before = differing.clone();
        let mut held = Some(store);
        self.prefix.project(replay, |entries, positions| {
            all.reserve(&slots, entries);
            if let Some(held) = held.take() {
                held.copy_into(all, |_, _| true);
            }
            let missing = |sequence: usize, position: usize| {
                position < dropped[sequence] && before.binary_search(&position).is_err()
            };
            all.append(entries, &positions.filter(missing));
            if let Some(blocks) = &mut self.certified {
                let start = positions.slots(0, 0)[0];
                let dropping =
                    start.max(dropped[0])..(start + positions.width()).min(first_held[0]);
                if !dropping.is_empty() && !blocks.note(same(all, entries, start, dropping.clone()))
                {
                    differing.extend(dropping);
                }
            }
            Ok(())
        })?;
        if let Some(held) = held {
            held.copy_into(all, |_, _| true);
        }
        Ok(differing)
    }
}
