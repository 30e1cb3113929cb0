//! What a cache holds, in bytes, by part.

/// Bytes a cache holds between steps, by part, and the most it held on top of them within a step.
///
/// Every byte that grows with the context is in one of the parts: a cache that keeps its rows in
/// buffers larger than the rows reports the difference as [`reserved`](Self::reserved).
///
/// ```
/// use kv_direct::memory::MemoryReport;
///
/// let mut report = MemoryReport::default();
/// report.keys_values = 4096;
/// report.tokens = 64;
/// assert_eq!(report.total(), 4160);
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryReport {
    /// Rows of keys and values in use.
    pub keys_values: usize,
    /// Rows of the residual stream in use.
    pub residuals: usize,
    /// Token ids, four bytes each, of all tokens taken in.
    pub tokens: usize,
    /// Scores of a policy.
    pub scores: usize,
    /// Held but not in use: growth slack, padding, and the lists that say which slot holds which
    /// position.
    pub reserved: usize,
    /// The most that was held on top of [`total`](Self::total) within the last step: rebuilt rows,
    /// replayed residuals and the temporaries of the replay; rows on their way into larger or smaller
    /// buffers; probabilities a policy looked at.
    pub scratch_peak: usize,
    /// Blocks of rows, by layer, that were rebuilt before they were let go of and had the same bits
    /// ([certified eviction](crate::cache::ResidualConfig::with_certified_eviction)).
    pub blocks_certified: usize,
    /// Blocks that differed when they were rebuilt: their rows stay.
    pub blocks_kept: usize,
}

impl MemoryReport {
    /// All bytes held between steps: every part but the scratch.
    #[must_use]
    pub const fn total(&self) -> usize {
        self.keys_values + self.residuals + self.tokens + self.scores + self.reserved
    }
}
