//! A linear layer.

use burn::tensor::Tensor;

use crate::exact::{Weight, linear};

/// A linear layer: a weight `[in, out]` and an optional bias.
pub(super) struct Linear {
    pub(super) weight: Weight,
    pub(super) bias: Option<Tensor<1>>,
}

impl Linear {
    /// `[batch, tokens, in]` to `[batch, tokens, out]`.
    pub(super) fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let y = linear(x, &self.weight);
        match &self.bias {
            Some(bias) => y + bias.clone().unsqueeze::<3>(),
            None => y,
        }
    }
}
