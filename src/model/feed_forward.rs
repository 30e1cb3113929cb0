//! The gated feed-forward layer.

use burn::tensor::{Tensor, activation};

use super::{Activation, linear::Linear};

pub(super) struct FeedForward {
    /// Gate and up side by side, computed in one product.
    pub(super) gate_up: Linear,
    pub(super) down: Linear,
    pub(super) activation: Activation,
}

impl FeedForward {
    /// `down(activation(gate(x)) · up(x))`, `[batch, tokens, hidden]` in and out.
    pub(super) fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let both = self.gate_up.forward(x);
        let width = both.dims()[2] / 2;
        let gate = both.clone().slice_dim(2, 0..width);
        let gate = match self.activation {
            Activation::Silu => activation::silu(gate),
            Activation::GeluTanh => activation::gelu_approximate(gate),
        };
        self.down
            .forward(gate * both.slice_dim(2, width..2 * width))
    }
}
