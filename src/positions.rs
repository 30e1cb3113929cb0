//! Positions as data: which token a slot holds, and which query may see it.

use std::{fmt, num::NonZeroUsize, sync::Arc};

/// A position for every slot of a batch, `[batch, heads, width]`, or [`EMPTY`](Self::EMPTY) where a slot holds no
/// token.
///
/// `heads` is 1 where all heads share one list, else the number of KV heads. A position is the index of a token in
/// its own sequence. It says which token a slot holds, not where that is stored. Cloning is cheap.
///
/// ```
/// use kv_direct::positions::Positions;
///
/// // Two sequences: three tokens from position 5 on, and one token at position 0.
/// let positions = Positions::contiguous(&[5, 0], &[3, 1]);
/// assert_eq!(positions.slots(0, 0), [5, 6, 7]);
/// assert_eq!(positions.slots(1, 0), [0, Positions::EMPTY, Positions::EMPTY]);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Positions {
    sequences: usize,
    heads: usize,
    width: usize,
    slots: Arc<[usize]>,
}

impl Positions {
    /// Marks a slot that holds no token: a pad among queries, a free slot among keys.
    pub const EMPTY: usize = usize::MAX;

    /// Consecutive positions: sequence `i` holds `starts[i] .. starts[i] + lengths[i]`, then [`EMPTY`](Self::EMPTY)
    /// up to the longest sequence.
    ///
    /// # Panics
    /// If `starts` and `lengths` differ in length.
    #[must_use]
    pub fn contiguous(starts: &[usize], lengths: &[usize]) -> Self {
        assert_eq!(
            starts.len(),
            lengths.len(),
            "one start and one length for every sequence"
        );
        let width = lengths.iter().copied().max().unwrap_or(0);
        let list = |(&start, &length): (&usize, &usize)| {
            let position = move |i| match i < length {
                true => start.saturating_add(i),
                false => Self::EMPTY,
            };
            (0..width).map(position)
        };
        Self {
            sequences: starts.len(),
            heads: 1,
            width,
            slots: starts.iter().zip(lengths).flat_map(list).collect(),
        }
    }

    /// One list for every sequence, shared by all its heads. Shorter lists end in [`EMPTY`](Self::EMPTY).
    #[must_use]
    pub fn shared<L: AsRef<[usize]>>(lists: &[L]) -> Self {
        let width = lists.iter().map(|list| list.as_ref().len()).max();
        let width = width.unwrap_or(0);
        let mut slots = Vec::with_capacity(lists.len() * width);
        for list in lists {
            slots.extend_from_slice(list.as_ref());
            slots.resize(slots.len() + width - list.as_ref().len(), Self::EMPTY);
        }
        Self {
            sequences: lists.len(),
            heads: 1,
            width,
            slots: slots.into(),
        }
    }

    /// Lists that differ between KV heads: `sequences[sequence][head]`. Shorter lists end in [`EMPTY`](Self::EMPTY).
    ///
    /// # Panics
    /// If sequences differ in their number of heads.
    #[must_use]
    pub fn per_head(sequences: &[Vec<Vec<usize>>]) -> Self {
        let heads = sequences.first().map_or(1, Vec::len);
        assert!(
            sequences.iter().all(|lists| lists.len() == heads),
            "the same heads in every sequence"
        );
        let lists: Vec<_> = sequences.iter().flatten().collect();
        Self {
            sequences: sequences.len(),
            heads,
            ..Self::shared(&lists)
        }
    }

    /// Number of sequences.
    #[must_use]
    pub const fn sequences(&self) -> usize {
        self.sequences
    }

    /// 1 where all heads of a sequence share one list, else the number of KV heads.
    #[must_use]
    pub const fn heads(&self) -> usize {
        self.heads
    }

    /// Slots per list, empty ones included.
    #[must_use]
    pub const fn width(&self) -> usize {
        self.width
    }

    /// The list of one sequence and head. Where heads share one list, any `head` returns it.
    ///
    /// # Panics
    /// If there is no such sequence, or no such head.
    #[must_use]
    pub fn slots(&self, sequence: usize, head: usize) -> &[usize] {
        let head = if self.heads == 1 { 0 } else { head };
        let from = (sequence * self.heads + head) * self.width;
        &self.slots[from..from + self.width]
    }

    /// Slots of a sequence's first head that are not empty.
    pub(crate) fn count(&self, sequence: usize) -> usize {
        let slots = self.slots(sequence, 0).iter();
        slots.filter(|&&position| position != Self::EMPTY).count()
    }

    /// Whether all sequences have the same lists, so that the lists of one serve for all.
    pub(crate) fn sequences_agree(&self) -> bool {
        let list = self.heads * self.width;
        let mut sequences = self.slots.chunks(list.max(1));
        self.sequences <= 1 || sequences.all(|sequence| *sequence == self.slots[..list])
    }

    /// The highest position in any list.
    #[must_use]
    pub fn last(&self) -> Option<usize> {
        let slots = self.slots.iter().copied();
        slots.filter(|&position| position != Self::EMPTY).max()
    }

    /// The same slots, emptied where `keep(sequence, position)` is false.
    pub(crate) fn filter(&self, keep: impl Fn(usize, usize) -> bool) -> Self {
        let list = (self.heads * self.width).max(1);
        let slots = self.slots.iter().enumerate().map(|(i, &position)| {
            if position != Self::EMPTY && keep(i / list, position) {
                position
            } else {
                Self::EMPTY
            }
        });
        Self {
            slots: slots.collect(),
            ..*self
        }
    }
}

impl fmt::Display for Positions {
    /// The first and the last position of every list.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ends = |list: &[usize]| {
            let mut held = list.iter().filter(|&&position| position != Self::EMPTY);
            let first = held.next();
            first.map(|first| (*first, *held.next_back().unwrap_or(first)))
        };
        let lists = self.slots.chunks(self.width.max(1));
        f.debug_list().entries(lists.map(ends)).finish()
    }
}

/// Whether the query at one position sees the key at another.
///
/// A sliding-window layer attends to `window` tokens, the query's own included. `None` is a full-attention layer.
///
/// ```
/// use kv_direct::positions::visible;
///
/// let two = std::num::NonZeroUsize::new(2);
/// assert!(visible(5, 5, two) && visible(5, 4, two));
/// assert!(!visible(5, 3, two), "two tokens, the query's own included");
/// assert!(visible(5, 3, None) && !visible(5, 6, None));
/// ```
#[must_use]
pub fn visible(query: usize, key: usize, window: Option<NonZeroUsize>) -> bool {
    key <= query && window.is_none_or(|window| query - key < window.get())
}
