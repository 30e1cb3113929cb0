//! The entries of one sequence in one layer, in slots.

use std::ops::Range;

use super::{
    buffers::{Buffers, Rows},
    slots::{Run, Slots},
};
use crate::exact::{PANEL, Segment, grown, whole};

/// The entries of one sequence in one layer, in slots. What it holds depends on this sequence alone.
#[derive(Debug, Clone)]
pub(super) struct SequenceStore {
    /// None until the first entry comes.
    pub(super) buffers: Option<Buffers>,
    /// One list for all KV heads, or one for each where these hold different entries.
    pub(super) lists: Vec<Slots>,
    /// In a sliding-window layer, the position from which on every entry is held.
    pub(super) from: usize,
}

impl SequenceStore {
    /// No entries, with `lists` lists like this one.
    pub(super) fn new(list: Slots, lists: usize) -> Self {
        Self {
            buffers: None,
            lists: vec![list; lists],
            from: 0,
        }
    }

    /// Slots of the buffers.
    pub(super) fn capacity(&self) -> usize {
        self.buffers.as_ref().map_or(0, |buffers| buffers.dims()[1])
    }

    /// Entries in the list that has most.
    pub(super) fn used(&self) -> usize {
        self.lists.iter().map(Slots::used).max().unwrap_or(0)
    }

    /// Bytes of the entries held, and of everything held beside them, without scores.
    pub(super) fn bytes(&self) -> (usize, usize) {
        let Some(buffers) = &self.buffers else {
            return (0, 0);
        };
        let [kv_heads, capacity, _] = buffers.dims();
        let entry = kv_heads / self.lists.len() * buffers.entry_bytes();
        let used: usize = self.lists.iter().map(Slots::used).sum();
        let lists: usize = self.lists.iter().map(Slots::bytes).sum();
        (
            entry * used,
            entry * (self.lists.len() * capacity - used) + lists,
        )
    }

    /// All [`bytes`](Self::bytes).
    pub(super) fn held(&self) -> usize {
        let (used, free) = self.bytes();
        used + free
    }

    /// Makes room for `slots` slots in all. Returns the bytes held in addition meanwhile.
    pub(super) fn reserve(&mut self, slots: usize, like: &Rows) -> usize {
        let (held, old) = (self.held(), self.capacity());
        if slots <= old {
            return 0;
        }
        match &mut self.buffers {
            Some(buffers) => buffers.resize(0..old, slots),
            None => self.buffers = Some(Buffers::new(slots, like)),
        }
        self.lists.iter_mut().for_each(|list| list.grow(slots));
        held
    }

    /// Stores the rows that have a position, a list of positions for all KV heads or for each. Buffers grow to at most
    /// `limit` slots, if that is enough. Returns the bytes held in addition meanwhile.
    pub(super) fn append(&mut self, new: &Rows, positions: &[&[usize]], growth: Growth) -> usize {
        let of_list = |list: usize| positions[list % positions.len()];
        let needed = self.lists.iter().enumerate();
        let needed = needed.map(|(list, slots)| slots.needed(of_list(list)));
        let needed = needed.max().unwrap_or(0);
        let moved = match needed > self.capacity() {
            true => self.reserve(growth.slots(needed), new),
            false => 0,
        };
        let lists = self.lists.iter_mut().enumerate();
        let runs = lists.map(|(list, slots)| slots.take(of_list(list)));
        let runs: Vec<Vec<Run>> = runs.collect();
        let kv_heads = new.values.dims()[0];
        if let Some(buffers) = &mut self.buffers {
            for (heads, runs) in by_heads(&runs, kv_heads) {
                for &Run { from, to, len } in runs {
                    buffers.write(heads.start, to, new.slice(heads.clone(), from..from + len));
                }
            }
        }
        moved
    }

    /// What attention reads; nothing if nothing was stored.
    pub(super) fn segments(&self) -> Vec<Segment> {
        let segment = self.buffers.as_ref().map(|buffers| {
            let mut others = self.lists[1..].iter();
            let agree = others.all(|list| *list.as_ref() == *self.lists[0].as_ref());
            let lists = if agree { &self.lists[..1] } else { &self.lists };
            let positions = lists.iter().map(Slots::positions).collect();
            buffers.segment(positions, self.lists[0].base().unwrap_or(0))
        });
        segment.into_iter().collect()
    }

    /// Shortens the sequence from `length` to `to` tokens. Freed slots are overwritten with zeros, because a rejected
    /// token may have left numbers there that are not finite.
    pub(super) fn truncate(&mut self, to: usize, length: usize) {
        let lists = self.lists.iter_mut();
        let freed: Vec<Vec<Range<usize>>> = lists.map(|list| list.truncate(to, length)).collect();
        if to == 0 {
            self.from = 0;
        }
        if let Some(buffers) = &mut self.buffers {
            let kv_heads = buffers.dims()[0];
            for (heads, freed) in by_heads(&freed, kv_heads) {
                for free in freed {
                    buffers.clear(&heads, free.clone());
                }
            }
        }
    }

    /// Frees the panels that the entries held and one more do not need. A list that reaches beyond the slots it needs
    /// moves into its first slots, in rising order of positions, unless slots follow these anyway. Returns the bytes held
    /// in addition meanwhile.
    pub(super) fn shrink(&mut self) -> usize {
        let least = |list: &Slots| match list.is_anchored() {
            true => whole(list.end() + 1),
            false => whole(list.used() + 1),
        };
        let slots = self.lists.iter().map(least).max().unwrap_or(PANEL);
        let moves = self.lists.iter().any(|list| list.end() > least(list));
        let old = self.capacity();
        let Some(buffers) = self.buffers.take_if(|_| old > slots || moves) else {
            return 0;
        };
        let slots = slots.min(old);
        let [kv_heads, ..] = buffers.dims();
        let slot = kv_heads * buffers.entry_bytes();
        let order = self.lists.iter().map(|list| match list.end() {
            end if end > least(list) => list.rising(),
            end => (0..end).collect(),
        });
        let order: Vec<Vec<usize>> = order.collect();
        let mut new = buffers;
        let copied = match moves {
            true => {
                new = new.reordered(&order, slots);
                // The keys of all slots, as rows.
                slot * old / 2
            }
            false => {
                new.resize(0..slots, slots);
                slot * slots
            }
        };
        self.buffers = Some(new);
        let lists = self.lists.iter_mut().zip(&order);
        lists.for_each(|(list, order)| list.reorder(order, slots));
        copied
    }

    /// Frees the entries below `oldest`, and moves the others down where that frees a panel. Of the slots that this
    /// frees, those stay that steps of one token need: `usual` in all. Returns the bytes held in addition meanwhile.
    pub(super) fn slide(&mut self, oldest: usize, usual: usize) -> usize {
        self.from = oldest;
        let moved = self.lists.iter_mut().map(|list| list.slide(oldest)).max();
        let (moved, old) = (moved.unwrap_or(0), self.capacity());
        let end = self.lists.iter().map(Slots::end).max().unwrap_or(0);
        let slots = whole(end + 1).max(usual.min(old));
        if moved == 0 && old <= slots {
            return 0;
        }
        let held = self.held();
        if let Some(buffers) = &mut self.buffers {
            buffers.resize(moved..(moved + whole(end)).min(old), slots);
        }
        self.lists.iter_mut().for_each(|list| list.grow(slots));
        held
    }
}

/// How buffers grow.
#[derive(Debug, Clone, Copy)]
pub(super) enum Growth {
    /// By a share of what they hold.
    Share,
    /// As [`Share`](Self::Share), but to this many slots at most.
    UpTo(usize),
    /// To the slots that are needed.
    Exact,
}

impl Growth {
    pub(super) fn slots(self, needed: usize) -> usize {
        match self {
            Self::Share => grown(needed),
            Self::UpTo(limit) => grown(needed).min(whole(limit)).max(whole(needed)),
            Self::Exact => whole(needed),
        }
    }
}

/// What is to be done for each list, with the KV heads that it is about: all of them where lists agree.
pub(super) fn by_heads<T: PartialEq>(
    of: &[Vec<T>],
    kv_heads: usize,
) -> impl Iterator<Item = (Range<usize>, &[T])> {
    let agree = of.iter().all(|one| *one == of[0]);
    let count = if agree { 1 } else { of.len() };
    of[..count].iter().enumerate().map(move |(head, one)| {
        let heads = if agree { 0..kv_heads } else { head..head + 1 };
        (heads, &one[..])
    })
}
