//! What a cache holds, in bytes, by part.

/// Bytes that a cache holds between steps, by part, and the most that it held on top of them within a step.
///
/// The parts cover every byte that grows with the context. A buffer can be larger than the entries in it; the
/// difference is [`reserved`](Self::reserved).
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
    /// Keys and values in use.
    pub keys_values: usize,
    /// Residuals in use.
    pub residuals: usize,
    /// Token ids, 4 bytes each, where the backend holds them.
    pub tokens: usize,
    /// Scores of a policy, and probabilities that it stores.
    pub scores: usize,
    /// Held beside the entries: growth slack, padding, the position of every slot, and unrotated keys of sinks.
    pub reserved: usize,
    /// The most that was held on top of [`total`](Self::total) within the last step. It counts rebuilt entries,
    /// replayed residuals and the temporaries of the replay. It also counts entries that are copied to larger or
    /// smaller buffers, and probabilities that a policy reads.
    pub scratch_peak: usize,
    /// Blocks of entries, counted by layer, that were rebuilt before they were dropped and had the same bits
    /// ([certified eviction](crate::residual::ResidualConfig::with_certified_eviction)).
    pub blocks_certified: usize,
    /// Blocks that had other bits when they were rebuilt. Their entries stay.
    pub blocks_kept: usize,
}

impl MemoryReport {
    /// All bytes held between steps: the sum of all parts except the scratch.
    #[must_use]
    pub const fn total(&self) -> usize {
        self.keys_values + self.residuals + self.tokens + self.scores + self.reserved
    }
}
