//! The keys and values of one layer: a store for each sequence.

use std::{fmt, num::NonZeroUsize, ops::Range};

use burn::tensor::Tensor;

use super::{
    buffers::Rows,
    sequence::{Growth, SequenceStore},
    slots::Slots,
};
use crate::{
    cache::{CacheError, KeysValues, Projection},
    exact::{PANEL, whole},
    positions::Positions,
};

/// The keys and values of one layer, a store for each sequence.
///
/// In a full-attention layer a new entry takes the lowest free slot. So until something is evicted, the slot of an
/// entry is its position. In a sliding-window layer the slot is the position, counted from the start of the oldest
/// panel in use. Appends happen in place, unless the buffers must grow.
#[derive(Clone, Default)]
pub(crate) struct LayerStore {
    pub(super) sequences: Vec<SequenceStore>,
    /// KV heads, where each may hold different entries.
    pub(super) per_head: Option<usize>,
    /// The most slots that a sequence ever needs, where that is known: buffers then grow to it and not beyond.
    pub(super) limit: Option<usize>,
    /// The layer's sliding window.
    pub(super) window: Option<NonZeroUsize>,
    /// Whether the slot of an entry is its position, whatever came before.
    pub(super) by_position: bool,
    /// Whether slots follow positions, and entries come in rising order.
    pub(super) anchored: bool,
}

impl fmt::Debug for LayerStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of = |what: fn(&SequenceStore) -> usize| self.sequences.iter().map(what).collect();
        let (used, capacity): (Vec<_>, Vec<_>) =
            (of(SequenceStore::used), of(SequenceStore::capacity));
        f.debug_struct("LayerStore")
            .field("used", &used)
            .field("capacity", &capacity)
            .finish_non_exhaustive()
    }
}

impl LayerStore {
    /// An empty store for a layer with this sliding window. A full-attention layer (`None`) holds everything until
    /// it is evicted.
    pub(crate) fn new(window: Option<NonZeroUsize>) -> Self {
        Self {
            window,
            ..Self::default()
        }
    }

    /// An empty store for a full-attention layer, of which each of `kv_heads` heads may hold different entries.
    pub(crate) fn per_head(kv_heads: usize) -> Self {
        Self {
            per_head: Some(kv_heads),
            ..Self::default()
        }
    }

    /// An empty store for a full-attention layer whose buffers never grow beyond `limit` slots, in whole panels.
    pub(crate) fn limited(limit: usize) -> Self {
        Self {
            limit: Some(limit),
            ..Self::default()
        }
    }

    /// An empty store for a full-attention layer of which the oldest entries are dropped: slots follow positions, and
    /// entries come in rising order. Buffers never grow beyond what `limit` entries take.
    pub(crate) fn newest(limit: usize) -> Self {
        Self {
            anchored: true,
            ..Self::limited(newest_slots(limit))
        }
    }

    /// An empty store whose slots are positions, in whatever order entries come. Its buffers grow to what is needed.
    pub(crate) fn by_position() -> Self {
        Self {
            by_position: true,
            ..Self::default()
        }
    }

    /// The same kind of store, empty.
    pub(crate) fn emptied(&self) -> Self {
        Self {
            limit: self.limit,
            per_head: self.per_head,
            by_position: self.by_position,
            anchored: self.anchored,
            ..Self::new(self.window)
        }
    }

    /// Whether the layer has a sliding window: no policy evicts from it.
    pub(crate) const fn slides(&self) -> bool {
        self.window.is_some()
    }

    /// Sets how far buffers grow from now on.
    pub(crate) const fn limit_to(&mut self, limit: Option<usize>) {
        self.limit = limit;
    }

    /// Makes room for this many slots of each sequence, for heads like those of `like`.
    pub(crate) fn reserve(&mut self, slots: &[usize], like: &Projection) {
        self.resize(slots.len());
        let like = rows_of(like, 0..like.values.dims()[2]);
        for (store, &slots) in self.sequences.iter_mut().zip(slots) {
            store.reserve(slots, &like);
        }
    }

    /// Removes all entries and keeps the buffers.
    pub(crate) fn vacate(&mut self) {
        self.retain(|_, _| false);
    }

    /// Stores every entry of `new` that has a position. Returns the bytes that were held in addition while buffers
    /// grew, one sequence after another.
    ///
    /// # Shapes
    /// `positions` has a list for each sequence; keys and values are `[1, kv_heads, tokens, head_dim]`.
    ///
    /// # Panics
    /// If heads or `head_dim` differ from those of the entries held.
    pub(crate) fn append(&mut self, new: &Projection, positions: &Positions) -> usize {
        self.resize(positions.sequences().max(self.sequences.len()));
        let growth = self.growth();
        let sequences = self.sequences.iter_mut().take(positions.sequences());
        let moved = sequences.enumerate().map(|(sequence, store)| {
            let (rows, slots) = (positions.rows(sequence), positions.slots(sequence, 0));
            match slots.iter().all(|&position| position == Positions::EMPTY) {
                true => 0,
                false => store.append(&rows_of(new, rows), &[slots], growth),
            }
        });
        moved.max().unwrap_or(0)
    }

    pub(super) fn growth(&self) -> Growth {
        match self.limit {
            _ if self.slides() || self.by_position => Growth::Exact,
            Some(limit) => Growth::UpTo(limit),
            None => Growth::Share,
        }
    }

    /// All slots, as attention reads them.
    ///
    /// # Errors
    /// [`Shape`](CacheError::Shape); never for a store filled by [`append`](Self::append).
    pub(crate) fn read(&self) -> Result<KeysValues, CacheError> {
        let sequences = self.sequences.iter().map(SequenceStore::segments);
        KeysValues::new(sequences.collect())
    }

    /// The slots of `older`, then those of this store, as attention reads them.
    ///
    /// # Errors
    /// [`Shape`](CacheError::Shape) if an entry of `older` is not older.
    pub(crate) fn read_after(&self, older: &Self) -> Result<KeysValues, CacheError> {
        let sequences = self.sequences.iter().enumerate().map(|(sequence, store)| {
            let older = older.sequences.get(sequence);
            let mut segments = older.map_or_else(Vec::new, SequenceStore::segments);
            segments.extend(store.segments());
            segments
        });
        KeysValues::new(sequences.collect())
    }

    /// Evicts the entries for which `keep(sequence, position)` is false, in all KV heads. Their slots are free and
    /// still store finite numbers.
    pub(crate) fn retain(&mut self, keep: impl Fn(usize, usize) -> bool) {
        for (sequence, _, slots) in self.lists_mut() {
            slots.retain(|position| keep(sequence, position));
        }
    }

    /// Every list of slots, with its sequence and its KV head (0 where heads share a list).
    pub(crate) fn lists_mut(&mut self) -> impl Iterator<Item = (usize, usize, &mut Slots)> {
        let sequences = self.sequences.iter_mut().enumerate();
        sequences.flat_map(|(sequence, store)| {
            let lists = store.lists.iter_mut().enumerate();
            lists.map(move |(head, slots)| (sequence, head, slots))
        })
    }

    /// A copy of the keys in consecutive slots of a sequence, `[kv_heads, slots, head_dim]`, and of the values.
    ///
    /// # Panics
    /// If there are fewer slots.
    pub(crate) fn rows(&self, sequence: usize, slots: Range<usize>) -> Rows {
        let buffers = self.sequences[sequence].buffers.as_ref();
        let buffers = buffers.expect("entries were stored");
        let copy = buffers.rows(&(0..buffers.dims()[0]), slots);
        Rows {
            keys: copy.keys,
            // Not a view of the buffer: that would be a second handle.
            values: Tensor::cat(vec![copy.values], 1),
        }
    }

    /// Overwrites the keys in the first slots of a sequence, `[kv_heads, slots, head_dim]`, in place.
    pub(crate) fn set_first_keys(&mut self, sequence: usize, new: Tensor<3>) {
        if let Some(buffers) = &mut self.sequences[sequence].buffers {
            buffers.write_keys(0, 0, new);
        }
    }

    /// Shortens every sequence from its length to that in `to`. Freed slots are overwritten with zeros, because a
    /// rejected token may have left numbers there that are not finite. Entries that stay are not touched.
    pub(crate) fn truncate(&mut self, lengths: &[usize], to: &[usize]) {
        let lengths = lengths.iter().zip(to);
        for (store, (&length, &to)) in self.sequences.iter_mut().zip(lengths) {
            store.truncate(to, length);
        }
    }

    /// Sets the number of sequences; new ones are empty.
    pub(super) fn resize(&mut self, batch: usize) {
        let new = || {
            let list = match self.by_position {
                true => Slots::by_position(),
                false if self.anchored || self.window.is_some() => Slots::anchored(),
                false => Slots::default(),
            };
            SequenceStore::new(list, self.per_head.unwrap_or(1))
        };
        self.sequences.resize_with(batch, new);
    }
}

/// The most slots that the newest `entries` entries take: they may begin anywhere in a panel.
pub(crate) const fn newest_slots(entries: usize) -> usize {
    match entries {
        0 => 0,
        _ => whole(entries.saturating_add(PANEL - 1)),
    }
}

/// The entries of some tokens.
fn rows_of(new: &Projection, tokens: Range<usize>) -> Rows {
    let of = |tensor: &Tensor<4>| {
        let part = tensor.clone().slice_dim(2, tokens.clone());
        part.squeeze_dim(0)
    };
    Rows {
        keys: of(&new.keys),
        values: of(&new.values),
    }
}
