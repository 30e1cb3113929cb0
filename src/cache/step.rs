//! What a step brings: token ids and their positions.

use crate::{cache::CacheError, exact::PIECE, positions::Positions};

/// Token ids of a batch; rows may differ in length.
///
/// ```
/// use kv_direct::cache::TokenIds;
///
/// let tokens = TokenIds::from(vec![vec![7, 8, 9], vec![4]]);
/// assert_eq!((tokens.rows(), tokens.longest()), (2, 3));
/// assert_eq!(tokens.row(1), [4]);
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TokenIds(Vec<Vec<u32>>);

impl TokenIds {
    /// Number of batch rows.
    #[must_use]
    pub const fn rows(&self) -> usize {
        self.0.len()
    }

    /// The ids of one row.
    ///
    /// # Panics
    /// If there is no such row.
    #[must_use]
    pub fn row(&self, row: usize) -> &[u32] {
        &self.0[row]
    }

    /// Tokens of every row.
    #[must_use]
    pub fn lengths(&self) -> Vec<usize> {
        self.0.iter().map(Vec::len).collect()
    }

    /// Tokens of the longest row.
    #[must_use]
    pub fn longest(&self) -> usize {
        self.0.iter().map(Vec::len).max().unwrap_or(0)
    }

    /// All ids, row by row.
    pub fn iter(&self) -> impl Iterator<Item = &[u32]> {
        self.0.iter().map(Vec::as_slice)
    }

    /// Every row's tokens `from .. to`, as far as it has them.
    #[must_use]
    pub fn range(&self, from: usize, to: usize) -> Self {
        self.iter()
            .map(|row| row[from.min(row.len())..to.min(row.len())].to_vec())
            .collect()
    }

    /// Every row filled up to `length` tokens.
    pub(crate) fn padded(mut self, length: usize, pad: u32) -> Self {
        self.0.iter_mut().for_each(|row| row.resize(length, pad));
        self
    }

    /// Adds tokens to every row. Rows grow by whole pieces, not by doubling: what they hold is counted.
    pub(crate) fn extend(&mut self, more: &Self) {
        self.0.resize(more.rows(), Vec::new());
        for (row, more) in self.0.iter_mut().zip(&more.0) {
            let length = row.len() + more.len();
            if length > row.capacity() {
                row.reserve_exact(length.next_multiple_of(PIECE) - row.len());
            }
            row.extend_from_slice(more);
        }
    }

    /// Bytes held, growth slack included.
    pub(crate) fn bytes(&self) -> usize {
        self.0
            .iter()
            .map(|row| row.capacity() * size_of::<u32>())
            .sum()
    }

    /// Takes every row back to its length in `to`; does nothing where there are no ids.
    pub(crate) fn truncate(&mut self, to: &[usize]) {
        for (row, &to) in self.0.iter_mut().zip(to) {
            row.truncate(to);
        }
    }

    /// Gives growth slack back, but for the last piece.
    pub(crate) fn shrink_to_pieces(&mut self) {
        let rows = self.0.iter_mut();
        rows.for_each(|row| row.shrink_to(row.len().next_multiple_of(PIECE)));
    }

    /// Gives growth slack back.
    pub(crate) fn shrink(&mut self) {
        self.0.iter_mut().for_each(Vec::shrink_to_fit);
    }
}

impl From<Vec<Vec<u32>>> for TokenIds {
    fn from(rows: Vec<Vec<u32>>) -> Self {
        Self(rows)
    }
}

impl From<&[u32]> for TokenIds {
    fn from(row: &[u32]) -> Self {
        Self(vec![row.to_vec()])
    }
}

impl FromIterator<Vec<u32>> for TokenIds {
    fn from_iter<I: IntoIterator<Item = Vec<u32>>>(rows: I) -> Self {
        Self(rows.into_iter().collect())
    }
}

/// One call of the decoder, announced to the cache before its first layer.
///
/// Rows are left-aligned: a row shorter than the longest ends in pads, whose position is
/// [`Positions::EMPTY`].
///
/// ```
/// use kv_direct::cache::Step;
///
/// let step = Step::new(vec![vec![11, 12]].into(), &[5])?;
/// assert_eq!(step.positions().slots(0, 0), [5, 6]);
/// # Ok::<(), kv_direct::cache::CacheError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Step {
    tokens: TokenIds,
    starts: Vec<usize>,
    positions: Positions,
    more_follows: bool,
}

impl Step {
    /// A step in which row `i` of `tokens` starts at position `starts[i]`.
    ///
    /// # Errors
    /// [`EmptyStep`](CacheError::EmptyStep) if no row has a token,
    /// [`Starts`](CacheError::Starts) if `starts` has another number of rows.
    pub fn new(tokens: TokenIds, starts: &[usize]) -> Result<Self, CacheError> {
        if tokens.longest() == 0 {
            return Err(CacheError::EmptyStep {
                rows: tokens.rows(),
            });
        }
        if tokens.rows() != starts.len() {
            return Err(CacheError::Starts {
                rows: tokens.rows(),
                starts: starts.len(),
            });
        }
        let positions = Positions::contiguous(starts, &tokens.lengths());
        Ok(Self {
            tokens,
            starts: starts.to_vec(),
            positions,
            more_follows: false,
        })
    }

    /// Says whether more chunks of the same prompt follow (by default none does).
    #[must_use]
    pub const fn with_more_follows(mut self, more_follows: bool) -> Self {
        self.more_follows = more_follows;
        self
    }

    /// The token ids.
    #[must_use]
    pub const fn tokens(&self) -> &TokenIds {
        &self.tokens
    }

    /// The position at which each row starts.
    #[must_use]
    pub fn starts(&self) -> &[usize] {
        &self.starts
    }

    /// The position of every token, `[rows, 1, longest]`.
    #[must_use]
    pub const fn positions(&self) -> &Positions {
        &self.positions
    }

    /// Whether more chunks of the same prompt follow.
    #[must_use]
    pub const fn more_follows(&self) -> bool {
        self.more_follows
    }
}
