//! Random weights and tokens, and a decoder fed with them.

use std::convert::Infallible;

use burn::tensor::Device;
use kv_direct::{
    cache::TokenIds,
    model::{Decoder, DecoderConfig},
    policy::FullKv,
};

use crate::reference::Weights;

pub const VOCAB: usize = 97;

/// Numbers in -1 .. 1: xorshift64, its seed spread over all bits lest small ones start alike.
pub fn random(seed: u64) -> impl Iterator<Item = f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).max(1);
    std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    })
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

/// Logits of each batch row, its pads left out, fed through one `FullKv` in these calls.
pub fn fed(decoder: &Decoder, calls: &[TokenIds]) -> Vec<Vec<f32>> {
    let mut cache = FullKv::new(&decoder.shape());
    let mut rows = vec![Vec::new(); calls[0].sequences()];
    for call in calls {
        let logits = decoder.forward(call.clone(), &mut cache);
        let logits = logits.expect("the step is accepted");
        assert_eq!(logits.dims(), [rows.len(), call.longest(), VOCAB]);
        let logits: Vec<f32> = logits.into_data().try_to_vec().expect("logits are f32");
        let batch = logits.chunks_exact(call.longest() * VOCAB);
        for ((row, logits), count) in rows.iter_mut().zip(batch).zip(call.lengths()) {
            row.extend_from_slice(&logits[..count * VOCAB]);
        }
    }
    rows
}

pub fn whole(decoder: &Decoder, tokens: &[u32]) -> Vec<f32> {
    fed(decoder, &[tokens.into()]).swap_remove(0)
}

/// The largest difference; not a number if any is not.
pub fn apart(ours: &[f32], theirs: impl IntoIterator<Item = f64>) -> f64 {
    let theirs: Vec<f64> = theirs.into_iter().collect();
    assert_eq!(ours.len(), theirs.len(), "as many logits");
    let differences = ours
        .iter()
        .zip(theirs)
        .map(|(a, b)| (f64::from(*a) - b).abs());
    differences.fold(
        0.0,
        |worst, d| if d > worst || d.is_nan() { d } else { worst },
    )
}
