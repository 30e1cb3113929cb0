//! One block: attention, feed-forward layer.

use burn::tensor::Tensor;

use super::{
    DecoderConfig,
    attention::{Attention, StepAt},
    rope::Angles,
};
use crate::{
    cache::{CacheBackend, CacheError, KeysValues, Projection},
    exact::{Activation, Linear, Norm, feed_forward_added},
    positions::Positions,
};

pub(super) struct Block {
    pub(super) attention: Attention,
    pub(super) feed_forward: FeedForward,
    /// The index of its rotary table in the decoder.
    pub(super) table: usize,
}

/// The gated feed-forward layer.
pub(super) struct FeedForward {
    pub(super) norm: Norm,
    /// Gate and up side by side, computed in one product.
    pub(super) gate_up: Linear,
    pub(super) down: Linear,
    pub(super) activation: Activation,
    /// Applied to the output before it is added to the residual.
    pub(super) post_norm: Option<Norm>,
}

impl FeedForward {
    /// The residual with `down(activation(gate) · up)` added: `[1, tokens, hidden]` in and out.
    fn forward(&self, residual: Tensor<3>) -> Tensor<3> {
        feed_forward_added(
            residual,
            &self.norm,
            [&self.gate_up, &self.down],
            self.activation,
            self.post_norm.as_ref(),
        )
    }
}

impl Block {
    /// Runs the block in a step: `[1, tokens, hidden]` in and out.
    pub(super) fn step<C>(
        &self,
        residual: Tensor<3>,
        at: &StepAt<'_>,
        config: &DecoderConfig,
        cache: &mut C,
    ) -> Result<Tensor<3>, CacheError>
    where
        C: CacheBackend + ?Sized,
    {
        let attended = self.attention.step(residual, at, config, cache)?;
        Ok(self.feed_forward.forward(attended))
    }

    /// The keys and values of the block's input.
    pub(super) fn project(
        &self,
        residual: Tensor<3>,
        angles: &Angles,
        config: &DecoderConfig,
    ) -> Projection {
        self.attention.project(residual, angles, config)
    }

    /// Runs the block outside a step. Attention reads `keys_values`.
    pub(super) fn forward(
        &self,
        residual: Tensor<3>,
        angles: &Angles,
        query_positions: &Positions,
        keys_values: &KeysValues,
        config: &DecoderConfig,
    ) -> Tensor<3> {
        let attention = &self.attention;
        let attended = attention.read(residual, angles, query_positions, keys_values, config);
        self.feed_forward.forward(attended)
    }
}
