//! `FullKv`: keeps everything; the reference every other backend is measured against.

use crate::{
    cache::{
        CacheBackend, CacheError, Kept, KeysValues, LayerIndex, ModelShape, Span, Step,
        layered::Layered,
    },
    memory::MemoryReport,
};

/// Keeps the keys and values of every token in every layer, or of every token that a later one can
/// still see: a layer with a window holds its window and the rows of the last call.
///
/// # Cost
/// [`ModelShape::keys_values_per_token`] bytes a token,
/// [`keys_values_per_old_token`](ModelShape::keys_values_per_old_token) once it has left the windows, in
/// buffers that grow by whole pieces of 512 tokens. Appends happen in place; a window moves on by a
/// copy every 512 tokens.
///
/// ```
/// use burn::tensor::DType;
/// use kv_direct::{cache::{CacheBackend, FullKv, ModelShape}, exact::conformance::KernelShapes};
///
/// let shape = ModelShape::new(2, 64, DType::F32, KernelShapes::new(4, 2, 16));
/// let cache = FullKv::new(&shape);
/// assert_eq!((cache.position(0), cache.memory().total()), (0, 0));
/// ```
#[derive(Debug)]
pub struct FullKv(Layered);

impl FullKv {
    /// An empty cache for a model of this shape.
    #[must_use]
    pub fn new(shape: &ModelShape) -> Self {
        Self(Layered::new(shape))
    }
}

impl CacheBackend for FullKv {
    fn begin(&mut self, step: &Step) -> Result<(), CacheError> {
        self.0.begin(step)
    }

    fn keys_values(&mut self, layer: LayerIndex, span: Span<'_>) -> Result<KeysValues, CacheError> {
        self.0.append(layer, &span)
    }

    fn commit(&mut self) -> Result<(), CacheError> {
        self.0.progress.commit(&self.0.shape)
    }

    fn position(&self, row: usize) -> usize {
        self.0.progress.length(row)
    }

    fn kept(&self, layer: LayerIndex) -> Kept {
        self.0.kept(layer)
    }

    fn memory(&self) -> MemoryReport {
        self.0.memory()
    }

    /// As [`CacheBackend::truncate`]. The last call can always be undone; further back is refused with
    /// [`Irreversible`](CacheError::Irreversible) where a layer's window has let go of rows.
    fn truncate(&mut self, to: usize) -> Result<(), CacheError> {
        self.0.can_truncate(to, |_| 0)?;
        self.0.truncate(to);
        Ok(())
    }

    fn clear(&mut self) {
        self.0.clear();
    }

    fn fork(&self) -> Box<dyn CacheBackend> {
        Box::new(Self(self.0.clone()))
    }
}
