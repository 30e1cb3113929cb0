//! Attention of one block: the only caller of `wants`, `keys_values` and `observe`.

use burn::tensor::{DType, Tensor};

use super::{DecoderConfig, rope::Angles};
use crate::{
    cache::{
        CacheBackend, CacheError, KeysValues, LayerIndex, Observation, Observed, Projection,
        Replay, Span, Step,
    },
    exact::{
        AttentionParams, Linear, Norm, attention, attention_with_column_sums,
        attention_with_last_queries, linear_added, normed_linears,
    },
    positions::Positions,
};

pub(super) struct Attention {
    pub(super) norm: Norm,
    pub(super) query: Linear,
    /// Keys and values side by side, computed in one product.
    pub(super) key_value: Linear,
    pub(super) output: Linear,
    pub(super) query_norm: Option<Norm>,
    pub(super) key_norm: Option<Norm>,
    pub(super) params: AttentionParams,
    /// Applied to the output before it is added to the residual.
    pub(super) post_norm: Option<Norm>,
}

/// A step at one layer, without its input.
pub(super) struct StepAt<'a> {
    pub(super) layer: LayerIndex,
    pub(super) step: &'a Step,
    /// The angles of the step's positions, from the layer's rotary table.
    pub(super) angles: &'a Angles,
    /// The dtype in which the cache takes keys and values.
    pub(super) cache_dtype: DType,
    /// The block itself, for a cache that rebuilds entries.
    pub(super) replay: &'a dyn Replay,
}

impl Attention {
    /// Projects the residual `[1, tokens, hidden]` to keys and values.
    pub(super) fn project(
        &self,
        residual: Tensor<3>,
        angles: &Angles,
        config: &DecoderConfig,
    ) -> Projection {
        let both = normed_linears(residual, &self.norm, &[&self.key_value]);
        self.keys_values(&heads(both, config.head_dim), 0, angles, config)
    }

    /// Keys and values from their heads, the first of which has the index `first`.
    fn keys_values(
        &self,
        heads: &Tensor<4>,
        first: usize,
        angles: &Angles,
        config: &DecoderConfig,
    ) -> Projection {
        let keys = first..first + config.kv_heads;
        let values = keys.end..keys.end + config.kv_heads;
        let keys = heads.clone().slice_dim(1, keys);
        Projection {
            keys: rotated(keys, self.key_norm.as_ref(), angles),
            values: heads.clone().slice_dim(1, values),
        }
    }

    /// The residual with attention over `keys_values` added.
    pub(super) fn read(
        &self,
        residual: Tensor<3>,
        angles: &Angles,
        query_positions: &Positions,
        keys_values: &KeysValues,
        config: &DecoderConfig,
    ) -> Tensor<3> {
        let query = normed_linears(residual.clone(), &self.norm, &[&self.query]);
        let query = heads(query, config.head_dim);
        let mixed = attention(
            rotated(query, self.query_norm.as_ref(), angles),
            query_positions,
            keys_values.sequences(),
            &self.params,
        );
        linear_added(mixed, &self.output, self.post_norm.as_ref(), residual)
    }

    /// Attention of a step: passes the new entries to the cache, reads what it returns, and adds the result to the
    /// residual.
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
        let wanted = cache.wants(at.layer);
        let query_positions = at.step.positions();
        let linears = [&self.query, &self.key_value];
        let all = heads(
            normed_linears(residual.clone(), &self.norm, &linears),
            config.head_dim,
        );
        let projection = self.keys_values(&all, config.heads, at.angles, config);
        let projection = projection.cast(at.cache_dtype);
        let query = all.slice_dim(1, 0..config.heads);
        let span = Span::new(query_positions, &residual, &projection, at.replay);
        let keys_values = cache.keys_values(at.layer, span)?;
        drop(projection);

        let query = rotated(query, self.query_norm.as_ref(), at.angles);
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
        Ok(linear_added(
            mixed,
            &self.output,
            self.post_norm.as_ref(),
            residual,
        ))
    }
}

/// `[1, tokens, heads · head_dim]` as `[1, heads, tokens, head_dim]`.
fn heads(x: Tensor<3>, head_dim: usize) -> Tensor<4> {
    let [_, tokens, width] = x.dims();
    x.reshape([1, tokens, width / head_dim, head_dim])
        .swap_dims(1, 2)
}

/// Projected heads, normed and rotated.
fn rotated(x: Tensor<4>, norm: Option<&Norm>, angles: &Angles) -> Tensor<4> {
    angles.rotate(match norm {
        Some(norm) => norm.forward(x),
        None => x,
    })
}
