//! Tiny random models: one size of every family.

use std::num::NonZeroUsize;

use kv_direct::model::{Activation, Decoder, DecoderConfig, RopeScaling};

use crate::support::random::{VOCAB, decoder, weights};

/// A decoder with pseudo-random weights.
pub fn random_decoder(config: &DecoderConfig) -> Decoder {
    decoder(config, &weights(config))
}

/// Three layers, 97 tokens, heads of 16.
pub fn tiny(kv_heads: usize) -> Decoder {
    random_decoder(&DecoderConfig::new(VOCAB, 64, 3, 4, kv_heads))
}

/// f32 against f64: rounding alone moves these logits by up to 3e-5, a mistake by 1e-3 and more.
pub const TOLERANCE: f64 = 1e-4;

/// Logits that differ by this much have changed: well above [`TOLERANCE`].
pub const CHANGED: f64 = 1e-3;

pub const LENGTH: usize = 40;

pub const LLAMA3: RopeScaling = RopeScaling::Llama3 {
    factor: 8.0,
    low: 1.0,
    high: 4.0,
    original: 64.0,
};

pub const YARN: RopeScaling = RopeScaling::Yarn {
    factor: 4.0,
    fast: 4.0,
    slow: 1.0,
    original: 64.0,
    attention: 1.14,
};

pub fn config(heads: usize, kv_heads: usize) -> DecoderConfig {
    let mut config = DecoderConfig::new(VOCAB, 64, 3, heads, kv_heads);
    config.intermediate = 96;
    config
}

/// All layers rotate with this scaling.
pub fn scaled(scaling: RopeScaling) -> DecoderConfig {
    let mut config = config(4, 2);
    for layer in &mut config.layers {
        layer.rope.scaling = scaling;
    }
    config
}

/// Biases on queries, keys and values.
pub fn qwen2() -> DecoderConfig {
    let mut config = config(4, 2);
    config.qkv_bias = true;
    config
}

/// Normed heads, wider than `hidden / heads`.
pub fn qwen3() -> DecoderConfig {
    let mut config = config(4, 2);
    config.qk_norm = true;
    config.head_dim = 24;
    config.query_scale = 1.0 / 24f64.sqrt();
    config
}

/// A full-attention layer between two with a window of 12, and all else that Gemma 2 and 3 have.
pub fn gemma() -> DecoderConfig {
    let mut config = config(4, 2);
    config.head_dim = 24;
    config.query_scale = 0.25;
    config.embedding_scale = Some(8.0);
    config.attention_softcap = Some(2.0);
    config.final_softcap = Some(3.0);
    config.activation = Activation::GeluTanh;
    (config.norm_plus_one, config.post_norms) = (true, true);
    (config.qk_norm, config.tied_head) = (true, true);
    for layer in [0, 2] {
        config.layers[layer].window = NonZeroUsize::new(12);
        config.layers[layer].rope.theta = 100.0;
    }
    config.layers[1].rope.scaling = RopeScaling::Linear { factor: 8.0 };
    config
}

/// The scaling of Llama 3, of models trained on 8,192 positions.
pub const fn llama3(factor: f64) -> RopeScaling {
    RopeScaling::Llama3 {
        factor,
        low: 1.0,
        high: 4.0,
        original: 8192.0,
    }
}

/// The configuration with this window in some of its layers.
pub fn with_windows(mut config: DecoderConfig, layers: &[usize], window: usize) -> DecoderConfig {
    for &layer in layers {
        config.layers[layer].window = NonZeroUsize::new(window);
    }
    config
}

/// A sliding-window layer with this window, a full-attention layer, and another sliding one.
pub fn sliding(window: usize) -> Decoder {
    random_decoder(&with_windows(
        DecoderConfig::new(VOCAB, 64, 3, 4, 2),
        &[0, 2],
        window,
    ))
}

/// Whether any layer is a sliding-window layer.
pub fn slides(decoder: &Decoder) -> bool {
    decoder.shape().windows.iter().any(Option::is_some)
}
