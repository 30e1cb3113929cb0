//! Attention of one block: the only caller of `wants`, `keys_values` and `observe`.

use burn::tensor::Tensor;

use super::{DecoderConfig, linear::Linear, rope::Angles};
use crate::{
    cache::{
        CacheBackend, CacheError, KeysValues, LayerIndex, Observation, Observed, Projection,
        Replay, Span, Step,
    },
    exact::{
        AttentionParams, attention, attention_with_column_sums, attention_with_last_queries,
        rms_norm,
    },
    positions::Positions,
};

pub(super) struct Attention {
    pub(super) query: Linear,
    /// Keys and values side by side, computed in one product.
    pub(super) key_value: Linear,
    pub(super) output: Linear,
    pub(super) query_norm: Option<Tensor<1>>,
    pub(super) key_norm: Option<Tensor<1>>,
    pub(super) params: AttentionParams,
}

/// A step at one layer, without its input.
pub(super) struct StepAt<'a> {
    pub(super) layer: LayerIndex,
    pub(super) step: &'a Step,
    /// The angles of the step's positions, from the layer's rotary table.
    pub(super) angles: &'a Angles,
    /// The block itself, for a cache that rebuilds entries.
    pub(super) replay: &'a dyn Replay,
}

impl Attention {
    /// Projects the normed residual `[batch, tokens, hidden]` to keys and values.
    pub(super) fn project(
        &self,
        normed: Tensor<3>,
        angles: &Angles,
        config: &DecoderConfig,
    ) -> Projection {
        let width = config.kv_heads * config.head_dim;
        let both = self.key_value.forward(normed);
        let keys = heads(both.clone().slice_dim(2, 0..width), config.kv_heads);
        let values = heads(both.slice_dim(2, width..2 * width), config.kv_heads);
        let keys = angles.rotate(head_norm(keys, self.key_norm.as_ref(), config));
        Projection { keys, values }
    }

    /// Attention of the normed residual over `keys_values`, through the output projection.
    pub(super) fn read(
        &self,
        normed: Tensor<3>,
        angles: &Angles,
        query_positions: &Positions,
        keys_values: &KeysValues,
        config: &DecoderConfig,
    ) -> Tensor<3> {
        let query = self.rotated(self.query.forward(normed), angles, config);
        self.output.forward(attention(
            query,
            query_positions,
            keys_values.sequences(),
            &self.params,
        ))
    }

    /// Attention of a step: passes the new entries to the cache and reads what it returns.
    pub(super) fn step<C>(
        &self,
        residual: &Tensor<3>,
        normed: Tensor<3>,
        at: &StepAt<'_>,
        config: &DecoderConfig,
        cache: &mut C,
    ) -> Result<Tensor<3>, CacheError>
    where
        C: CacheBackend + ?Sized,
    {
        let wanted = cache.wants(at.layer);
        let query_positions = at.step.positions();
        let query = self.query.forward(normed.clone());
        let projection = self.project(normed, at.angles, config);
        let span = Span::new(query_positions, residual, &projection, at.replay);
        let keys_values = cache.keys_values(at.layer, span)?;
        drop(projection);

        let query = self.rotated(query, at.angles, config);
        let (segments, params) = (keys_values.sequences(), &self.params);
        let mixed = match wanted {
            Observation::Nothing => attention(query, query_positions, segments, params),
            Observation::ColumnSums => {
                let (mixed, sums) =
                    attention_with_column_sums(query, query_positions, segments, params);
                drop(keys_values);
                cache.observe(at.layer, Observed::ColumnSums(sums))?;
                mixed
            }
            Observation::LastQueries(last) => {
                let (mixed, probabilities) =
                    attention_with_last_queries(query, query_positions, segments, params, last);
                drop(keys_values);
                cache.observe(at.layer, Observed::LastQueries(probabilities))?;
                mixed
            }
        };
        Ok(self.output.forward(mixed))
    }

    /// Projected queries as heads, normed and rotated: `[batch, heads, tokens, head_dim]`.
    fn rotated(&self, query: Tensor<3>, angles: &Angles, config: &DecoderConfig) -> Tensor<4> {
        let query = heads(query, config.heads);
        angles.rotate(head_norm(query, self.query_norm.as_ref(), config))
    }
}

/// `[batch, tokens, heads · head_dim]` as `[batch, heads, tokens, head_dim]`.
fn heads(x: Tensor<3>, heads: usize) -> Tensor<4> {
    let [batch, tokens, width] = x.dims();
    x.reshape([batch, tokens, heads, width / heads])
        .swap_dims(1, 2)
}

fn head_norm(x: Tensor<4>, weight: Option<&Tensor<1>>, config: &DecoderConfig) -> Tensor<4> {
    match weight {
        Some(weight) => rms_norm(x, weight, config.norm_epsilon, config.norm_plus_one),
        None => x,
    }
}
