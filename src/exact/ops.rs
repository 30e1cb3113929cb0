//! The operations that a backend of burn may run by kernels of its own: a backend extension.
//!
//! [`Flex`](burn::backend::Flex) has them in `flex.rs`. Tensors on every other device, of another dtype, or tracked by
//! autodiff take the stock operations that stand beside each caller: [`owned`] decides.

use std::sync::Arc;

use burn::{
    backend::{Backend, Dispatch, backend_extension, tensor::FloatTensor},
    tensor::{DType, Device, Tensor},
};

use super::{Activation, packed::Packed};

/// Operations whose order of sums `docs/exactness.md` gives. All tensors are f32.
#[backend_extension(Flex)]
pub(super) trait ExactOps: Backend {
    /// `[.., width]` by packed panels of `[width, out]`: `[.., out]`.
    fn exact_linear(x: FloatTensor<Self>, weight: Arc<Packed>) -> FloatTensor<Self>;

    /// Root-mean-square norm along the last dimension.
    fn exact_norm(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
        plus_one: bool,
    ) -> FloatTensor<Self>;

    /// Rotates the last dimension of `[batch, heads, tokens, head_dim]`. `cos` and `sin` are
    /// `[batch or 1, heads or 1, tokens, head_dim / 2]`.
    fn exact_rotate(
        x: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
    ) -> FloatTensor<Self>;

    /// `activation(gate) · up`, `[.., 2 · width]` to `[.., width]`; the gate comes first.
    fn exact_gated(x: FloatTensor<Self>, activation: Activation) -> FloatTensor<Self>;
}

/// Whether the kernels of this crate run operations on tensors of this dtype on this device.
pub(crate) fn owned(device: &Device, dtype: DType) -> bool {
    dtype == DType::F32 && *device == Device::flex()
}

pub(super) fn linear<const D: usize>(x: Tensor<D>, weight: &Arc<Packed>) -> Tensor<D> {
    let x = x.into_dispatch();
    Tensor::from_dispatch(Dispatch::exact_linear(x, Arc::clone(weight)))
}

pub(super) fn norm<const D: usize>(
    x: Tensor<D>,
    weight: &Tensor<1>,
    epsilon: f64,
    plus_one: bool,
) -> Tensor<D> {
    let (x, weight) = (x.into_dispatch(), weight.clone().into_dispatch());
    Tensor::from_dispatch(Dispatch::exact_norm(x, weight, epsilon, plus_one))
}

pub(super) fn rotate(x: Tensor<4>, cos: &Tensor<4>, sin: &Tensor<4>) -> Tensor<4> {
    let (cos, sin) = (cos.clone().into_dispatch(), sin.clone().into_dispatch());
    Tensor::from_dispatch(Dispatch::exact_rotate(x.into_dispatch(), cos, sin))
}

pub(super) fn gated(x: Tensor<3>, activation: Activation) -> Tensor<3> {
    Tensor::from_dispatch(Dispatch::exact_gated(x.into_dispatch(), activation))
}
