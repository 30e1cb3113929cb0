//! `Window`: keeps the newest entries; the plainest lossy policy.

use super::{Attention, Entries, Evicting, Policy, Sequence, TokenBudget};
use crate::cache::{CacheError, ModelShape, forward_to_field};

/// Keeps the newest `size` entries between steps, at their original positions, in every full-attention layer.
///
/// Attention of a step reads the entries held and those of the step; older ones are evicted once the step is over. So
/// a prompt that comes in one step is attended to in full, and once something was evicted the result depends on how
/// tokens were split into steps. Until then the bits are those of [`FullKv`](crate::FullKv).
///
/// # Cost
/// `size` entries, in panels of 32 slots that also hold those of the step. Appends happen in place: a new entry
/// takes the slot of an evicted one.
///
/// ```
/// use burn::tensor::DType;
/// use kv_direct::{Window, cache::ModelShape, exact::KernelShapes};
///
/// let shape = ModelShape::new(2, 64, DType::F32, KernelShapes::new(4, 2, 16));
/// assert!(Window::new(&shape, 32).is_ok());
/// let refused = Window::new(&shape, 0).unwrap_err();
/// assert_eq!(refused.to_string(), "a budget of 0 tokens is too small: the smallest that works is 1");
/// ```
#[derive(Debug, Clone)]
pub struct Window(Evicting<Newest>);

impl Window {
    /// An empty cache that holds `size` entries between steps.
    ///
    /// # Errors
    /// [`Budget`](CacheError::Budget) if `size` is 0.
    pub fn new(shape: &ModelShape, size: impl Into<TokenBudget>) -> Result<Self, CacheError> {
        let size = size.into().at_least(1)?;
        Ok(Self(Evicting::new(shape, Newest { size })))
    }
}

forward_to_field!(Window);

#[derive(Debug, Clone)]
struct Newest {
    size: TokenBudget,
}

impl Policy for Newest {
    const NAME: &'static str = "window";

    fn options(&self) -> Vec<(&'static str, String)> {
        vec![("size", self.size.as_option())]
    }

    fn evict(&self, entries: &mut Entries<'_>, _: &Attention<'_>, sequence: &Sequence) {
        if let Some(size) = self.size.of(sequence) {
            let first = sequence.length.saturating_sub(size);
            entries.evict_where(|position| position < first);
        }
    }
}
