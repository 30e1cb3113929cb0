//! Decoders, plans and throughputs for `ResidualCheckpoint`.

use kv_direct::{model::Decoder, planner::Throughput, residual::Retain};
use proptest::prelude::*;

use crate::support::models::{config, gemma, qwen2, qwen3, random_decoder};

/// Five layers of every family. Gemma's have a sliding window in the first and the third.
pub fn decoders() -> Vec<Decoder> {
    let mut all = vec![config(4, 2), config(4, 4), qwen2(), qwen3(), gemma()];
    for config in &mut all {
        let layer = config.layers[0].clone();
        config.layers.resize(5, layer);
        config.max_positions = 8_192;
    }
    let gemma = all.last_mut().expect("five of them");
    let full = gemma.layers.iter().position(|layer| layer.window.is_none());
    let full = gemma.layers[full.expect("a full-attention layer")].clone();
    for layer in [1, 3, 4] {
        gemma.layers[layer] = full.clone();
    }
    all.iter().map(random_decoder).collect()
}

pub fn retain() -> impl Strategy<Value = Retain> {
    prop_oneof![
        Just(Retain::KeysValues),
        Just(Retain::Residual),
        Just(Retain::Nothing)
    ]
}

pub fn throughput() -> Throughput {
    let text = "read 9e9; 16 tokens: projection 3e10, block 4e10, attention 1e10; \
        64 tokens: projection 5e10, block 6e10, attention 2e10";
    text.parse().expect("throughputs of two chunks")
}
