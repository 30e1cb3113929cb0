//! Which layer.

/// A layer, counted from 0.
///
/// ```
/// assert_eq!(kv_direct::cache::LayerIndex::new(3).index(), 3);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LayerIndex(usize);

impl LayerIndex {
    /// The layer with this index.
    #[must_use]
    pub const fn new(index: usize) -> Self {
        Self(index)
    }

    /// The index.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0
    }
}
