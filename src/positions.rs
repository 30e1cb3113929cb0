//! Positions as data: which token a row stands for, and who may see whom.

use std::{fmt, num::NonZeroUsize, sync::Arc};

/// The position of every row of a batch: `[rows, heads, width]`, with [`EMPTY`](Self::EMPTY) where
/// there is none.
///
/// `heads` is 1 where all heads share one list, else the number of KV heads. A position is the
/// number of tokens before it in its own sequence; it says what a row is, never where it is stored.
/// Cloning is cheap.
///
/// ```
/// use kv_direct::positions::Positions;
///
/// // Two rows: three tokens from position 5 on, and one token at position 0.
/// let positions = Positions::contiguous(&[5, 0], &[3, 1]);
/// assert_eq!(positions.slots(0, 0), [5, 6, 7]);
/// assert_eq!(positions.slots(1, 0), [0, Positions::EMPTY, Positions::EMPTY]);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Positions {
    rows: usize,
    heads: usize,
    width: usize,
    slots: Arc<[usize]>,
}

impl Positions {
    /// Marks a slot that holds no token: a pad among queries, a free slot among keys.
    pub const EMPTY: usize = usize::MAX;

    /// Rows of rising positions: row `i` holds `starts[i] .. starts[i] + lengths[i]`, then
    /// [`EMPTY`](Self::EMPTY) up to the longest row.
    ///
    /// # Panics
    /// If `starts` and `lengths` differ in length.
    #[must_use]
    pub fn contiguous(starts: &[usize], lengths: &[usize]) -> Self {
        assert_eq!(
            starts.len(),
            lengths.len(),
            "one start and one length for every row"
        );
        let width = lengths.iter().copied().max().unwrap_or(0);
        let slots = starts
            .iter()
            .zip(lengths)
            .flat_map(|(&start, &length)| {
                (0..width).map(move |i| {
                    if i < length {
                        start.saturating_add(i)
                    } else {
                        Self::EMPTY
                    }
                })
            })
            .collect();
        Self {
            rows: starts.len(),
            heads: 1,
            width,
            slots,
        }
    }

    /// One list for every row, shared by all its heads; shorter lists end in
    /// [`EMPTY`](Self::EMPTY).
    #[must_use]
    pub fn from_rows<R: AsRef<[usize]>>(rows: &[R]) -> Self {
        let width = rows.iter().map(|row| row.as_ref().len()).max().unwrap_or(0);
        let mut slots = Vec::with_capacity(rows.len() * width);
        for row in rows {
            slots.extend_from_slice(row.as_ref());
            slots.resize(slots.len() + width - row.as_ref().len(), Self::EMPTY);
        }
        Self {
            rows: rows.len(),
            heads: 1,
            width,
            slots: slots.into(),
        }
    }

    /// `heads` lists for every row, row by row; one for each where its heads agree everywhere.
    pub(crate) fn from_lists<R: AsRef<[usize]>>(heads: usize, lists: &[R]) -> Self {
        let mut rows = lists.chunks(heads);
        if rows.all(|row| row.iter().all(|list| list.as_ref() == row[0].as_ref())) {
            let first: Vec<&[usize]> = lists.iter().step_by(heads).map(AsRef::as_ref).collect();
            return Self::from_rows(&first);
        }
        Self {
            rows: lists.len() / heads,
            heads,
            ..Self::from_rows(lists)
        }
    }

    /// Lists that differ between KV heads: `rows[row][head]`. Shorter lists end in
    /// [`EMPTY`](Self::EMPTY).
    ///
    /// # Panics
    /// If rows differ in their number of heads.
    #[must_use]
    pub fn from_heads(rows: &[Vec<Vec<usize>>]) -> Self {
        let heads = rows.first().map_or(1, Vec::len);
        assert!(
            rows.iter().all(|row| row.len() == heads),
            "the same heads in every row"
        );
        let lists: Vec<_> = rows.iter().flatten().collect();
        Self {
            rows: rows.len(),
            heads,
            ..Self::from_rows(&lists)
        }
    }

    /// Number of batch rows.
    #[must_use]
    pub const fn rows(&self) -> usize {
        self.rows
    }

    /// 1 where all heads of a row share one list, else the number of KV heads.
    #[must_use]
    pub const fn heads(&self) -> usize {
        self.heads
    }

    /// Slots per list, empty ones included.
    #[must_use]
    pub const fn width(&self) -> usize {
        self.width
    }

    /// The list of one row and head. Where heads share one list, any `head` answers it.
    ///
    /// # Panics
    /// If there is no such row, or no such head.
    #[must_use]
    pub fn slots(&self, row: usize, head: usize) -> &[usize] {
        let head = if self.heads == 1 { 0 } else { head };
        let from = (row * self.heads + head) * self.width;
        &self.slots[from..from + self.width]
    }

    /// Slots of a row's first head that are not empty.
    ///
    /// # Panics
    /// If there is no such row.
    #[must_use]
    pub fn count(&self, row: usize) -> usize {
        self.slots(row, 0)
            .iter()
            .filter(|&&position| position != Self::EMPTY)
            .count()
    }

    /// Whether all rows hold the same lists, so that one row can stand for all.
    #[must_use]
    pub fn rows_agree(&self) -> bool {
        let list = self.heads * self.width;
        self.rows <= 1
            || list == 0
            || self
                .slots
                .chunks(list)
                .all(|row| *row == self.slots[..list])
    }

    /// The highest position held anywhere.
    #[must_use]
    pub fn last(&self) -> Option<usize> {
        self.slots
            .iter()
            .copied()
            .filter(|&position| position != Self::EMPTY)
            .max()
    }

    /// The same slots, emptied where `keep(row, position)` declines.
    #[must_use]
    pub fn filter(&self, keep: impl Fn(usize, usize) -> bool) -> Self {
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

    /// The same rows, `range` of their slots.
    ///
    /// # Panics
    /// If `range` reaches beyond [`width`](Self::width).
    #[must_use]
    pub fn narrow(&self, range: std::ops::Range<usize>) -> Self {
        let slots = self
            .slots
            .chunks(self.width.max(1))
            .flat_map(|list| &list[range.clone()])
            .copied()
            .collect();
        Self {
            width: range.len(),
            slots,
            ..*self
        }
    }
}

impl fmt::Display for Positions {
    /// Each row's first and last position.
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

/// Whether the query at one position may see the key at another, in a layer that shows `window`
/// keys (the query's own included) or, without a window, all.
///
/// ```
/// use kv_direct::positions::visible;
///
/// let two = std::num::NonZeroUsize::new(2);
/// assert!(visible(5, 5, two) && visible(5, 4, two));
/// assert!(!visible(5, 3, two), "two keys, the query's own included");
/// assert!(visible(5, 3, None) && !visible(5, 6, None));
/// ```
#[must_use]
pub fn visible(query: usize, key: usize, window: Option<NonZeroUsize>) -> bool {
    key <= query && window.is_none_or(|window| query - key < window.get())
}
