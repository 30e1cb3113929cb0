//! Tensors of zeros.

use burn::tensor::{DType, Device, Tensor};

/// A tensor of zeros. On the CPU [`Tensor::zeros`] would copy them and hold them twice for a moment.
pub(crate) fn zeros<const D: usize>(
    shape: [usize; D],
    (device, dtype): (&Device, DType),
) -> Tensor<D> {
    Tensor::full(shape, 0.0, (device, dtype))
}
