//! `FullKv`: keeps everything; the reference for every other backend.

use super::{Attention, Entries, Evicting, Policy, Sequence};
use crate::cache::{ModelShape, forward_to_field};

/// Keeps the keys and values of every token, in sliding-window layers of every token that a later query can see.
///
/// The last step can always be undone. In a model with sliding windows a truncation further back is refused with
/// [`Irreversible`](crate::cache::CacheError::Irreversible) once a window has freed entries that it needs.
///
/// # Cost
/// [`ModelShape::keys_values_per_token`] bytes a token, and
/// [`keys_values_per_old_token`](ModelShape::keys_values_per_old_token) once it has left the sliding windows. Buffers
/// grow by an eighth, in panels of 32 slots. Appends happen in place; a window moves on by one copy every 32 tokens.
///
/// ```
/// use burn::tensor::DType;
/// use kv_direct::cache::{CacheBackend, ModelShape};
/// use kv_direct::{FullKv, exact::KernelShapes};
///
/// let shape = ModelShape::new(2, 64, DType::F32, KernelShapes::new(4, 2, 16));
/// let cache = FullKv::new(&shape);
/// assert!(cache.lengths().is_empty() && cache.memory().total() == 0);
/// ```
#[derive(Debug, Clone)]
pub struct FullKv(Evicting<Everything>);

impl FullKv {
    /// An empty cache for a model of this shape.
    #[must_use]
    pub fn new(shape: &ModelShape) -> Self {
        Self(Evicting::new(shape, Everything))
    }
}

forward_to_field!(FullKv);

#[derive(Debug, Clone)]
struct Everything;

impl Policy for Everything {
    const NAME: &'static str = "full_kv";
    const EVICTS: bool = false;

    fn options(&self) -> Vec<(&'static str, String)> {
        Vec::new()
    }

    fn evict(&self, _: &mut Entries<'_>, _: &Attention<'_>, _: &Sequence) {}
}
