//! Pseudo-random numbers, weights and tokens.

use std::convert::Infallible;

use burn::tensor::Device;
use kv_direct::model::{Decoder, DecoderConfig};

use crate::support::reference::Weights;

pub const VOCAB: usize = 97;

/// xorshift64. The seed is spread over all bits, or small seeds would start alike.
fn words(seed: u64) -> impl Iterator<Item = u64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).max(1);
    std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    })
}

/// Numbers in -1 .. 1, of 24 bits.
pub fn random(seed: u64) -> impl Iterator<Item = f32> {
    words(seed).map(|word| (word >> 40) as f32 / (1 << 23) as f32 - 1.0)
}

/// Numbers in -1 .. 1, of 53 bits. Products of shorter ones are exact in f64, and so are their sums in any
/// order.
pub fn noise(seed: u64) -> impl Iterator<Item = f64> {
    words(seed).map(|word| (word >> 11) as f64 / (1u64 << 52) as f64 - 1.0)
}

/// Random weights, each seeded by its name: a weight is the same in every configuration.
pub fn weights(config: &DecoderConfig) -> Weights {
    let shapes = config.weights().expect("the fields fit one another");
    let fill = |(name, shape): (String, Vec<usize>)| {
        let fnv = |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        let seed = name.bytes().fold(0xcbf2_9ce4_8422_2325, fnv);
        let (centre, spread) = match &shape[..] {
            [_, width] => (0.0, 1.5 * (3.0 / *width as f32).sqrt()),
            _ if name.ends_with(".bias") => (0.0, 0.2),
            _ if config.norm_plus_one => (0.0, 0.3),
            _ => (1.0, 0.3),
        };
        let values = random(seed).map(|x| centre + spread * x);
        (name, values.take(shape.iter().product()).collect())
    };
    shapes.into_iter().map(fill).collect()
}

pub fn decoder(config: &DecoderConfig, weights: &Weights) -> Decoder {
    Decoder::from_weights(config.clone(), &Device::flex(), |name, _| {
        Ok::<_, Infallible>(weights[name].clone())
    })
    .expect("every weight is there and in shape")
}

pub fn tokens(seed: u64, count: usize) -> Vec<u32> {
    let scale = VOCAB as f32 / 2.0;
    let ids = random(seed).map(|x| ((x + 1.0) * scale) as u32 % VOCAB as u32);
    ids.take(count).collect()
}
