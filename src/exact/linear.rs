//! The row-stable linear layer.

use burn::tensor::Tensor;

use super::PIECE;

/// `x · weight`, where a row of the result depends on its own row of `x` and on `weight` alone.
///
/// The reduction is cut into equal parts of at most [`PIECE`] whose products are added in order.
/// Costs one plain product; the parts are views.
///
/// # Shapes
/// `x` `[batch, tokens, in]`, `weight` `[in, out]` contiguous, the answer `[batch, tokens, out]`.
///
/// # Panics
/// If the two disagree on `in`.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use kv_direct::exact::linear;
///
/// let device = Device::flex();
/// let x = Tensor::<3>::ones([1, 2, 700], &device);
/// let weight = Tensor::<2>::ones([700, 3], &device);
/// assert_eq!(linear(x, &weight).into_scalar_sum(), 4200.0);
/// # trait Sum { fn into_scalar_sum(self) -> f32; }
/// # impl Sum for Tensor<3> { fn into_scalar_sum(self) -> f32 { self.sum().into_scalar() } }
/// ```
#[must_use]
pub fn linear(x: Tensor<3>, weight: &Tensor<2>) -> Tensor<3> {
    let [batch, tokens, width] = x.dims();
    let out = weight.dims()[1];
    let x = x.reshape([batch * tokens, width]);
    let part = width.div_ceil(width.div_ceil(PIECE).max(1)).max(1);
    let mut sum: Option<Tensor<2>> = None;
    for from in (0..width).step_by(part) {
        let range = from..(from + part).min(width);
        let product = x
            .clone()
            .slice_dim(1, range.clone())
            .matmul(weight.clone().slice_dim(0, range));
        sum = Some(match sum {
            None => product,
            Some(sum) => sum + product,
        });
    }
    sum.unwrap_or_else(|| Tensor::zeros([batch * tokens, out], (&weight.device(), weight.dtype())))
        .reshape([batch, tokens, out])
}
