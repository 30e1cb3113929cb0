//! The gated feed-forward layer.

use burn::tensor::{Tensor, activation};

use super::{Activation, weights::Linear};

pub(super) struct FeedForward {
    pub(super) gate: Linear,
    pub(super) up: Linear,
    pub(super) down: Linear,
    pub(super) activation: Activation,
}

impl FeedForward {
    /// `down(activation(gate(x)) · up(x))`, `[batch, tokens, hidden]` in and out.
    pub(super) fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let gate = self.gate.forward(x.clone());
        let gate = match self.activation {
            Activation::Silu => activation::silu(gate),
            Activation::GeluTanh => activation::gelu_approximate(gate),
        };
        self.down.forward(gate * self.up.forward(x))
    }
}
