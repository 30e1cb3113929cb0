//! What a cache needs to know of a model.

use std::num::NonZeroUsize;

use burn::tensor::DType;

use crate::exact::conformance::KernelShapes;

/// The shape of a model, as far as a cache cares.
///
/// ```
/// use burn::tensor::DType;
/// use kv_direct::{cache::ModelShape, exact::conformance::KernelShapes};
///
/// // SmolLM2-135M in f32: keys and values of a token, and one residual per layer.
/// let shape = ModelShape::new(30, 576, DType::F32, KernelShapes::new(9, 3, 64));
/// assert_eq!(shape.keys_values_per_token(), 46_080);
/// assert_eq!(shape.residuals_per_token(), 69_120);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ModelShape {
    /// How many keys each layer shows, the query's own included; `None` for all.
    pub windows: Vec<Option<NonZeroUsize>>,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Dtype of the residual stream, the keys and the values.
    pub dtype: DType,
    /// Heads, and the shapes that kernels choose their path by.
    pub kernels: KernelShapes,
}

impl ModelShape {
    /// A model of `layers` layers that all show every key.
    #[must_use]
    pub fn new(layers: usize, hidden: usize, dtype: DType, kernels: KernelShapes) -> Self {
        Self {
            windows: vec![None; layers],
            hidden,
            dtype,
            kernels,
        }
    }

    /// Number of layers.
    #[must_use]
    pub const fn layers(&self) -> usize {
        self.windows.len()
    }

    /// Elements of the keys (or of the values) of one token at one layer.
    #[must_use]
    pub const fn kv_width(&self) -> usize {
        self.kernels.kv_heads * self.kernels.head_dim
    }

    /// Bytes of one token's keys and values in all layers.
    #[must_use]
    pub fn keys_values_per_token(&self) -> usize {
        2 * self.kv_width() * self.layers() * self.dtype.size()
    }

    /// Bytes of one token's residual rows, one entering every layer.
    #[must_use]
    pub fn residuals_per_token(&self) -> usize {
        self.hidden * self.layers() * self.dtype.size()
    }
}
