//! Tiny random models, one cache of each kind, and bits.

use burn::tensor::Tensor;
use kv_direct::{
    cache::{
        CacheBackend, CachedPositions, Floor, FullKv, LayerIndex, ResidualCheckpoint,
        ResidualConfig, TokenIds, Window,
    },
    exact::conformance::Conformance,
    model::{Decoder, DecoderConfig, Input},
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

/// `ResidualCheckpoint` at any price, on a probe made once.
pub fn residual(
    decoder: &Decoder,
    hot: usize,
    floor: Floor,
    probe: &Conformance,
) -> ResidualCheckpoint {
    let config = ResidualConfig::new(hot)
        .with_floor(floor)
        .even_if_larger()
        .with_conformance(probe.clone());
    ResidualCheckpoint::new(&decoder.shape(), decoder.device(), config).expect("the probe passed")
}

pub fn probe(decoder: &Decoder) -> Conformance {
    let shape = decoder.shape();
    Conformance::probe(&shape.kernels, decoder.device(), shape.dtype)
}

/// One of each backend.
pub fn backends(decoder: &Decoder) -> Vec<(&'static str, Box<dyn CacheBackend>)> {
    let (shape, probe) = (decoder.shape(), probe(decoder));
    vec![
        ("FullKv", Box::new(FullKv::new(&shape))),
        (
            "Window",
            Box::new(Window::new(&shape, 6).expect("a budget")),
        ),
        (
            "ResidualCheckpoint",
            Box::new(residual(decoder, 6, Floor::Tokens, &probe)),
        ),
        (
            "ResidualCheckpoint, residuals",
            Box::new(residual(decoder, 6, Floor::Residuals, &probe)),
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
    let positions = (0..4).map(|row| cache.position(row)).collect();
    let kept = (0..layers)
        .map(|layer| cache.cached(LayerIndex::new(layer)))
        .collect();
    (positions, kept, cache.memory().total())
}
