//! The decoder against the f64 reference, family by family, on random weights.

use std::num::NonZeroUsize;

use kv_direct::{
    cache::TokenIds,
    model::{DecoderConfig, RopeScaling},
};

use crate::support::{
    feed::{apart, fed, whole},
    models::{LENGTH, LLAMA3, TOLERANCE, YARN, config, gemma, qwen2, qwen3, scaled},
    random::{VOCAB, decoder, tokens, weights},
    reference::Reference,
};

/// Compares with the reference, whole and in uneven chunks.
#[track_caller]
fn assert_agrees(config: &DecoderConfig) {
    let (weights, tokens) = (weights(config), tokens(1, LENGTH));
    let expected = Reference::new(config, &weights).logits(&tokens);
    let decoder = decoder(config, &weights);
    for lengths in [&[LENGTH][..], &[1, 7, 2, 19, 11]] {
        let mut rest = &tokens[..];
        let steps = lengths
            .iter()
            .map(|&length| rest.split_off(..length).expect("the lengths add up").into());
        let steps: Vec<TokenIds> = steps.collect();
        let delta = apart(
            &fed(&decoder, &steps)[0],
            expected.iter().flatten().copied(),
        );
        assert!(
            delta <= TOLERANCE,
            "in chunks of {lengths:?} logits are {delta:e} off"
        );
    }
}

#[test]
fn llama_equals_the_formulas_with_its_own_and_a_tied_head() {
    for tied in [false, true] {
        let mut config = config(4, 2);
        config.tied_head = tied;
        assert_agrees(&config);
    }
}

#[test]
fn a_query_head_reads_the_kv_head_of_its_group() {
    for kv_heads in [4, 1] {
        assert_agrees(&config(4, kv_heads));
    }
}

#[test]
fn qwen2_adds_biases_to_queries_keys_and_values() {
    assert_agrees(&qwen2());
}

#[test]
fn qwen3_norms_each_head_before_rotation() {
    assert_agrees(&qwen3());
}

#[test]
fn gemma_alternates_sliding_and_full_attention_layers() {
    assert_agrees(&gemma());
}

#[test]
fn a_window_counts_the_query_itself() {
    for window in [1, 2, LENGTH - 1] {
        let mut config = config(4, 2);
        config.layers[1].window = NonZeroUsize::new(window);
        assert_agrees(&config);
    }
}

#[test]
fn llama3_scaling_equals_the_formulas() {
    assert_agrees(&scaled(LLAMA3));
}

#[test]
fn yarn_scaling_equals_the_formulas_at_every_ramp() {
    assert_agrees(&scaled(YARN));
    // Both ends at pair 0; the upper end beyond the pairs; the upper end beyond the head, where it is
    // clamped.
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
fn output_and_feed_forward_biases_are_added() {
    let mut config = config(4, 2);
    (config.output_bias, config.mlp_bias) = (true, true);
    assert_agrees(&config);
}

#[test]
fn a_sequence_of_a_ragged_batch_has_the_bits_it_has_alone() {
    let bits = |logits: &[f32]| logits.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let sequences: Vec<_> = [(4, 5), (5, 1), (6, 9)]
        .map(|(seed, n)| tokens(seed, n))
        .into();
    for config in [config(4, 2), gemma()] {
        let decoder = decoder(&config, &weights(&config));
        // In the second step one sequence is empty, or two are; or one is empty in the first.
        for first in [[3, 1, 4], [5, 1, 2], [2, 0, 9]] {
            let cut = |from: bool| -> TokenIds {
                let halves = sequences
                    .iter()
                    .zip(first)
                    .map(|(sequence, at)| sequence.split_at(at));
                halves
                    .map(|(a, b)| if from { b } else { a }.to_vec())
                    .collect()
            };
            let together = fed(&decoder, &[cut(false), cut(true)]);
            for (sequence, together) in sequences.iter().zip(&together) {
                let alone = whole(&decoder, sequence);
                assert_eq!(alone.len(), sequence.len() * VOCAB);
                assert!(
                    bits(together) == bits(&alone),
                    "first {first:?} of each sequence, then the rest: a sequence of {} differs",
                    sequence.len()
                );
            }
        }
    }
}
