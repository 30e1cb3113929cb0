//! Token ids of a batch.

use crate::{exact::grown, positions::Positions};

/// Token ids of a batch; sequences may differ in length.
///
/// ```
/// use kv_direct::cache::TokenIds;
///
/// let tokens = TokenIds::from(vec![vec![7, 8, 9], vec![4]]);
/// assert_eq!((tokens.sequences(), tokens.longest()), (2, 3));
/// assert_eq!(tokens.sequence(1), [4]);
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TokenIds(Vec<Vec<u32>>);

impl TokenIds {
    /// Number of sequences.
    #[must_use]
    pub const fn sequences(&self) -> usize {
        self.0.len()
    }

    /// The ids of one sequence.
    ///
    /// # Panics
    /// If there is no such sequence.
    #[must_use]
    pub fn sequence(&self, index: usize) -> &[u32] {
        &self.0[index]
    }

    /// Tokens of every sequence.
    #[must_use]
    pub fn lengths(&self) -> Vec<usize> {
        self.0.iter().map(Vec::len).collect()
    }

    /// Tokens of the longest sequence.
    #[must_use]
    pub fn longest(&self) -> usize {
        self.0.iter().map(Vec::len).max().unwrap_or(0)
    }

    /// The ids of every sequence, in order.
    pub fn iter(&self) -> impl Iterator<Item = &[u32]> {
        self.0.iter().map(Vec::as_slice)
    }

    /// The ids at these positions, and 0 for pads.
    pub(crate) fn at(&self, positions: &Positions) -> Self {
        let id = |ids: &[u32], position| match position {
            Positions::EMPTY => 0,
            position => ids[position],
        };
        let sequences = self.iter().enumerate();
        let ids = sequences.map(|(sequence, ids)| {
            let slots = positions.slots(sequence, 0).iter();
            slots.map(|&position| id(ids, position)).collect()
        });
        ids.collect()
    }

    /// Appends tokens to every sequence. Buffers grow as those of entries do, not by doubling: their slack is counted.
    pub(crate) fn extend(&mut self, more: &Self) {
        self.0.resize(more.sequences(), Vec::new());
        for (ids, more) in self.0.iter_mut().zip(&more.0) {
            let length = ids.len() + more.len();
            if length > ids.capacity() {
                ids.reserve_exact(grown(length) - ids.len());
            }
            ids.extend_from_slice(more);
        }
    }

    /// Bytes held, slack included.
    pub(crate) fn bytes(&self) -> usize {
        let bytes = |ids: &Vec<u32>| ids.capacity() * size_of::<u32>();
        self.0.iter().map(bytes).sum()
    }

    /// Shortens every sequence to its length in `to`.
    pub(crate) fn truncate(&mut self, to: &[usize]) {
        for (ids, &to) in self.0.iter_mut().zip(to) {
            ids.truncate(to);
        }
    }

    /// Frees slack beyond what growing leaves.
    pub(crate) fn shrink_slack(&mut self) {
        let sequences = self.0.iter_mut();
        sequences.for_each(|ids| ids.shrink_to(grown(ids.len())));
    }

    /// Frees all slack.
    pub(crate) fn shrink(&mut self) {
        self.0.iter_mut().for_each(Vec::shrink_to_fit);
    }
}

impl From<Vec<Vec<u32>>> for TokenIds {
    fn from(sequences: Vec<Vec<u32>>) -> Self {
        Self(sequences)
    }
}

impl From<&[u32]> for TokenIds {
    fn from(ids: &[u32]) -> Self {
        Self(vec![ids.to_vec()])
    }
}

impl FromIterator<Vec<u32>> for TokenIds {
    fn from_iter<I: IntoIterator<Item = Vec<u32>>>(sequences: I) -> Self {
        Self(sequences.into_iter().collect())
    }
}
