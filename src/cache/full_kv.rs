//! `FullKv`: keeps everything; the reference every other backend is measured against.

use crate::cache::{
    CacheError, ModelShape, State,
    evicting::{Evicting, Policy},
    forward::backend,
    layered::Layered,
};

/// Keeps the keys and values of every token in every layer, or of every token that a later one can
/// still see: a layer with a window holds its window and the rows of the last call.
///
/// The last call can always be undone. Truncation further back is refused with
/// [`Irreversible`](crate::cache::CacheError::Irreversible) where a layer's window has let go of rows.
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
pub struct FullKv(Evicting<Everything>);

#[derive(Debug, Clone)]
struct Everything;

impl Policy for Everything {
    const NAME: &'static str = "full_kv";

    fn options(&self) -> String {
        String::new()
    }

    fn restored(&self, _: &State, held: &Layered) -> Result<Self, CacheError> {
        held.all_held().map(|()| Self)
    }
}

impl FullKv {
    /// An empty cache for a model of this shape.
    #[must_use]
    pub fn new(shape: &ModelShape) -> Self {
        Self(Evicting::new(shape, Everything))
    }
}

backend!(FullKv);
