//! The decoder against the f64 reference, family by family, on random weights.

use std::num::NonZeroUsize;

use kv_direct::{
    cache::TokenIds,
    model::{Activation, DecoderConfig, RopeScaling},
};

use crate::{
    random::{VOCAB, apart, decoder, fed, tokens, weights, whole},
    reference::Reference,
};

/// f32 against f64: rounding alone moves these logits by up to 3e-5, a mistake by 1e-3 and more.
pub const TOLERANCE: f64 = 1e-4;
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

/// A full layer between two with a window of 12, all that Gemma 2 and 3 have.
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

/// Whole and in uneven chunks.
#[track_caller]
fn assert_agrees(config: &DecoderConfig) {
    let (weights, tokens) = (weights(config), tokens(1, LENGTH));
    let expected = Reference::new(config, &weights).logits(&tokens);
    let decoder = decoder(config, &weights);
    for lengths in [&[LENGTH][..], &[1, 7, 2, 19, 11]] {
        let mut rest = &tokens[..];
        let calls = lengths
            .iter()
            .map(|&length| rest.split_off(..length).expect("the lengths add up").into());
        let calls: Vec<TokenIds> = calls.collect();
        let delta = apart(
            &fed(&decoder, &calls)[0],
            expected.iter().flatten().copied(),
        );
        assert!(
            delta <= TOLERANCE,
            "in chunks of {lengths:?} logits are {delta:e} off"
        );
    }
}

#[test]
fn llama_computes_the_formulas_with_a_head_of_its_own_and_with_a_tied_one() {
    for tied in [false, true] {
        let mut config = config(4, 2);
        config.tied_head = tied;
        assert_agrees(&config);
    }
}

#[test]
fn a_query_head_reads_the_kv_head_of_its_group_however_many_share_one() {
    for kv_heads in [4, 1] {
        assert_agrees(&config(4, kv_heads));
    }
}

#[test]
fn qwen2_adds_biases_to_queries_keys_and_values() {
    assert_agrees(&qwen2());
}

#[test]
fn qwen3_norms_each_head_before_rotation_whatever_the_width_of_a_head() {
    assert_agrees(&qwen3());
}

#[test]
fn gemma_alternates_windows_and_full_layers_each_with_its_own_rotation() {
    assert_agrees(&gemma());
}

#[test]
fn a_window_shows_its_own_query_and_no_older_key_than_it_counts() {
    for window in [1, 2, LENGTH - 1] {
        let mut config = config(4, 2);
        config.layers[1].window = NonZeroUsize::new(window);
        assert_agrees(&config);
    }
}

#[test]
fn llama3_scaling_keeps_blends_and_divides() {
    assert_agrees(&scaled(LLAMA3));
}

#[test]
fn yarn_ramps_from_kept_to_divided_pairs_within_a_head_and_even_without_width() {
    assert_agrees(&scaled(YARN));
    // Both ends at pair 0; the upper end beyond the pairs; beyond the head, where it is cut.
    for (fast, slow, original) in [(32.0, 2.0, 8.0), (4.0, 1e-3, 64.0), (4.0, 1e-8, 64.0)] {
        assert_agrees(&scaled(RopeScaling::Yarn {
            factor: 4.0,
            fast,
            slow,
            original,
            attention: 1.14,
        }));
    }
}

#[test]
fn biases_of_the_output_and_the_feed_forward_layer_are_added() {
    let mut config = config(4, 2);
    (config.output_bias, config.mlp_bias) = (true, true);
    assert_agrees(&config);
}

#[test]
fn a_row_of_a_ragged_batch_is_the_bits_it_is_alone() {
    let bits = |logits: &[f32]| logits.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let rows: Vec<_> = [(4, 5), (5, 1), (6, 9)]
        .map(|(seed, n)| tokens(seed, n))
        .into();
    for config in [config(4, 2), gemma()] {
        let decoder = decoder(&config, &weights(&config));
        // In the second call a row is empty, or two; or one is in the first.
        for first in [[3, 1, 4], [5, 1, 2], [2, 0, 9]] {
            let cut = |from: bool| -> TokenIds {
                let halves = rows.iter().zip(first).map(|(row, at)| row.split_at(at));
                halves
                    .map(|(a, b)| if from { b } else { a }.to_vec())
                    .collect()
            };
            let together = fed(&decoder, &[cut(false), cut(true)]);
            for (row, together) in rows.iter().zip(&together) {
                let alone = whole(&decoder, row);
                assert_eq!(alone.len(), row.len() * VOCAB);
                assert!(
                    bits(together) == bits(&alone),
                    "first {first:?} of each row, then the rest: a row of {} differs",
                    row.len()
                );
            }
        }
    }
}
