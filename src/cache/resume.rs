//! How far the rebuilding of a parked cache has come.

use super::{LayerIndex, Replay};

/// How far a [`resume`](crate::cache::CacheBackend::resume) has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ResumeProgress {
    /// Layers rebuilt.
    pub done: usize,
    /// Layers of the model.
    pub layers: usize,
}

impl ResumeProgress {
    pub(crate) const fn new(done: usize, layers: usize) -> Self {
        Self { done, layers }
    }
}

/// Returns the decoder at a layer, for [`resume`](crate::cache::CacheBackend::resume).
pub type ReplayAt<'a> = dyn Fn(LayerIndex) -> Box<dyn Replay + 'a> + Sync + 'a;
