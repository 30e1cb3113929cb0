//! The gated activation of a feed-forward layer.

use burn::tensor::{Tensor, activation as stock};

#[cfg(feature = "flex")]
use super::ops;

/// Activation of the feed-forward gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Activation {
    /// `x · sigmoid(x)`.
    Silu,
    /// GELU in its tanh approximation.
    GeluTanh,
}

/// `activation(gate) · up`, where gate and up stand side by side.
///
/// On `flex` in f32, exponentials are polynomials of this crate, with the same bits on every CPU.
///
/// # Shapes
/// * `x`: `[batch, tokens, 2 · width]`, the gate first
/// * result: `[batch, tokens, width]`
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use kv_direct::exact::{Activation, gated};
///
/// let x = Tensor::<3>::from_data([[[0.0, 20.0, 5.0, 3.0]]], &Device::flex());
/// let y = gated(x, Activation::Silu).into_data();
/// assert_eq!(y.as_slice::<f32>().unwrap(), [0.0, 60.0]);
/// ```
#[must_use]
pub fn gated(x: Tensor<3>, activation: Activation) -> Tensor<3> {
    #[cfg(feature = "flex")]
    if super::owned(&x.device(), x.dtype()) {
        return ops::gated(x, activation);
    }
    let width = x.dims()[2] / 2;
    let activated = x.clone().slice_dim(2, 0..width);
    let activated = match activation {
        Activation::Silu => stock::silu(activated),
        Activation::GeluTanh => stock::gelu_approximate(activated),
    };
    activated * x.slice_dim(2, width..2 * width)
}
