//! `Window`: keeps the newest rows and drops the rest; the plainest lossy policy.

use crate::{
    cache::{
        CacheBackend, CacheError, Kept, KeysValues, LayerIndex, ModelShape, Span, Step,
        layered::Layered,
    },
    memory::MemoryReport,
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
pub struct Window {
    held: Layered,
    size: usize,
}

impl Window {
    /// An empty cache that holds `size` rows between steps.
    ///
    /// # Errors
    /// [`Budget`](CacheError::Budget) if `size` is 0.
    pub fn new(shape: &ModelShape, size: usize) -> Result<Self, CacheError> {
        if size == 0 {
            return Err(CacheError::Budget {
                found: size,
                smallest: 1,
            });
        }
        Ok(Self {
            held: Layered::new(shape),
            size,
        })
    }
}

impl CacheBackend for Window {
    fn begin(&mut self, step: &Step) -> Result<(), CacheError> {
        self.held.begin(step)
    }

    fn keys_values(&mut self, layer: LayerIndex, span: Span<'_>) -> Result<KeysValues, CacheError> {
        self.held.append(layer, &span)
    }

    fn commit(&mut self) -> Result<(), CacheError> {
        self.held.progress.commit(&self.held.shape)?;
        let oldest = |length: &usize| length.saturating_sub(self.size);
        let oldest: Vec<usize> = self.held.progress.lengths().iter().map(oldest).collect();
        self.held.retain(|row, position| position >= oldest[row]);
        Ok(())
    }

    fn position(&self, row: usize) -> usize {
        self.held.progress.length(row)
    }

    fn kept(&self, layer: LayerIndex) -> Kept {
        self.held.kept(layer)
    }

    fn memory(&self) -> MemoryReport {
        self.held.memory()
    }

    /// As [`CacheBackend::truncate`]; refused with [`Irreversible`](CacheError::Irreversible) where
    /// rows that would be held at `to` were dropped.
    fn truncate(&mut self, to: usize) -> Result<(), CacheError> {
        let dropped = |length| if length > self.size { length } else { 0 };
        self.held.can_truncate(to, dropped)?;
        self.held.truncate(to);
        Ok(())
    }

    fn clear(&mut self) {
        self.held.clear();
    }

    fn fork(&self) -> Box<dyn CacheBackend> {
        Box::new(Self {
            held: self.held.clone(),
            size: self.size,
        })
    }
}
