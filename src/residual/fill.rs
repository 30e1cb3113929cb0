//! All entries of a layer: rebuilt, stored and new ones.

use super::{
    certify::{Blocks, same},
    prefix::Prefix,
};
use crate::{
    cache::{CacheError, KeysValues, Projection, Replay},
    exact::{PANEL, whole},
    positions::Positions,
    storage::LayerStore,
};

/// What the entries of a layer come from, by sequence.
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

/// All entries of a layer, and the bytes that it took.
pub(super) struct Filled {
    pub(super) keys_values: KeysValues,
    /// Bytes of entries that were copied to be moved.
    pub(super) copied: usize,
}

impl Filling<'_> {
    /// Puts the entries below `first_held` into `older` and leaves the others in `store`: attention reads both. With
    /// certified eviction `older` has all entries.
    pub(super) fn fill(
        mut self,
        store: &mut LayerStore,
        older: &mut LayerStore,
        replay: &dyn Replay,
    ) -> Result<Filled, CacheError> {
        if self.certified.is_some() {
            return self.certify(store, older, replay);
        }
        let copied = self.split(store, older, replay)?;
        Ok(Filled {
            keys_values: store.read_after(older)?,
            copied,
        })
    }

    /// Puts every entry to its side of `first_held`. Returns the bytes of entries that were moved.
    fn split(
        &self,
        store: &mut LayerStore,
        older: &mut LayerStore,
        replay: &dyn Replay,
    ) -> Result<usize, CacheError> {
        older.vacate();
        let (dropped, first_held) = (self.dropped, self.first_held);
        let old = |sequence: usize, position: usize| position < first_held[sequence];
        let hot = |sequence: usize, position: usize| position >= first_held[sequence];
        let slots: Vec<usize> = first_held.iter().map(|&end| whole(end)).collect();
        let room = first_held.iter().zip(self.after);
        let room = room.map(|(first, after)| whole(after - first / PANEL * PANEL));
        let room: Vec<usize> = room.collect();
        // After a truncation the store is short of entries. The rebuilt ones come in front of those it has.
        let short = first_held
            .iter()
            .zip(dropped)
            .any(|(first, dropped)| first < dropped);
        let held = short.then(|| std::mem::replace(store, store.emptied()));
        self.prefix.project(replay, |entries, positions| {
            let missing = positions.filter(|sequence, position| position < dropped[sequence]);
            older.reserve(&slots, entries);
            older.append(entries, &missing.filter(old));
            if short {
                store.reserve(&room, entries);
                store.append(entries, &missing.filter(hot));
            }
            Ok(())
        })?;
        if let Some((entries, _)) = self.new {
            older.reserve(&slots, entries);
        }
        let moved = match &held {
            Some(held) => {
                held.copy_into(older, old);
                held.copy_into(store, hot);
                held.held()
            }
            None => {
                store.copy_into(older, old);
                store.drop_below(first_held)
            }
        };
        let Some((entries, positions)) = self.new else {
            return Ok(moved);
        };
        older.append(entries, &positions.filter(old));
        let grown = store.append(entries, &positions.filter(hot));
        Ok(moved.max(grown))
    }

    /// Puts every entry into `all`, and leaves in `store` those from `first_held` on and those that differ.
    fn certify(
        &mut self,
        store: &mut LayerStore,
        all: &mut LayerStore,
        replay: &dyn Replay,
    ) -> Result<Filled, CacheError> {
        let (copied, _) = store.bytes();
        let differing = self.assemble(store, all, replay)?;
        let first_held = self.first_held;
        let stays = |sequence: usize, position: usize| {
            position >= first_held[sequence] || differing.binary_search(&position).is_ok()
        };
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
        let keys_values = all.read()?;
        Ok(Filled {
            keys_values,
            copied,
        })
    }

    /// Slots for all entries, of each sequence.
    fn slots(&self) -> Vec<usize> {
        self.after.iter().map(|&length| whole(length)).collect()
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
                    start.max(dropped[0])..(start + positions.tokens()).min(first_held[0]);
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
