//! Small random decoders with everything in which model families differ, and texts for them.

use std::{convert::Infallible, num::NonZeroUsize};

use burn::tensor::Device;

use crate::model::{Activation, Decoder, DecoderConfig};

pub(super) const VOCAB: u32 = 61;
/// Positions of all models.
pub(super) const POSITIONS: usize = 1024;

/// A decoder, and its name in panic messages.
pub(super) struct Model {
    pub(super) name: String,
    pub(super) decoder: Decoder,
    pub(super) device: Device,
}

/// One model of each family, with 1, 2 and 4 KV heads among them.
pub(super) fn models(device: &Device) -> Vec<Model> {
    let of = [(0, 1), (1, 2), (2, 4), (3, 2)];
    of.map(|(family, kv_heads)| model(family, kv_heads, device))
        .into()
}

/// All families with 1, 2 and 4 KV heads.
pub(super) fn all_models(device: &Device) -> Vec<Model> {
    let families = 0..4;
    families
        .flat_map(|family| [1, 2, 4].map(|kv_heads| model(family, kv_heads, device)))
        .collect()
}

/// A model with sliding windows that are wider than a panel of slots.
pub(super) fn wide_windows(device: &Device) -> Model {
    built("with sliding windows of 40", 2, device, |config| {
        gemma(config);
        for layer in [0, 2] {
            config.layers[layer].window = NonZeroUsize::new(40);
        }
    })
}

fn model(family: usize, kv_heads: usize, device: &Device) -> Model {
    let (name, change): (_, fn(&mut DecoderConfig)) = match family {
        0 => ("plain", |_| {}),
        1 => ("with biases", |config| config.qkv_bias = true),
        2 => ("with normed, wide heads", |config| {
            (config.qk_norm, config.head_dim) = (true, 12);
        }),
        _ => ("with sliding windows of 12", gemma),
    };
    built(name, kv_heads, device, change)
}

fn built(
    name: &str,
    kv_heads: usize,
    device: &Device,
    change: impl Fn(&mut DecoderConfig),
) -> Model {
    let mut config = DecoderConfig::new(VOCAB as usize, 32, 3, 4, kv_heads);
    (config.intermediate, config.max_positions) = (48, POSITIONS);
    change(&mut config);
    let decoder = Decoder::from_weights(config.clone(), device, |name, shape| {
        Ok::<_, Infallible>(weight(&config, name, shape))
    });
    Model {
        name: format!("the model {name} and {kv_heads} KV heads"),
        decoder: decoder.expect("the configuration fits and weights are in shape"),
        device: device.clone(),
    }
}

/// Everything that Gemma has: a full-attention layer between two sliding-window layers, and the rest.
fn gemma(config: &mut DecoderConfig) {
    (config.head_dim, config.query_scale) = (12, 0.25);
    config.embedding_scale = Some(6.0);
    (config.attention_softcap, config.final_softcap) = (Some(2.0), Some(3.0));
    config.activation = Activation::GeluTanh;
    (config.norm_plus_one, config.post_norms) = (true, true);
    (config.qk_norm, config.tied_head) = (true, true);
    for layer in [0, 2] {
        config.layers[layer].window = NonZeroUsize::new(12);
        config.layers[layer].rope.theta = 100.0;
    }
}

/// A random weight, seeded by its name. It is large enough for attention to prefer some entries over others.
fn weight(config: &DecoderConfig, name: &str, shape: &[usize]) -> Vec<f32> {
    let fnv = |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    let seed = name.bytes().fold(0xcbf2_9ce4_8422_2325, fnv);
    let (centre, spread) = match shape {
        [_, width] => (0.0, 1.5 * (3.0 / *width as f32).sqrt()),
        _ if name.ends_with(".bias") => (0.0, 0.2),
        _ if config.norm_plus_one => (0.0, 0.3),
        _ => (1.0, 0.3),
    };
    let values = random(seed).map(|x| centre + spread * x);
    values.take(shape.iter().product()).collect()
}

/// Random numbers in -1 .. 1: xorshift64, with the seed spread over all bits.
fn random(seed: u64) -> impl Iterator<Item = f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).max(1);
    std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    })
}

/// One step of a text: the tokens of every sequence, and whether more of the prompt follows.
#[derive(Debug, Clone)]
pub(super) struct TextStep {
    pub(super) tokens: Vec<Vec<u32>>,
    pub(super) more_follows: bool,
}

impl TextStep {
    /// The step of one sequence alone.
    pub(super) fn sequence(&self, index: usize) -> Self {
        Self {
            tokens: vec![self.tokens[index].clone()],
            ..*self
        }
    }

    /// The number of tokens of every sequence.
    pub(super) fn lengths(&self) -> Vec<usize> {
        self.tokens.iter().map(Vec::len).collect()
    }
}

/// A random text. Step `i` has `lengths[i][sequence]` tokens. More of the prompt follows each of the first `open`
/// steps.
pub(super) fn text<const SEQUENCES: usize>(
    seed: u64,
    open: usize,
    lengths: &[[usize; SEQUENCES]],
) -> Vec<TextStep> {
    let mut sequences: Vec<_> = (0..SEQUENCES as u64)
        .map(|sequence| random(seed * 64 + sequence + 1))
        .collect();
    let mut token = |sequence: usize| {
        let unit = sequences[sequence].next().unwrap_or(0.0) + 1.0;
        (unit / 2.0 * VOCAB as f32) as u32 % VOCAB
    };
    let steps = lengths.iter().enumerate().map(|(step, lengths)| TextStep {
        tokens: (0..SEQUENCES)
            .map(|sequence| (0..lengths[sequence]).map(|_| token(sequence)).collect())
            .collect(),
        more_follows: step < open,
    });
    steps.collect()
}

/// A prompt beyond the tight budget and the windows, single tokens, and chunks.
pub(super) fn mixed(seed: u64) -> Vec<TextStep> {
    text(seed, 0, &[[13], [1], [1], [5], [1], [14], [1]])
}

/// A prompt in three steps, then single tokens and a chunk.
pub(super) fn chunked(seed: u64) -> Vec<TextStep> {
    text(seed, 2, &[[6], [5], [7], [1], [1], [3], [1]])
}

/// Sequences of different lengths. Some have no tokens in a step, and one begins late.
pub(super) fn ragged(seed: u64) -> Vec<TextStep> {
    text(
        seed,
        0,
        &[
            [7, 1, 15, 0],
            [1, 0, 0, 13],
            [0, 12, 1, 1],
            [3, 3, 3, 3],
            [1, 1, 1, 1],
        ],
    )
}
