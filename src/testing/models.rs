//! Small random decoders that have all that sets the families apart, and texts for them.

use std::{convert::Infallible, num::NonZeroUsize};

use burn::tensor::Device;

use crate::model::{Activation, Decoder, DecoderConfig};

pub(super) const VOCAB: u32 = 61;
/// Positions of all models.
pub(super) const POSITIONS: usize = 1024;

/// A decoder, and what to call it.
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

fn model(family: usize, kv_heads: usize, device: &Device) -> Model {
    let mut config = DecoderConfig::new(VOCAB as usize, 32, 3, 4, kv_heads);
    (config.intermediate, config.max_positions) = (48, POSITIONS);
    let name = match family {
        0 => "plain",
        1 => {
            config.qkv_bias = true;
            "with biases"
        }
        2 => {
            (config.qk_norm, config.head_dim) = (true, 12);
            "with normed, wide heads"
        }
        _ => {
            windowed(&mut config);
            "with windows of 12"
        }
    };
    let decoder = Decoder::from_weights(config.clone(), device, |name, shape| {
        Ok::<_, Infallible>(weight(&config, name, shape))
    });
    Model {
        name: format!("the model {name} and {kv_heads} KV heads"),
        decoder: decoder.expect("the configuration fits and weights are in shape"),
        device: device.clone(),
    }
}

/// All that Gemma has: a layer that shows all keys between two with a window.
fn windowed(config: &mut DecoderConfig) {
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

/// Seeded by its name, and large enough for attention to prefer some rows over others.
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

/// Numbers in -1 .. 1: xorshift64, its seed spread over all bits.
fn random(seed: u64) -> impl Iterator<Item = f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).max(1);
    std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    })
}

/// One call: tokens for every batch row, and whether more of the prompt follows.
#[derive(Debug, Clone)]
pub(super) struct Call {
    pub(super) rows: Vec<Vec<u32>>,
    pub(super) more_follows: bool,
}

impl Call {
    /// The tokens of one batch row alone.
    pub(super) fn row(&self, row: usize) -> Self {
        Self {
            rows: vec![self.rows[row].clone()],
            ..*self
        }
    }

    /// Tokens of every row.
    pub(super) fn lengths(&self) -> Vec<usize> {
        self.rows.iter().map(Vec::len).collect()
    }
}

/// A random text: `lengths[call][row]` tokens a call; behind each of the first `open` calls more of
/// the prompt follows.
pub(super) fn text<const ROWS: usize>(
    seed: u64,
    open: usize,
    lengths: &[[usize; ROWS]],
) -> Vec<Call> {
    let mut rows: Vec<_> = (0..ROWS as u64)
        .map(|row| random(seed * 64 + row + 1))
        .collect();
    let mut token = |row: usize| {
        let unit = rows[row].next().unwrap_or(0.0) + 1.0;
        (unit / 2.0 * VOCAB as f32) as u32 % VOCAB
    };
    let calls = lengths.iter().enumerate().map(|(call, lengths)| Call {
        rows: (0..ROWS)
            .map(|row| (0..lengths[row]).map(|_| token(row)).collect())
            .collect(),
        more_follows: call < open,
    });
    calls.collect()
}

/// A prompt beyond the tight budget and the windows, single tokens, and chunks.
pub(super) fn mixed(seed: u64) -> Vec<Call> {
    text(seed, 0, &[[13], [1], [1], [5], [1], [14], [1]])
}

/// A prompt in three calls, then single tokens and a chunk.
pub(super) fn chunked(seed: u64) -> Vec<Call> {
    text(seed, 2, &[[6], [5], [7], [1], [1], [3], [1]])
}

/// Rows of different lengths, some silent for a call or late.
pub(super) fn ragged(seed: u64) -> Vec<Call> {
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
