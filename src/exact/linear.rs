//! The linear layer: a row of its result does not depend on other rows.

use std::ops::Range;

use burn::tensor::Tensor;

use super::{KV_BLOCK, zeros};

/// `x · weight`, where a row of the result depends only on its own row of `x` and on `weight`.
///
/// The reduction is cut into equal parts of at most [`KV_BLOCK`] elements, and their products are added in order.
///
/// # Shapes
/// * `x`: `[batch, tokens, in]`
/// * `weight`: `[in, out]`, contiguous
/// * result: `[batch, tokens, out]`
///
/// # Cost
/// One plain product; the parts are views. The kernels of `flex` multiply a single row on one thread. With feature
/// `rayon`, its parts and strips of columns are distributed over all threads.
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
    let part = width.div_ceil(width.div_ceil(KV_BLOCK).max(1)).max(1);
    #[cfg(all(feature = "flex", feature = "rayon"))]
    if threads::pays_off(&x, weight) {
        return threads::distributed(&x, weight, part).reshape([batch, tokens, out]);
    }
    let products = (0..width)
        .step_by(part)
        .map(|from| product(&x, weight, from..(from + part).min(width)));
    let nothing = || zeros([batch * tokens, out], (&weight.device(), weight.dtype()));
    added(products)
        .unwrap_or_else(nothing)
        .reshape([batch, tokens, out])
}

/// The product over one part of the reduction.
fn product(x: &Tensor<2>, weight: &Tensor<2>, part: Range<usize>) -> Tensor<2> {
    x.clone()
        .slice_dim(1, part.clone())
        .matmul(weight.clone().slice_dim(0, part))
}

/// The sum of the products of all parts, added in order.
fn added(products: impl Iterator<Item = Tensor<2>>) -> Option<Tensor<2>> {
    products.reduce(|sum, product| sum + product)
}

#[cfg(all(feature = "flex", feature = "rayon"))]
mod threads {
    //! One row times a matrix, on all threads. The number of threads changes no bit: columns are independent of one
    //! another, and parts are added in the same order.

    use burn::tensor::{Device, Tensor};
    use rayon::prelude::*;

    /// Elements of a matrix from which waking a thread costs less than it saves.
    const LEAST: usize = 100_000;
    /// The most columns of a strip, so that its results fit the first-level cache.
    const WIDEST: usize = 4096;
    /// The fewest columns of a strip.
    const NARROWEST: usize = 256;
    /// Tasks for every thread, so that a thread that wakes late does not delay the others.
    const TASKS: usize = 2;

    /// Whether `x` is a single row and threads make the product faster.
    pub(super) fn pays_off(x: &Tensor<2>, weight: &Tensor<2>) -> bool {
        let [width, out] = weight.dims();
        x.dims()[0] == 1
            && width * out >= LEAST
            && rayon::current_num_threads() > 1
            && weight.device() == Device::flex()
    }

    /// `x · weight`, with the reduction cut every `part` elements.
    pub(super) fn distributed(x: &Tensor<2>, weight: &Tensor<2>, part: usize) -> Tensor<2> {
        let [width, out] = weight.dims();
        let parts = width.div_ceil(part);
        let wanted = (TASKS * rayon::current_num_threads()).div_ceil(parts);
        let strips = wanted.min(out / NARROWEST).max(out.div_ceil(WIDEST)).max(1);
        let strip = out.div_ceil(strips);
        let tasks: Vec<_> = (0..out)
            .step_by(strip)
            .flat_map(|left| (0..width).step_by(part).map(move |from| (left, from)))
            .collect();
        let products: Vec<Tensor<2>> = tasks
            .into_par_iter()
            .map(|(left, from)| {
                let strip = weight.clone().slice_dim(1, left..(left + strip).min(out));
                super::product(x, &strip, from..(from + part).min(width))
            })
            .collect();
        let sums = products
            .chunks(parts)
            .map(|products| super::added(products.iter().cloned()).expect("a strip has a part"));
        Tensor::cat(sums.collect(), 1)
    }
}
