//! Which positions a cache holds.

/// Positions that a next query could read at one layer, rising.
///
/// ```
/// use kv_direct::cache::CachedPositions;
///
/// // One sequence, whose KV heads share a list.
/// let cached = CachedPositions::new(vec![vec![vec![0, 1, 5]]]);
/// assert_eq!(cached.sequence(0), [vec![0, 1, 5]]);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CachedPositions(Vec<Vec<Vec<usize>>>);

impl CachedPositions {
    /// The lists of every sequence: a single one if all KV heads share it, else one for each KV head.
    #[must_use]
    pub const fn new(sequences: Vec<Vec<Vec<usize>>>) -> Self {
        Self(sequences)
    }

    /// Number of sequences.
    #[must_use]
    pub const fn sequences(&self) -> usize {
        self.0.len()
    }

    /// The lists of one sequence: a single one if all KV heads share it, else one for each KV head.
    ///
    /// # Panics
    /// If there is no such sequence.
    #[must_use]
    pub fn sequence(&self, index: usize) -> &[Vec<usize>] {
        &self.0[index]
    }
}
