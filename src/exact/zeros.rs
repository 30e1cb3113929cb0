//! Tensors to be filled in.

use burn::tensor::{DType, Device, Tensor};

/// Zeros. On the CPU [`Tensor::zeros`] holds them twice for a moment, and copies them.
pub(crate) fn zeros<const D: usize>(
    shape: [usize; D],
    (device, dtype): (&Device, DType),
) -> Tensor<D> {
    Tensor::full(shape, 0.0, (device, dtype))
}
