//! One block: norms, attention, feed-forward; and the view of it that a cache may replay.

use std::num::NonZeroUsize;

use burn::tensor::Tensor;

use super::{
    Decoder, DecoderConfig, ForwardError,
    attention::Attention,
    feed_forward::FeedForward,
    rope::{Angles, RopeTable},
};
use crate::{
    cache::{CacheBackend, CacheError, KeysValues, Projection, Replay, Step, TokenIds},
    exact::{Attend, rms_norm},
    positions::Positions,
};

pub(super) struct Block {
    pub(super) attention_norm: Tensor<1>,
    pub(super) attention: Attention,
    pub(super) post_attention_norm: Option<Tensor<1>>,
    pub(super) feed_forward_norm: Tensor<1>,
    pub(super) feed_forward: FeedForward,
    pub(super) post_feed_forward_norm: Option<Tensor<1>>,
    /// Which of the decoder's rotary tables.
    pub(super) table: usize,
    pub(super) window: Option<NonZeroUsize>,
}

/// What all blocks share.
pub(super) struct Shared {
    pub(super) config: DecoderConfig,
    pub(super) tables: Vec<RopeTable>,
}

impl Shared {
    fn norm(&self, x: Tensor<3>, weight: &Tensor<1>) -> Tensor<3> {
        rms_norm(
            x,
            weight,
            self.config.norm_epsilon,
            self.config.norm_plus_one,
        )
    }

    /// The residual after a layer's output was added to it, normed first where there is a norm.
    fn add(&self, residual: Tensor<3>, output: Tensor<3>, norm: Option<&Tensor<1>>) -> Tensor<3> {
        residual + norm.map_or(output.clone(), |weight| self.norm(output, weight))
    }
}

impl Block {
    /// The block of a step: `[batch, tokens, hidden]` in and out.
    pub(super) fn step<C>(
        &self,
        view: &BlockView<'_>,
        residual: Tensor<3>,
        angles: &Angles,
        step: &Step,
        cache: &mut C,
    ) -> Result<Tensor<3>, CacheError>
    where
        C: CacheBackend + ?Sized,
    {
        let normed = view
            .decoder
            .shared
            .norm(residual.clone(), &self.attention_norm);
        let output = self
            .attention
            .step(view, &residual, normed, angles, step, cache)?;
        Ok(self.finish(&view.decoder.shared, residual, output))
    }

    /// What follows attention: the residual adds and the feed-forward layer.
    fn finish(&self, shared: &Shared, residual: Tensor<3>, attended: Tensor<3>) -> Tensor<3> {
        let residual = shared.add(residual, attended, self.post_attention_norm.as_ref());
        let normed = shared.norm(residual.clone(), &self.feed_forward_norm);
        let output = self.feed_forward.forward(normed);
        shared.add(residual, output, self.post_feed_forward_norm.as_ref())
    }
}

/// A decoder at one layer, as a cache sees it.
#[derive(Debug, Clone, Copy)]
pub(super) struct BlockView<'a> {
    pub(super) decoder: &'a Decoder,
    pub(super) layer: usize,
}

impl<'a> BlockView<'a> {
    fn block(&self) -> &'a Block {
        &self.decoder.blocks[self.layer]
    }

    pub(super) const fn config(&self) -> &'a DecoderConfig {
        &self.decoder.shared.config
    }

    pub(super) fn attend(&self) -> Attend {
        let config = self.config();
        Attend::new(config.query_scale)
            .with_window(self.block().window)
            .with_softcap(config.attention_softcap)
    }

    pub(super) fn angles(&self, positions: &Positions) -> Result<Angles, CacheError> {
        self.decoder
            .angles(self.block().table, positions)
            .map_err(|error| CacheError::Replay(Box::new(error)))
    }

    fn normed(&self, residual: Tensor<3>) -> Tensor<3> {
        self.decoder
            .shared
            .norm(residual, &self.block().attention_norm)
    }
}

impl Replay for BlockView<'_> {
    fn embed(&self, tokens: &TokenIds) -> Result<Tensor<3>, CacheError> {
        self.decoder.embed(tokens).map_err(|error| match error {
            ForwardError::Cache(error) => error,
            error => CacheError::Replay(Box::new(error)),
        })
    }

    fn project(
        &self,
        residual: Tensor<3>,
        positions: &Positions,
    ) -> Result<Projection, CacheError> {
        let angles = self.angles(positions)?;
        Ok(self
            .block()
            .attention
            .project(self.normed(residual), &angles, self.config()))
    }

    fn forward(
        &self,
        residual: Tensor<3>,
        positions: &Positions,
        keys_values: &KeysValues,
    ) -> Result<Tensor<3>, CacheError> {
        let angles = self.angles(positions)?;
        let normed = self.normed(residual.clone());
        let output = self
            .block()
            .attention
            .read(self, normed, &angles, positions, keys_values);
        Ok(self.block().finish(&self.decoder.shared, residual, output))
    }

    fn rotate(
        &self,
        keys: Tensor<4>,
        from: &Positions,
        to: &Positions,
    ) -> Result<Tensor<4>, CacheError> {
        Ok(self
            .angles(to)?
            .rotate(self.angles(from)?.inverse().rotate(keys)))
    }
}
