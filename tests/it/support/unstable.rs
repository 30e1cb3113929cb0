//! A cache whose replays give other bits than its steps.

use burn::tensor::{Tensor, TensorData};
use kv_direct::{
    cache::{CacheBackend, CacheError, KeysValues, LayerIndex, Projection, Replay, Span, TokenIds},
    forward_backend,
    positions::Positions,
    residual::ResidualCheckpoint,
};

/// A block that gives other bits in a replay than in a step, for about one token in `one_in`. The bits of its
/// residual decide which, so every replay changes the same tokens.
struct Unstable<'a> {
    block: &'a dyn Replay,
    one_in: u32,
}

impl Unstable<'_> {
    /// `of` with the last bit changed in the tokens that `residual` selects.
    fn shaken<const D: usize>(&self, of: Tensor<D>, residual: &Tensor<3>) -> Tensor<D> {
        let tokens = residual.dims()[1];
        let values = residual.clone().into_data();
        let values = values.as_slice::<f32>().expect("f32");
        let shaken: Vec<f32> = values
            .chunks_exact(values.len() / tokens)
            .map(|token| {
                let hash = token.iter().fold(0u32, |hash, x| {
                    (hash ^ x.to_bits())
                        .wrapping_mul(0x9e37_79b1)
                        .rotate_left(5)
                });
                if hash % self.one_in == 0 {
                    1.0 + f32::EPSILON
                } else {
                    1.0
                }
            })
            .collect();
        let mut shape = [1; D];
        shape[D - 2] = tokens;
        let device = of.device();
        of * Tensor::<D>::from_data(TensorData::new(shaken, shape), &device)
    }
}

impl Replay for Unstable<'_> {
    fn embed(&self, tokens: &TokenIds, positions: &Positions) -> Result<Tensor<3>, CacheError> {
        self.block.embed(tokens, positions)
    }

    fn project(
        &self,
        residual: Tensor<3>,
        positions: &Positions,
    ) -> Result<Projection, CacheError> {
        let Projection { keys, values } = self.block.project(residual.clone(), positions)?;
        let values = self.shaken(values, &residual);
        Ok(Projection { keys, values })
    }

    fn forward(
        &self,
        residual: Tensor<3>,
        positions: &Positions,
        keys_values: &KeysValues,
    ) -> Result<Tensor<3>, CacheError> {
        let residuals = self
            .block
            .forward(residual.clone(), positions, keys_values)?;
        Ok(self.shaken(residuals, &residual))
    }

    fn rotate(
        &self,
        keys: Tensor<4>,
        from: &Positions,
        to: &Positions,
    ) -> Result<Tensor<4>, CacheError> {
        self.block.rotate(keys, from, to)
    }
}

/// A cache whose replays are unstable.
#[derive(Debug)]
pub struct Shaken {
    pub inner: ResidualCheckpoint,
    pub one_in: u32,
}

impl CacheBackend for Shaken {
    fn keys_values(&mut self, layer: LayerIndex, span: Span<'_>) -> Result<KeysValues, CacheError> {
        let replay = Unstable {
            block: span.replay,
            one_in: self.one_in,
        };
        let span = Span::new(span.positions, span.residual, span.projection, &replay);
        self.inner.keys_values(layer, span)
    }

    forward_backend!(self => self.inner; begin wants observe commit queries lifecycle clear fork);
}
