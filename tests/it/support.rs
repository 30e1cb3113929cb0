//! Tiny random models, one cache of each kind, and bits.

use burn::tensor::Tensor;
use kv_direct::{
    cache::{CacheBackend, CacheError, CachedPositions, LayerIndex, ModelShape, State, TokenIds},
    model::{Decoder, DecoderConfig, Input},
    policy::{FullKv, Window},
    residual::{Plan, ResidualCheckpoint, ResidualConfig},
};

pub use crate::random::tokens;
use crate::random::{VOCAB, decoder, weights};

/// A decoder with pseudo-random weights.
pub fn random(config: &DecoderConfig) -> Decoder {
    decoder(config, &weights(config))
}

/// Three layers, 97 tokens, heads of 16.
pub fn tiny(kv_heads: usize) -> Decoder {
    random(&DecoderConfig::new(VOCAB, 64, 3, 4, kv_heads))
}

/// What is retained of old tokens, in every full-attention layer alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlanKind {
    Tokens,
    Residuals,
}

impl PlanKind {
    pub fn plan(self, shape: &ModelShape) -> Plan {
        match self {
            Self::Tokens => Plan::tokens(shape),
            Self::Residuals => Plan::residuals(shape),
        }
    }
}

/// A `ResidualCheckpoint` with `hot` hot tokens, even if it saves nothing.
pub fn residual(decoder: &Decoder, hot: usize, kind: PlanKind) -> ResidualCheckpoint {
    let shape = decoder.shape();
    let config = ResidualConfig::new(kind.plan(&shape).with_hot(hot)).even_if_larger();
    ResidualCheckpoint::new(&shape, decoder.conformance(), config).expect("the probe passed")
}

/// One of each backend.
pub fn backends(decoder: &Decoder) -> Vec<(&'static str, Box<dyn CacheBackend>)> {
    let shape = decoder.shape();
    vec![
        ("FullKv", Box::new(FullKv::new(&shape))),
        (
            "Window",
            Box::new(Window::new(&shape, 6).expect("a budget")),
        ),
        (
            "ResidualCheckpoint",
            Box::new(residual(decoder, 6, PlanKind::Tokens)),
        ),
        (
            "ResidualCheckpoint, residuals",
            Box::new(residual(decoder, 6, PlanKind::Residuals)),
        ),
    ]
}

pub fn bits<const D: usize>(tensor: &Tensor<D>) -> Vec<u32> {
    let values = tensor.try_to_vec_as::<f32>().expect("f32 on the CPU");
    values.into_iter().map(f32::to_bits).collect()
}

/// Feeds one call and answers the bits of its logits.
pub fn feed<C>(decoder: &Decoder, cache: &mut C, tokens: impl Into<TokenIds>) -> Vec<u32>
where
    C: CacheBackend + ?Sized,
{
    bits(
        &decoder
            .forward(Input::from(tokens), cache)
            .expect("a good call"),
    )
}

/// Everything a caller can see of a cache.
pub fn seen<C>(cache: &C, layers: usize) -> (Vec<usize>, Vec<CachedPositions>, usize)
where
    C: CacheBackend + ?Sized,
{
    let positions = cache.lengths().to_vec();
    let kept = (0..layers)
        .map(|layer| cache.cached(LayerIndex::new(layer)))
        .collect();
    (positions, kept, cache.memory().total())
}

/// Short forms for tests.
pub trait CacheExt: CacheBackend {
    /// Truncates every sequence that is longer to `to` tokens; beyond all of them it is refused.
    fn truncate_all(&mut self, to: usize) -> Result<(), CacheError> {
        let longest = self.lengths().iter().copied().max().unwrap_or(0);
        if to > longest {
            return self.truncate(&vec![to; self.lengths().len()]);
        }
        let to: Vec<usize> = self.lengths().iter().map(|&n| to.min(n)).collect();
        self.truncate(&to)
    }

    /// Processed tokens of a sequence, 0 if there is none.
    fn length(&self, sequence: usize) -> usize {
        self.lengths().get(sequence).copied().unwrap_or(0)
    }
}

impl<C: CacheBackend + ?Sized> CacheExt for C {}

/// The options of a state, to make another with.
pub fn options(state: &State) -> Vec<(String, String)> {
    let options = state.options();
    options
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}
