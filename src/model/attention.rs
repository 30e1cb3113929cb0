//! Attention of one block, and the only caller of `keys_values` and `observe`.

use burn::tensor::Tensor;

use super::{DecoderConfig, block::BlockView, rope::Angles, weights::Linear};
use crate::{
    cache::{
        CacheBackend, CacheError, KeysValues, LayerIndex, Observation, Observed, Projection, Span,
        Step,
    },
    exact::{attention, both, rms_norm, with_column_sums, with_last_rows},
    positions::Positions,
};

pub(super) struct Attention {
    pub(super) query: Linear,
    /// Keys and values side by side: one product for both.
    pub(super) key_value: Linear,
    pub(super) output: Linear,
    pub(super) query_norm: Option<Tensor<1>>,
    pub(super) key_norm: Option<Tensor<1>>,
}

impl Attention {
    /// Keys and values of normed rows `[batch, tokens, hidden]`.
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
        Projection::new(
            angles.rotate(head_norm(keys, self.key_norm.as_ref(), config)),
            values,
        )
    }

    /// Attention of normed rows over `keys_values`, through the output projection.
    pub(super) fn read(
        &self,
        view: &BlockView<'_>,
        normed: Tensor<3>,
        angles: &Angles,
        positions: &Positions,
        keys_values: &KeysValues,
    ) -> Tensor<3> {
        let query = self.rotated(self.query.forward(normed), angles, view.config());
        let (keys, values, slots) = parts(keys_values);
        self.output.forward(attention(
            query,
            keys,
            values,
            positions,
            slots,
            &view.attend(),
        ))
    }

    /// Attention of a step: hands the new rows to the cache and reads what it answers.
    pub(super) fn step<C>(
        &self,
        view: &BlockView<'_>,
        residual: &Tensor<3>,
        normed: Tensor<3>,
        angles: &Angles,
        step: &Step,
        cache: &mut C,
    ) -> Result<Tensor<3>, CacheError>
    where
        C: CacheBackend + ?Sized,
    {
        let layer = LayerIndex::new(view.layer);
        let wanted = cache.wants(layer, step);
        let (query, projection) = both(
            &normed,
            || self.query.forward(normed.clone()),
            || self.project(normed.clone(), angles, view.config()),
        );
        let keys_values = cache.keys_values(
            layer,
            Span::new(step.positions(), residual, &projection, view),
        )?;
        drop(projection);

        let moved = keys_values
            .query_positions()
            .map(|to| moved(view, step, to))
            .transpose()?;
        let (positions, angles) = moved
            .as_ref()
            .map_or((step.positions(), angles), |(to, angles)| (to, angles));
        let query = self.rotated(query, angles, view.config());
        let (keys, values, slots) = parts(&keys_values);
        let mixed = match wanted {
            Observation::Nothing => {
                attention(query, keys, values, positions, slots, &view.attend())
            }
            Observation::ColumnSums => {
                let (mixed, sums) =
                    with_column_sums(query, keys, values, positions, slots, &view.attend());
                drop(keys_values);
                cache.observe(layer, Observed::ColumnSums(sums))?;
                mixed
            }
            Observation::LastRows(last) => {
                let attend = view.attend();
                let (mixed, rows) =
                    with_last_rows(query, keys, values, positions, slots, &attend, last);
                drop(keys_values);
                cache.observe(layer, Observed::LastRows(rows))?;
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

fn parts(keys_values: &KeysValues) -> (&Tensor<4>, &Tensor<4>, &Positions) {
    (
        keys_values.keys(),
        keys_values.values(),
        keys_values.positions(),
    )
}

/// Positions a policy moved the queries to, and their angles.
fn moved(
    view: &BlockView<'_>,
    step: &Step,
    to: &Positions,
) -> Result<(Positions, Angles), CacheError> {
    let shape =
        |positions: &Positions| vec![positions.rows(), positions.heads(), positions.width()];
    let (expected, found) = (shape(step.positions()), shape(to));
    if expected != found {
        return Err(CacheError::Shape {
            what: "positions of the queries",
            expected,
            found,
        });
    }
    Ok((to.clone(), view.angles(to)?))
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
