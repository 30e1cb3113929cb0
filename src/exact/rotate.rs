//! Rotary position embedding with given angles.

use burn::tensor::Tensor;

#[cfg(feature = "flex")]
use super::ops;

/// Rotates every head: element `i` of its first half with element `i` of its second, by the angle of `cos[i]` and
/// `sin[i]`.
///
/// # Shapes
/// * `x`: `[batch, heads, tokens, head_dim]`
/// * `cos`, `sin`: `[batch or 1, heads or 1, tokens, head_dim / 2]`
/// * result: like `x`
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use kv_direct::exact::rotate;
///
/// let device = Device::flex();
/// let x = Tensor::<4>::from_data([[[[3.0, 4.0]]]], &device);
/// let (cos, sin) = (Tensor::zeros([1, 1, 1, 1], &device), Tensor::ones([1, 1, 1, 1], &device));
/// let quarter = rotate(x, &cos, &sin).into_data();
/// assert_eq!(quarter.as_slice::<f32>().unwrap(), [-4.0, 3.0]);
/// ```
#[must_use]
pub fn rotate(x: Tensor<4>, cos: &Tensor<4>, sin: &Tensor<4>) -> Tensor<4> {
    #[cfg(feature = "flex")]
    if super::owned(&x.device(), x.dtype()) {
        return ops::rotate(x, cos, sin);
    }
    let half = x.dims()[3] / 2;
    let low = x.clone().slice_dim(3, 0..half);
    let high = x.slice_dim(3, half..2 * half);
    let new_low = low.clone() * cos.clone() - high.clone() * sin.clone();
    let new_high = high * cos.clone() + low * sin.clone();
    Tensor::cat(vec![new_low, new_high], 3)
}
