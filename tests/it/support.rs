//! Tiny random models, caches that record what attention read, and bits.

use std::{
    convert::Infallible,
    sync::{Arc, Mutex},
};

use burn::tensor::{Device, Tensor};
use kv_direct::{
    cache::{
        CacheBackend, CacheError, Floor, FullKv, Kept, KeysValues, LayerIndex, ResidualCheckpoint,
        ResidualConfig, Span, Step, TokenIds, Window,
    },
    exact::conformance::Conformance,
    memory::MemoryReport,
    model::{Decoder, DecoderConfig, Input},
    positions::Positions,
};

/// A decoder with pseudo-random weights: matrices of about unit gain, norms around 1.
pub fn random(config: DecoderConfig, seed: u64) -> Decoder {
    let mut state = seed ^ 0x9e37_79b9_7f4a_7c15;
    Decoder::from_weights(config, &Device::flex(), |name, shape| {
        let (middle, spread) = match shape {
            [_] if name.ends_with("bias") => (0.0, 0.2),
            [_] => (1.0, 0.3),
            [_, _] if name == "embedding" => (0.0, 1.0),
            _ => (0.0, 2.0 / (shape[1] as f32).sqrt()),
        };
        let next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            middle + spread * ((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0)
        };
        Ok::<_, Infallible>(
            std::iter::repeat_with(next)
                .take(shape.iter().product())
                .collect(),
        )
    })
    .expect("the configuration of a test is valid")
}

/// Three layers, 97 tokens, heads of 16.
pub fn tiny(kv_heads: usize) -> Decoder {
    random(DecoderConfig::new(97, 64, 3, 4, kv_heads), kv_heads as u64)
}

/// Token ids without a pattern.
pub fn tokens(count: usize, seed: u32) -> Vec<u32> {
    (0..count as u32)
        .map(|i| (i.wrapping_add(seed).wrapping_mul(2_654_435_761) >> 8) % 97)
        .collect()
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
pub fn seen<C>(cache: &C, layers: usize) -> (Vec<usize>, Vec<Kept>, usize)
where
    C: CacheBackend + ?Sized,
{
    let positions = (0..4).map(|row| cache.position(row)).collect();
    let kept = (0..layers)
        .map(|layer| cache.kept(LayerIndex::new(layer)))
        .collect();
    (positions, kept, cache.memory().total())
}

/// Positions of the rows attention read in a call, rising, with the bits of their keys and values.
pub type Read = Vec<(usize, Vec<u32>, Vec<u32>)>;

/// A cache that writes down what attention read, by call and layer, row 0.
#[derive(Debug)]
pub struct Recorder<C> {
    pub inner: C,
    pub reads: Arc<Mutex<Vec<Read>>>,
}

impl<C> Recorder<C> {
    pub fn new(inner: C) -> Self {
        Self {
            inner,
            reads: Arc::default(),
        }
    }

    pub fn take(&self) -> Vec<Read> {
        std::mem::take(&mut self.reads.lock().expect("no test panics while it records"))
    }
}

impl<C: CacheBackend> CacheBackend for Recorder<C> {
    fn begin(&mut self, step: &Step) -> Result<(), CacheError> {
        self.inner.begin(step)
    }

    fn keys_values(&mut self, layer: LayerIndex, span: Span<'_>) -> Result<KeysValues, CacheError> {
        let answer = self.inner.keys_values(layer, span)?;
        let [_, heads, width, slots] = answer.keys().dims();
        let keys = bits(
            &answer
                .keys()
                .clone()
                .slice_dim(0, 0..1)
                .permute([0, 3, 1, 2]),
        );
        let values = bits(
            &answer
                .values()
                .clone()
                .slice_dim(0, 0..1)
                .permute([0, 2, 1, 3]),
        );
        let row = |all: &[u32], slot: usize| all[slot * heads * width..][..heads * width].to_vec();
        let positions = answer.positions().slots(0, 0);
        let mut read: Read = (0..slots)
            .filter(|&slot| positions[slot] != Positions::EMPTY)
            .map(|slot| (positions[slot], row(&keys, slot), row(&values, slot)))
            .collect();
        read.sort();
        self.reads
            .lock()
            .expect("no test panics while it records")
            .push(read);
        Ok(answer)
    }

    fn commit(&mut self) -> Result<(), CacheError> {
        self.inner.commit()
    }

    fn position(&self, row: usize) -> usize {
        self.inner.position(row)
    }

    fn kept(&self, layer: LayerIndex) -> Kept {
        self.inner.kept(layer)
    }

    fn memory(&self) -> MemoryReport {
        self.inner.memory()
    }

    fn truncate(&mut self, to: usize) -> Result<(), CacheError> {
        self.inner.truncate(to)
    }

    fn clear(&mut self) {
        self.inner.clear();
    }

    fn fork(&self) -> Box<dyn CacheBackend> {
        self.inner.fork()
    }
}
