//! `Window`: keeps the newest rows and drops the rest; the plainest lossy policy.

use crate::cache::{
    Budget, CacheError, ModelShape,
    evicting::{Evicting, Policy},
    forward::backend,
};

/// Keeps the newest `size` rows between steps, at their original positions, in every layer that shows
/// all keys. A layer with a window keeps what that shows.
///
/// A step sees the rows held and its own; what is older than `size` rows is dropped once the step is
/// over. So a prompt is attended in full when it comes in one call, and the result may depend on how
/// tokens were split into calls once something was dropped. As long as nothing was, the bits are
/// those of [`FullKv`](crate::cache::FullKv).
///
/// # Cost
/// `size` rows, in buffers of whole pieces of 512 slots that also hold the rows of the step. Appends
/// happen in place: a new row takes the slot of a dropped one.
///
/// ```
/// use burn::tensor::DType;
/// use kv_direct::{cache::{ModelShape, Window}, exact::conformance::KernelShapes};
///
/// let shape = ModelShape::new(2, 64, DType::F32, KernelShapes::new(4, 2, 16));
/// assert!(Window::new(&shape, 32).is_ok());
/// let refused = Window::new(&shape, 0).unwrap_err();
/// assert_eq!(refused.to_string(), "a budget of 0 rows is too small: the smallest that works is 1");
/// ```
#[derive(Debug)]
pub struct Window(Evicting<Newest>);

#[derive(Debug, Clone)]
struct Newest {
    size: Budget,
}

impl Policy for Newest {
    const NAME: &'static str = "window";
    const BY_POSITION: bool = true;

    fn options(&self) -> String {
        format!("size {}", self.size)
    }

    fn stays(&self, position: usize, length: usize, prompt: Option<usize>) -> bool {
        let size = self.size.of(prompt).unwrap_or(length);
        position >= length.saturating_sub(size)
    }
}

impl Window {
    /// An empty cache that holds `size` rows between steps.
    ///
    /// # Errors
    /// [`Budget`](CacheError::Budget) if `size` is 0.
    pub fn new(shape: &ModelShape, size: impl Into<Budget>) -> Result<Self, CacheError> {
        let size = size.into().holds(1)?;
        Ok(Self(Evicting::new(shape, Newest { size })))
    }
}

backend!(Window);
