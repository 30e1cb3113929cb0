//! Linear layers: a row's result does not depend on other rows.

use std::ops::Range;

use burn::tensor::Tensor;

#[cfg(feature = "flex")]
use super::ops::{Added, Layers, PackedLinear, Products};
use super::{Weight, zeros};

/// `x · weight`, where a row of the result depends only on its own row of `x` and on `weight`.
///
/// On `flex` in f32, each output is one chain of fused multiply-adds along the reduction. Elsewhere stock products over
/// parts of at most 512 elements are added in order.
///
/// # Shapes
/// * `x`: `[batch, tokens, in]`
/// * `weight`: `[in, out]`
/// * result: `[batch, tokens, out]`
///
/// # Cost
/// One row reads the weight once, at the speed of memory, on all threads. Many rows run at the speed of the vector
/// units.
///
/// # Panics
/// If the two disagree on `in`, device, or dtype. A packed weight multiplies f32, whatever it is stored as.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use kv_direct::exact::{Weight, linear};
///
/// let device = Device::flex();
/// let x = Tensor::<3>::ones([1, 2, 700], &device);
/// let weight = Weight::new(Tensor::ones([700, 3], &device));
/// assert_eq!(linear(x, &weight).into_scalar_sum(), 4200.0);
/// # trait Sum { fn into_scalar_sum(self) -> f32; }
/// # impl Sum for Tensor<3> { fn into_scalar_sum(self) -> f32 { self.sum().into_scalar() } }
/// ```
#[must_use]
pub fn linear(x: Tensor<3>, weight: &Weight) -> Tensor<3> {
    #[cfg(feature = "flex")]
    if let Some(packed) = weight.packed() {
        assert_eq!(x.dims()[2], packed.dims()[0], "the width of x and weight");
        let linear = PackedLinear {
            weight: packed,
            bias: None,
        };
        let layers = Layers {
            before: None,
            products: Products::Beside(&[linear]),
            after: None,
            added: Added::Nothing,
        };
        return super::ops::layers(x, layers);
    }
    let weight = weight.plain();
    let [batch, tokens, width] = x.dims();
    let out = weight.dims()[1];
    let x = x.reshape([batch * tokens, width]);
    let part = width.div_ceil(width.div_ceil(PART).max(1)).max(1);
    let products = (0..width)
        .step_by(part)
        .map(|from| product(&x, weight, from..(from + part).min(width)));
    let nothing = || zeros([batch * tokens, out], (&weight.device(), weight.dtype()));
    products
        .reduce(|sum, product| sum + product)
        .unwrap_or_else(nothing)
        .reshape([batch, tokens, out])
}

/// Up to this length of a reduction, stock kernels for different numbers of rows agree.
const PART: usize = 512;

/// The product over one part of the reduction.
fn product(x: &Tensor<2>, weight: &Tensor<2>, part: Range<usize>) -> Tensor<2> {
    x.clone()
        .slice_dim(1, part.clone())
        .matmul(weight.clone().slice_dim(0, part))
}
