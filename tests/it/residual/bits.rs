//! The bits of `FullKv`, for every plan and every split of the tokens into steps.

use kv_direct::{
    cache::CacheBackend,
    model::{Decoder, DecoderConfig, Input},
    policy::FullKv,
};
use proptest::prelude::*;

use crate::support::{
    caches::{CacheExt as _, PlanKind, residual},
    cases::{check, runner},
    feed::{bits, feed},
    models::{config, gemma, qwen2, qwen3, random_decoder, tiny},
    random::tokens,
    recorder::{Read, Recorder},
};

/// Two layers, with widths on both sides of 512 in every linear layer.
fn wide(kv_heads: usize) -> DecoderConfig {
    let mut config = DecoderConfig::new(97, 520, 2, 4, kv_heads);
    config.head_dim = 136;
    config.intermediate = 1100;
    config.query_scale = 0.08;
    config
}

/// Everything that distinguishes the four families, small and of [`wide`] sizes.
fn families() -> Vec<DecoderConfig> {
    let llama = DecoderConfig::new(97, 64, 3, 4, 1);
    let mut last_slides = gemma();
    last_slides.layers.rotate_left(1);
    let mut all = vec![llama, config(4, 2), config(4, 4)];
    all.extend([qwen2(), qwen3(), gemma(), last_slides]);
    let mut large_gemma = gemma();
    (large_gemma.hidden, large_gemma.head_dim) = (520, 136);
    large_gemma.intermediate = 1100;
    all.extend([wide(1), wide(4), large_gemma]);
    all
}

fn decoders(configs: &[DecoderConfig]) -> Vec<Decoder> {
    configs.iter().map(random_decoder).collect()
}

/// Positions and bits of all entries that attention read.
fn read_bits(read: &Read) -> (Vec<usize>, Vec<u32>) {
    let entries = read.iter().flatten().flatten();
    let positions = entries.clone().map(|(position, ..)| *position).collect();
    let values = entries.flat_map(|(_, key, value)| key.iter().chain(value));
    (positions, values.map(|value| value.to_bits()).collect())
}

/// Feeds `steps` to both caches. Every logit, and every key and value that attention read, must be equal.
fn same_bits(
    decoder: &Decoder,
    ours: impl CacheBackend,
    steps: &[Vec<u32>],
) -> Result<(), TestCaseError> {
    let (mut ours, mut oracle) = (
        Recorder::new(ours, true),
        Recorder::new(FullKv::new(&decoder.shape()), true),
    );
    for (step, tokens) in steps.iter().enumerate() {
        let expected = feed(decoder, &mut oracle, &tokens[..]);
        let found = feed(decoder, &mut ours, &tokens[..]);
        prop_assert_eq!(expected.len(), found.len());
        let differing = expected.iter().zip(&found).filter(|(a, b)| a != b).count();
        prop_assert_eq!(differing, 0, "logits of step {}", step);
        let (expected, found) = (oracle.take(), ours.take());
        prop_assert_eq!(
            (expected.len(), found.len()),
            (decoder.shape().layers(), decoder.shape().layers())
        );
        for (layer, (expected, found)) in expected.into_iter().zip(found).enumerate() {
            prop_assert!(
                read_bits(&expected) == read_bits(&found),
                "keys and values of step {}, layer {}",
                step,
                layer
            );
        }
    }
    Ok(())
}

#[test]
fn they_equal_full_kv_for_every_split_and_plan() {
    let decoders = decoders(&families());
    let strategy = (
        0..decoders.len(),
        prop_oneof![0usize..=4, 0usize..=96],
        prop_oneof![Just(PlanKind::Tokens), Just(PlanKind::Residuals)],
        prop::collection::vec(1usize..=40, 1..16),
        any::<u64>(),
    );
    check(
        runner(48),
        &strategy,
        |(model, hot, plan_kind, lengths, seed)| {
            let decoder = &decoders[model];
            let mut left = tokens(seed, 96);
            let mut steps: Vec<Vec<u32>> = Vec::new();
            for length in lengths {
                let rest = left.split_off(length.min(left.len()));
                steps.extend((!left.is_empty()).then_some(left));
                left = rest;
            }
            same_bits(decoder, residual(decoder, hot, plan_kind), &steps)
        },
    );
}

/// Steps and truncations alternate, so short that stores lose hot tokens and fill up again. Where a sliding
/// window has evicted entries, `FullKv` refuses; the oracle is then a new one, fed with what is left.
#[test]
fn they_equal_full_kv_after_any_truncation() {
    let decoders = decoders(&families()[..7]);
    let strategy = (
        0..decoders.len(),
        0usize..=12,
        prop_oneof![Just(PlanKind::Tokens), Just(PlanKind::Residuals)],
        prop::collection::vec((1usize..=9, 0usize..=14), 2..12),
        any::<u64>(),
    );
    check(
        runner(192),
        &strategy,
        |(model, hot, plan_kind, lengths, seed)| {
            let decoder = &decoders[model];
            let mut full = FullKv::new(&decoder.shape());
            let mut ours = residual(decoder, hot, plan_kind);
            let mut history = Vec::new();
            for (index, (length, back)) in lengths.into_iter().enumerate() {
                let step = tokens(seed.wrapping_add(index as u64), length);
                history.extend_from_slice(&step);
                let expected = feed(decoder, &mut full, &step[..]);
                let found = feed(decoder, &mut ours, &step[..]);
                prop_assert!(found == expected, "step {}", index);
                let to = history.len().saturating_sub(back);
                ours.truncate_all(to).expect("every length can be reached");
                if full.truncate_all(to).is_err() {
                    full.clear();
                    feed(decoder, &mut full, &history[..to]);
                }
                history.truncate(to);
                prop_assert_eq!((ours.length(0), full.length(0)), (to, to));
            }
            Ok(())
        },
    );
}

#[test]
fn they_hold_across_the_edge_of_a_block_of_slots() {
    let decoder = tiny(2);
    let ids = tokens(3, 560);
    let mut steps: Vec<Vec<u32>> = vec![ids[..500].to_vec()];
    steps.extend(ids[500..530].chunks(1).map(<[u32]>::to_vec));
    steps.push(ids[530..].to_vec());
    for plan_kind in [PlanKind::Tokens, PlanKind::Residuals] {
        for hot in [0, 64, 511, 513] {
            same_bits(&decoder, residual(&decoder, hot, plan_kind), &steps).expect("the same bits");
        }
    }
}

#[test]
fn full_kv_does_not_depend_on_the_split_into_steps() {
    let decoder = random_decoder(&wide(2));
    let ids = tokens(11, 96);
    let whole = feed(&decoder, &mut FullKv::new(&decoder.shape()), &ids[..]);
    for size in [1, 2, 3, 17, 65] {
        let mut cache = FullKv::new(&decoder.shape());
        let parts: Vec<u32> = ids
            .chunks(size)
            .flat_map(|part| feed(&decoder, &mut cache, part))
            .collect();
        assert_eq!(
            parts.iter().zip(&whole).filter(|(a, b)| a != b).count(),
            0,
            "steps of {size}"
        );
    }
}

#[test]
fn last_only_returns_the_last_of_all_logits() {
    let decoder = tiny(2);
    let ids = tokens(5, 20);
    let all = feed(&decoder, &mut FullKv::new(&decoder.shape()), &ids[..]);
    let last = decoder.forward(
        Input::from(&ids[..]).last_only(),
        &mut FullKv::new(&decoder.shape()),
    );
    assert_eq!(bits(&last.expect("a valid step")), all[19 * 97..]);
}

/// Three sequences of different lengths, one of them idle for a step.
#[test]
fn a_sequence_does_not_depend_on_its_batch() {
    for decoder in [tiny(2), random_decoder(&gemma())] {
        assert_equal_alone(&decoder);
    }
}

fn assert_equal_alone(decoder: &Decoder) {
    let steps = [[7, 1, 40], [1, 0, 1], [0, 30, 1], [3, 3, 3]];
    let texts: Vec<Vec<u32>> = (0..3).map(|sequence| tokens(sequence, 64)).collect();
    let make = || -> Vec<Box<dyn CacheBackend>> {
        vec![
            Box::new(FullKv::new(&decoder.shape())),
            Box::new(residual(decoder, 5, PlanKind::Tokens)),
            Box::new(residual(decoder, 5, PlanKind::Residuals)),
            Box::new(kv_direct::policy::Window::new(&decoder.shape(), 5).expect("a budget")),
        ]
    };
    for (mut together, alone) in make().into_iter().zip(make()) {
        let mut alone: Vec<_> = (0..3).map(|_| alone.fork()).collect();
        let mut at = [0; 3];
        for step in steps {
            let batch: Vec<Vec<u32>> = (0..3)
                .map(|r| texts[r][at[r]..at[r] + step[r]].to_vec())
                .collect();
            let longest = batch.iter().map(Vec::len).max().unwrap_or(0);
            let logits = feed(decoder, &mut together, batch.clone());
            for sequence in (0..3).filter(|&sequence| step[sequence] > 0) {
                let expected = feed(decoder, &mut alone[sequence], &batch[sequence][..]);
                let found = &logits[sequence * longest * 97..][..step[sequence] * 97];
                assert!(
                    expected == found,
                    "{together:?}: sequence {sequence} of {step:?}"
                );
            }
            (0..3).for_each(|sequence| at[sequence] += step[sequence]);
        }
    }
}
