//! One block: norms, attention, feed-forward layer.

use burn::tensor::Tensor;

use super::{
    DecoderConfig,
    attention::{Attention, StepAt},
    feed_forward::FeedForward,
    rope::Angles,
};
use crate::{
    cache::{CacheBackend, CacheError, KeysValues, Projection},
    exact::rms_norm,
    positions::Positions,
};

pub(super) struct Block {
    pub(super) attention_norm: Tensor<1>,
    pub(super) attention: Attention,
    pub(super) post_attention_norm: Option<Tensor<1>>,
    pub(super) feed_forward_norm: Tensor<1>,
    pub(super) feed_forward: FeedForward,
    pub(super) post_feed_forward_norm: Option<Tensor<1>>,
    /// The index of its rotary table in the decoder.
    pub(super) table: usize,
}

impl Block {
    /// Runs the block in a step: `[batch, tokens, hidden]` in and out.
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
        let normed = norm(residual.clone(), &self.attention_norm, config);
        let attended = self.attention.step(&residual, normed, at, config, cache)?;
        Ok(self.finish(residual, attended, config))
    }

    /// The keys and values of the block's input.
    pub(super) fn project(
        &self,
        residual: Tensor<3>,
        angles: &Angles,
        config: &DecoderConfig,
    ) -> Projection {
        let normed = norm(residual, &self.attention_norm, config);
        self.attention.project(normed, angles, config)
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
        let normed = norm(residual.clone(), &self.attention_norm, config);
        let attended = self
            .attention
            .read(normed, angles, query_positions, keys_values, config);
        self.finish(residual, attended, config)
    }

    /// What follows attention: the residual adds and the feed-forward layer.
    fn finish(
        &self,
        residual: Tensor<3>,
        attended: Tensor<3>,
        config: &DecoderConfig,
    ) -> Tensor<3> {
        let add = |residual: Tensor<3>, output: Tensor<3>, post: Option<&Tensor<1>>| match post {
            Some(weight) => residual + norm(output, weight, config),
            None => residual + output,
        };
        let residual = add(residual, attended, self.post_attention_norm.as_ref());
        let normed = norm(residual.clone(), &self.feed_forward_norm, config);
        let output = self.feed_forward.forward(normed);
        add(residual, output, self.post_feed_forward_norm.as_ref())
    }
}

fn norm(x: Tensor<3>, weight: &Tensor<1>, config: &DecoderConfig) -> Tensor<3> {
    rms_norm(x, weight, config.norm_epsilon, config.norm_plus_one)
}
