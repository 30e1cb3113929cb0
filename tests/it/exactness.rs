//! The promise: bits of `FullKv`, at every budget, for every split of the tokens into calls.

use crate::support::CacheExt as _;
use kv_direct::{
    cache::CacheBackend,
    model::{Decoder, DecoderConfig, Input},
    policy::FullKv,
};
use proptest::prelude::*;

use crate::{
    families::{config, gemma, qwen2, qwen3},
    recorder::{Read, Recorder},
    support::{PlanKind, bits, feed, random, residual, tiny, tokens},
};

/// Widths on both sides of a piece of 512 in every linear layer, two layers.
fn wide(kv_heads: usize) -> DecoderConfig {
    let mut config = DecoderConfig::new(97, 520, 2, 4, kv_heads);
    config.head_dim = 136;
    config.intermediate = 1100;
    config.query_scale = 0.08;
    config
}

/// All that sets the four families apart: small, and of [`wide`] sizes.
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

struct Models(Vec<Decoder>);

impl Models {
    fn new(configs: &[DecoderConfig]) -> Self {
        Self(configs.iter().map(random).collect())
    }
}

/// Positions and bits of all that was read, row after row.
fn read_bits(read: &Read) -> (Vec<usize>, Vec<u32>) {
    let rows = read.iter().flatten().flatten();
    let positions = rows.clone().map(|(position, ..)| *position).collect();
    let values = rows.flat_map(|(_, key, value)| key.iter().chain(value));
    (positions, values.map(|value| value.to_bits()).collect())
}

/// Feeds `calls` to both caches; every logit, and every key and value attention read, must agree.
fn same_bits(
    decoder: &Decoder,
    ours: impl CacheBackend,
    calls: &[Vec<u32>],
) -> Result<(), TestCaseError> {
    let (mut ours, mut oracle) = (
        Recorder::new(ours, true),
        Recorder::new(FullKv::new(&decoder.shape()), true),
    );
    for (call, tokens) in calls.iter().enumerate() {
        let expected = feed(decoder, &mut oracle, &tokens[..]);
        let found = feed(decoder, &mut ours, &tokens[..]);
        prop_assert_eq!(expected.len(), found.len());
        let differing = expected.iter().zip(&found).filter(|(a, b)| a != b).count();
        prop_assert_eq!(differing, 0, "logits of call {}", call);
        let (expected, found) = (oracle.take(), ours.take());
        prop_assert_eq!(
            (expected.len(), found.len()),
            (decoder.shape().layers(), decoder.shape().layers())
        );
        for (layer, (expected, found)) in expected.into_iter().zip(found).enumerate() {
            prop_assert!(
                read_bits(&expected) == read_bits(&found),
                "keys and values of call {}, layer {}",
                call,
                layer
            );
        }
    }
    Ok(())
}

#[test]
fn residual_checkpoint_equals_full_kv_in_bits_for_every_split_budget_and_floor() {
    let models = Models::new(&families());
    let strategy = (
        0..models.0.len(),
        prop_oneof![0usize..=4, 0usize..=96],
        prop_oneof![Just(PlanKind::Tokens), Just(PlanKind::Residuals)],
        prop::collection::vec(1usize..=40, 1..16),
        any::<u64>(),
    );
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        cases: 48,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    runner
        .run(&strategy, |(model, hot, floor, lengths, seed)| {
            let decoder = &models.0[model];
            let mut left = tokens(seed, 96);
            let mut calls: Vec<Vec<u32>> = Vec::new();
            for length in lengths {
                let rest = left.split_off(length.min(left.len()));
                calls.extend((!left.is_empty()).then_some(left));
                left = rest;
            }
            same_bits(decoder, residual(decoder, hot, floor), &calls)
        })
        .unwrap_or_else(|failure| panic!("{failure}"));
}

/// Feeds and truncations in turn, so short that stores fall short of rows and fill up again. Where a
/// window has let go of rows `FullKv` refuses; the oracle is then a new one, fed with what is left.
#[test]
fn residual_checkpoint_equals_full_kv_in_bits_whatever_is_taken_back() {
    let models = Models::new(&families()[..7]);
    let strategy = (
        0..models.0.len(),
        0usize..=12,
        prop_oneof![Just(PlanKind::Tokens), Just(PlanKind::Residuals)],
        prop::collection::vec((1usize..=9, 0usize..=14), 2..12),
        any::<u64>(),
    );
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        cases: 192,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    runner
        .run(&strategy, |(model, hot, floor, turns, seed)| {
            let decoder = &models.0[model];
            let mut full = FullKv::new(&decoder.shape());
            let mut ours = residual(decoder, hot, floor);
            let mut history = Vec::new();
            for (turn, (length, back)) in turns.into_iter().enumerate() {
                let call = tokens(seed.wrapping_add(turn as u64), length);
                history.extend_from_slice(&call);
                let expected = feed(decoder, &mut full, &call[..]);
                let found = feed(decoder, &mut ours, &call[..]);
                prop_assert!(found == expected, "turn {}", turn);
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
        })
        .unwrap_or_else(|failure| panic!("{failure}"));
}

#[test]
fn bits_hold_across_the_edge_of_a_piece_of_512_keys() {
    let decoder = tiny(2);
    let ids = tokens(3, 560);
    let mut calls: Vec<Vec<u32>> = vec![ids[..500].to_vec()];
    calls.extend(ids[500..530].chunks(1).map(<[u32]>::to_vec));
    calls.push(ids[530..].to_vec());
    for floor in [PlanKind::Tokens, PlanKind::Residuals] {
        for hot in [0, 64, 511, 513] {
            same_bits(&decoder, residual(&decoder, hot, floor), &calls).expect("the same bits");
        }
    }
}

#[test]
fn full_kv_does_not_depend_on_how_tokens_are_split_into_calls() {
    let decoder = random(&wide(2));
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
            "calls of {size}"
        );
    }
}

#[test]
fn the_last_logits_are_the_last_row_of_all_logits() {
    let decoder = tiny(2);
    let ids = tokens(5, 20);
    let all = feed(&decoder, &mut FullKv::new(&decoder.shape()), &ids[..]);
    let last = decoder.forward(
        Input::from(&ids[..]).last_only(),
        &mut FullKv::new(&decoder.shape()),
    );
    assert_eq!(bits(&last.expect("a good call")), all[19 * 97..]);
}

/// Three rows of different lengths, one of them silent for a call.
#[test]
fn a_row_of_a_ragged_batch_never_depends_on_its_neighbours() {
    for decoder in [tiny(2), random(&gemma())] {
        rows_are_what_they_are_alone(&decoder);
    }
}

fn rows_are_what_they_are_alone(decoder: &Decoder) {
    let calls = [[7, 1, 40], [1, 0, 1], [0, 30, 1], [3, 3, 3]];
    let rows: Vec<Vec<u32>> = (0..3).map(|row| tokens(row, 64)).collect();
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
        for call in calls {
            let batch: Vec<Vec<u32>> = (0..3)
                .map(|r| rows[r][at[r]..at[r] + call[r]].to_vec())
                .collect();
            let longest = batch.iter().map(Vec::len).max().unwrap_or(0);
            let logits = feed(decoder, &mut together, batch.clone());
            for row in (0..3).filter(|&row| call[row] > 0) {
                let expected = feed(decoder, &mut alone[row], &batch[row][..]);
                let found = &logits[row * longest * 97..][..call[row] * 97];
                assert!(expected == found, "{together:?}: row {row} of {call:?}");
            }
            (0..3).for_each(|row| at[row] += call[row]);
        }
    }
}
