//! A soft cap.

use burn::tensor::Tensor;

#[cfg(feature = "flex")]
use super::ops;

/// `cap · tanh(x / cap)`: numbers near 0 hardly change, and none is larger than the cap.
///
/// On `flex` in f32, `tanh` is a polynomial of this crate, with the same bits on every CPU.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use kv_direct::exact::softcap;
///
/// let x = Tensor::<3>::from_data([[[0.0, 1e4, -1e4]]], &Device::flex());
/// let y = softcap(x, 30.0).into_data();
/// assert_eq!(y.as_slice::<f32>().unwrap(), [0.0, 30.0, -30.0]);
/// ```
#[must_use]
pub fn softcap(x: Tensor<3>, cap: f64) -> Tensor<3> {
    #[cfg(feature = "flex")]
    if super::owned(&x.device(), x.dtype()) {
        return ops::softcap(x, cap);
    }
    stock(x, cap)
}

/// The same by burn's operations.
pub(super) fn stock<const D: usize>(x: Tensor<D>, cap: f64) -> Tensor<D> {
    x.div_scalar(cap).tanh().mul_scalar(cap)
}
