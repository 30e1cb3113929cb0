//! Any plan gives the bits of `FullKv`, and holds what it says.

use crate::support::CacheExt as _;
use std::ops::ControlFlow;

use kv_direct::{
    cache::{CacheBackend, CacheError, State},
    model::{Decoder, DecoderConfig},
    policy::FullKv,
    residual::{Plan, ResidualCheckpoint, ResidualConfig, ResumeProgress, Retain},
};
use proptest::{
    prelude::*,
    test_runner::{Config, TestRunner},
};

use crate::{
    families::{config, gemma, qwen2, qwen3},
    support::{feed, options, random, tokens},
};

/// Five layers of every family; Gemma's with a window first and one in the middle.
pub fn decoders() -> Vec<Decoder> {
    let mut all = vec![config(4, 2), config(4, 4), qwen2(), qwen3(), gemma()];
    for config in &mut all {
        let layer = config.layers[0].clone();
        config.layers.resize(5, layer);
        config.max_positions = 8_192;
    }
    let gemma = all.last_mut().expect("five of them");
    let full = gemma.layers.iter().position(|layer| layer.window.is_none());
    let full = gemma.layers[full.expect("a layer that shows all keys")].clone();
    for layer in [1, 3, 4] {
        gemma.layers[layer] = full.clone();
    }
    all.iter().map(random).collect()
}

pub fn old() -> impl Strategy<Value = Retain> {
    prop_oneof![
        Just(Retain::KeysValues),
        Just(Retain::Residual),
        Just(Retain::Nothing)
    ]
}

/// What is done to a cache.
#[derive(Debug, Clone)]
enum Act {
    Feed(usize),
    Truncate(f64),
    Park,
    /// Comes back, or does not for it is broken off before this layer.
    Resume(usize),
    Reload,
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        5 => prop_oneof![Just(1), 2_usize..30, 60_usize..140].prop_map(Act::Feed),
        1 => (0.0..1.0).prop_map(Act::Truncate),
        1 => Just(Act::Park),
        1 => (0_usize..9).prop_map(Act::Resume),
        1 => Just(Act::Reload),
    ]
}

fn cache(decoder: &Decoder, plan: &Plan, hot: usize) -> ResidualCheckpoint {
    let config = ResidualConfig::new(plan.clone().with_hot(hot)).even_if_larger();
    ResidualCheckpoint::new(&decoder.shape(), decoder.conformance(), config)
        .expect("the probe passed")
}

#[test]
fn any_plan_gives_the_bits_of_full_kv() {
    let decoders = decoders();
    let strategy = (
        0..decoders.len(),
        prop::collection::vec(old(), 5),
        prop_oneof![Just(0_usize), 1_usize..40],
        prop::collection::vec(act(), 2..8),
        any::<u64>(),
    );
    let mut runner = TestRunner::new(Config {
        cases: 96,
        failure_persistence: None,
        ..Config::default()
    });
    let result = runner.run(&strategy, |(model, mut layers, hot, acts, seed)| {
        let decoder = &decoders[model];
        let shape = decoder.shape();
        for (old, window) in layers.iter_mut().zip(&shape.windows) {
            if window.is_some() && *old == Retain::KeysValues {
                *old = Retain::Nothing;
            }
        }
        let plan = Plan::new(&shape, layers).expect("a plan for these layers");
        let mut found = cache(decoder, &plan, hot);
        let mut text: Vec<u32> = Vec::new();
        for (index, act) in acts.into_iter().enumerate() {
            match act {
                Act::Feed(count) => {
                    let ids = tokens(seed.wrapping_add(index as u64), count);
                    let mut full = FullKv::new(&shape);
                    if !text.is_empty() {
                        feed(decoder, &mut full, &text[..]);
                    }
                    let expected = feed(decoder, &mut full, &ids[..]);
                    let found = feed(decoder, &mut found, &ids[..]);
                    prop_assert!(found == expected, "{plan}, {hot} rows, act {index}");
                    text.extend(ids);
                }
                Act::Truncate(share) => {
                    text.truncate((text.len() as f64 * share) as usize);
                    found
                        .truncate_all(text.len())
                        .expect("every length can be reached");
                }
                Act::Park => {
                    found.park().expect("it rebuilds");
                    let rows = (0..5).filter(|&layer| plan.retain(layer) == Retain::KeysValues);
                    let rows = rows.count() * 2 * shape.kv_width() * 4 * text.len();
                    prop_assert_eq!(found.memory().keys_values, rows);
                }
                Act::Resume(stop) => {
                    let (parked, before) = (found.is_parked(), found.memory().total());
                    let progress = |resuming: ResumeProgress| match resuming.done == stop {
                        true => ControlFlow::Break(()),
                        false => ControlFlow::Continue(()),
                    };
                    let done = found.resume(|layer| decoder.at(layer), progress);
                    let broken = done.expect("a decoder that is there").is_break();
                    prop_assert_eq!(broken, parked && stop <= 5);
                    prop_assert_eq!(found.is_parked(), broken);
                    prop_assert!(!broken || found.memory().total() == before);
                }
                Act::Reload => {
                    let state = found.state().expect("no draft, no step");
                    found = cache(decoder, &plan, hot);
                    found.set_state(&state).expect("its own state");
                }
            }
            let residuals = (0..5).filter(|&layer| plan.retain(layer) == Retain::Residual);
            let memory = found.memory();
            prop_assert_eq!(
                memory.residuals,
                residuals.count() * shape.hidden * 4 * text.len()
            );
            let ids = if plan.keeps_ids() { 4 * text.len() } else { 0 };
            prop_assert_eq!(memory.tokens, ids);
        }
        Ok(())
    });
    if let Err(error) = result {
        panic!("{error}");
    }
}

#[test]
fn a_state_without_the_rows_a_plan_keeps_is_refused() {
    let decoder = decoders().swap_remove(0);
    let shape = decoder.shape();
    let plan = Plan::keep_top(&shape, 2).expect("five layers");
    let mut cache = cache(&decoder, &plan, 3);
    feed(&decoder, &mut cache, &tokens(1, 20)[..]);
    let whole = cache.state().expect("no draft, no step");
    let mut state = State::new(whole.backend(), options(&whole), &shape);
    for (name, entry) in whole.entries() {
        if !name.starts_with("layer.4.") {
            state.insert(name, entry.clone());
        }
    }
    let refused = cache.set_state(&state);
    assert!(
        matches!(&refused, Err(CacheError::State { entry, .. }) if entry == "layer.4.slots"),
        "{refused:?}"
    );
    assert_eq!(cache.length(0), 20);
}

/// What a token costs that is no longer hot is what the plan says, to the byte.
#[test]
fn an_old_token_costs_what_the_plan_says() {
    let decoder = decoders().swap_remove(1);
    let shape = decoder.shape();
    let mixed = [
        Retain::KeysValues,
        Retain::Residual,
        Retain::Nothing,
        Retain::KeysValues,
        Retain::Nothing,
    ];
    for plan in [
        Plan::tokens(&shape),
        Plan::residuals(&shape),
        Plan::keep_top(&shape, 2).expect("five layers"),
        Plan::residual_at(&shape, 3).expect("five layers"),
        Plan::new(&shape, mixed.to_vec()).expect("five layers"),
    ] {
        let held = [100, 300].map(|length| {
            let mut cache = cache(&decoder, &plan, 10);
            feed(&decoder, &mut cache, &tokens(1, length)[..]);
            let memory = cache.memory();
            memory.keys_values + memory.residuals + memory.tokens
        });
        let expected = 200 * plan.bytes_per_old_token(&shape);
        assert_eq!(held[1] - held[0], expected, "{plan}");
    }
}

#[test]
fn a_plan_of_residuals_that_saves_nothing_is_refused_by_both_figures() {
    let decoder = random(&DecoderConfig::new(97, 64, 3, 4, 2));
    let shape = decoder.shape();
    let residual_first = Plan::residual_at(&shape, 2).expect("three layers");
    let config = |plan: Plan| ResidualConfig::new(plan.with_hot(4));
    let refused = ResidualCheckpoint::new(&shape, decoder.conformance(), config(residual_first));
    // Two layers of keys and values and a residual that is as wide as those of the third.
    let bytes = 3 * 2 * 32 * 4;
    assert!(
        matches!(
            refused,
            Err(CacheError::Larger { residuals, keys_values }) if residuals == bytes && keys_values == bytes
        ),
        "{refused:?}"
    );
    let other = Plan::tokens(&random(&DecoderConfig::new(97, 64, 2, 4, 2)).shape());
    let refused = ResidualCheckpoint::new(&shape, decoder.conformance(), config(other));
    assert!(
        matches!(
            refused,
            Err(CacheError::PlanLayers {
                expected: 3,
                found: 2
            })
        ),
        "{refused:?}"
    );
}
