//! Positions as data: which token a slot holds, and which query may see it.

use std::{fmt, num::NonZeroUsize, ops::Range, sync::Arc};

/// Lists of positions: one for each sequence of a batch, or one for each of its KV heads.
///
/// A position is the index of a token in its own sequence. It says which token a slot holds, not where that is stored.
/// A slot without a token has [`EMPTY`](Self::EMPTY). Lists of different sequences may differ in length. Cloning is
/// cheap.
///
/// In tensors of a step, the tokens of all sequences stand one after another, in the order of these lists:
/// [`rows`](Self::rows) says where those of a sequence are.
///
/// ```
/// use kv_direct::positions::Positions;
///
/// // Two sequences: three tokens from position 5 on, and one token at position 0.
/// let positions = Positions::contiguous(&[5, 0], &[3, 1]);
/// assert_eq!(positions.slots(0, 0), [5, 6, 7]);
/// assert_eq!(positions.slots(1, 0), [0]);
/// assert_eq!((positions.rows(1), positions.tokens()), (3..4, 4));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Positions {
    heads: usize,
    /// Where the rows of each sequence end.
    ends: Arc<[usize]>,
    /// For every sequence, the list of each head.
    slots: Arc<[usize]>,
}

impl Positions {
    /// Marks a slot that holds no token: a pad among queries, a free slot among keys.
    pub const EMPTY: usize = usize::MAX;

    /// Consecutive positions: sequence `i` holds `starts[i] .. starts[i] + lengths[i]`.
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
        let list =
            |(&start, &length): (&usize, &usize)| (0..length).map(move |i| start.saturating_add(i));
        Self {
            heads: 1,
            ends: ends(lengths.iter().copied()),
            slots: starts.iter().zip(lengths).flat_map(list).collect(),
        }
    }

    /// One list for every sequence, shared by all its heads.
    #[must_use]
    pub fn shared<L: AsRef<[usize]>>(lists: &[L]) -> Self {
        let lists = lists.iter().map(AsRef::as_ref);
        Self {
            heads: 1,
            ends: ends(lists.clone().map(<[usize]>::len)),
            slots: lists.flatten().copied().collect(),
        }
    }

    /// Lists that differ between KV heads: `sequences[sequence][head]`. Lists of a sequence that are shorter than its
    /// longest end in [`EMPTY`](Self::EMPTY).
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
        let longest = |lists: &Vec<Vec<usize>>| lists.iter().map(Vec::len).max().unwrap_or(0);
        let mut slots = Vec::new();
        for lists in sequences {
            for list in lists {
                slots.extend_from_slice(list);
                slots.resize(slots.len() + longest(lists) - list.len(), Self::EMPTY);
            }
        }
        Self {
            heads,
            ends: ends(sequences.iter().map(longest)),
            slots: slots.into(),
        }
    }

    /// Number of sequences.
    #[must_use]
    pub fn sequences(&self) -> usize {
        self.ends.len()
    }

    /// 1 where all heads of a sequence share one list, else the number of KV heads.
    #[must_use]
    pub const fn heads(&self) -> usize {
        self.heads
    }

    /// Slots of all sequences together, empty ones included, for one head.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Where the tokens of a sequence stand among those of all.
    ///
    /// # Panics
    /// If there is no such sequence.
    #[must_use]
    pub fn rows(&self, sequence: usize) -> Range<usize> {
        let start = match sequence {
            0 => 0,
            _ => self.ends[sequence - 1],
        };
        start..self.ends[sequence]
    }

    /// The list of one sequence and head. Where heads share one list, any `head` returns it.
    ///
    /// # Panics
    /// If there is no such sequence, or no such head.
    #[must_use]
    pub fn slots(&self, sequence: usize, head: usize) -> &[usize] {
        let rows = self.rows(sequence);
        let head = if self.heads == 1 { 0 } else { head };
        assert!(head < self.heads, "head {head} of {}", self.heads);
        let from = rows.start * self.heads + head * rows.len();
        &self.slots[from..from + rows.len()]
    }

    /// Slots of the sequence that has most.
    pub(crate) fn longest(&self) -> usize {
        let lengths = (0..self.sequences()).map(|sequence| self.rows(sequence).len());
        lengths.max().unwrap_or(0)
    }

    /// Slots of a sequence's first head that are not empty.
    pub(crate) fn count(&self, sequence: usize) -> usize {
        let slots = self.slots(sequence, 0).iter();
        slots.filter(|&&position| position != Self::EMPTY).count()
    }

    /// The highest position in any list.
    #[must_use]
    pub fn last(&self) -> Option<usize> {
        let slots = self.slots.iter().copied();
        slots.filter(|&position| position != Self::EMPTY).max()
    }

    /// The same slots, emptied where `keep(sequence, position)` is false.
    pub(crate) fn filter(&self, keep: impl Fn(usize, usize) -> bool) -> Self {
        let kept = |sequence: usize, position: usize| match position {
            Self::EMPTY => Self::EMPTY,
            position if keep(sequence, position) => position,
            _ => Self::EMPTY,
        };
        let slots = self
            .by_sequence()
            .enumerate()
            .flat_map(|(sequence, slots)| {
                let kept = &kept;
                slots.iter().map(move |&position| kept(sequence, position))
            });
        Self {
            heads: self.heads,
            ends: Arc::clone(&self.ends),
            slots: slots.collect(),
        }
    }

    /// The lists of every sequence, those of its heads one after another.
    fn by_sequence(&self) -> impl Iterator<Item = &[usize]> {
        (0..self.sequences()).map(|sequence| {
            let rows = self.rows(sequence);
            &self.slots[rows.start * self.heads..rows.end * self.heads]
        })
    }
}

/// Where each of these lengths ends when they follow one another.
fn ends(lengths: impl Iterator<Item = usize>) -> Arc<[usize]> {
    let end = |sum: &mut usize, length: usize| {
        *sum += length;
        Some(*sum)
    };
    lengths.scan(0, end).collect()
}

impl fmt::Display for Positions {
    /// The first and the last position of every list.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |list: &[usize]| {
            let mut held = list.iter().filter(|&&position| position != Self::EMPTY);
            let first = held.next();
            first.map(|first| (*first, *held.next_back().unwrap_or(first)))
        };
        let lists = (0..self.sequences())
            .flat_map(|sequence| (0..self.heads).map(move |head| list(self.slots(sequence, head))));
        f.debug_list().entries(lists).finish()
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
