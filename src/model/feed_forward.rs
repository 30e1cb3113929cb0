//! The gated feed-forward layer.

use burn::tensor::Tensor;

use super::linear::Linear;
use crate::exact::{Activation, gated};

pub(super) struct FeedForward {
    /// Activation and up side by side, computed in one product.
    pub(super) gate_up: Linear,
    pub(super) down: Linear,
    pub(super) activation: Activation,
}

impl FeedForward {
    /// `down(activation(gate(x)) · up(x))`, `[batch, tokens, hidden]` in and out.
    pub(super) fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.down
            .forward(gated(self.gate_up.forward(x), self.activation))
    }
}
