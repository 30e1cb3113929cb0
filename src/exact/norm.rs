//! Root-mean-square norm in the rounding order of Hugging Face's models.

use burn::tensor::{DType, Tensor};

#[cfg(feature = "flex")]
use super::ops;

/// `x / sqrt(mean(x²) + epsilon) · weight` along the last dimension.
///
/// The quotient is computed in f32 and rounded to the dtype of `x` before the weight is applied, as in Llama and
/// Qwen. With `weight_plus_one` (Gemma) the weight counts as `1 + weight` and is applied in f32, and the product is
/// rounded once.
///
/// # Shapes
/// * `x`: `[.., width]`
/// * `weight`: `[width]`
/// * result: like `x`
///
/// On `flex` in f32, squares are summed in 32 lanes that are folded by halves.
///
/// # Panics
/// If `weight` is not as wide as `x`, unless one of the two is 1 wide.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use kv_direct::exact::rms_norm;
///
/// let device = Device::flex();
/// let x = Tensor::<3>::from_data([[[3.0, -3.0]]], &device);
/// let weight = Tensor::<1>::from_data([1.0, 2.0], &device);
/// let normed = rms_norm(x, &weight, 0.0, false).into_data();
/// assert_eq!(normed.as_slice::<f32>().unwrap(), [1.0, -2.0]);
/// ```
#[must_use]
pub fn rms_norm<const D: usize>(
    x: Tensor<D>,
    weight: &Tensor<1>,
    epsilon: f64,
    weight_plus_one: bool,
) -> Tensor<D> {
    let dtype = x.dtype();
    #[cfg(feature = "flex")]
    if super::owned(&x.device(), dtype) && weight.dims()[0] == x.dims()[D - 1] {
        return ops::norm(x, weight, epsilon, weight_plus_one);
    }
    let x = if dtype == DType::F32 {
        x
    } else {
        x.cast(DType::F32)
    };
    let scale = (x.clone().square().mean_dim(D - 1) + epsilon)
        .sqrt()
        .recip();
    let quotient = x * scale;
    let weight = weight.clone().unsqueeze::<D>();
    match (weight_plus_one, dtype) {
        (false, DType::F32) => quotient * weight,
        (false, _) => quotient.cast(dtype) * weight,
        (true, _) => (quotient * (weight.cast(DType::F32) + 1.0)).cast(dtype),
    }
}

/// The weight and the parameters of a root-mean-square norm.
#[cfg(any(feature = "flex", feature = "model"))]
#[derive(Debug, Clone)]
pub(crate) struct Norm {
    pub(crate) weight: Tensor<1>,
    pub(crate) epsilon: f64,
    /// Whether the weight counts as `1 + weight`.
    pub(crate) plus_one: bool,
}

#[cfg(feature = "model")]
impl Norm {
    pub(crate) fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        rms_norm(x, &self.weight, self.epsilon, self.plus_one)
    }
}
