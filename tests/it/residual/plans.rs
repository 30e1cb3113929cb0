//! Any plan gives the bits of `FullKv`, and holds what it says.

use std::ops::ControlFlow;

use kv_direct::{
    cache::{CacheBackend, CacheError, ResumeProgress, State},
    model::Decoder,
    policy::FullKv,
    residual::{Plan, ResidualCheckpoint, ResidualConfig, Retain},
};
use proptest::prelude::*;

use crate::support::{
    caches::{CacheExt as _, checkpoint, options},
    cases::{check, runner},
    feed::feed,
    plans::{decoders, retain},
    random::tokens,
};

/// A call on a cache.
#[derive(Debug, Clone)]
enum Call {
    Feed(usize),
    Truncate(f64),
    Park,
    /// Resumes, or stops before this layer.
    Resume(usize),
    Reload,
}

fn call() -> impl Strategy<Value = Call> {
    prop_oneof![
        5 => prop_oneof![Just(1), 2_usize..30, 60_usize..140].prop_map(Call::Feed),
        1 => (0.0..1.0).prop_map(Call::Truncate),
        1 => Just(Call::Park),
        1 => (0_usize..9).prop_map(Call::Resume),
        1 => Just(Call::Reload),
    ]
}

fn cache(decoder: &Decoder, plan: &Plan, hot: usize) -> ResidualCheckpoint {
    let config = ResidualConfig::new(plan.clone().with_hot(hot)).even_if_larger();
    checkpoint(decoder, config)
}

#[test]
fn any_plan_gives_the_bits_of_full_kv() {
    let decoders = decoders();
    let strategy = (
        0..decoders.len(),
        prop::collection::vec(retain(), 5),
        prop_oneof![Just(0_usize), 1_usize..40],
        prop::collection::vec(call(), 2..8),
        any::<u64>(),
    );
    check(
        runner(96),
        &strategy,
        |(model, mut layers, hot, calls, seed)| {
            let decoder = &decoders[model];
            let shape = decoder.shape();
            for (retain, window) in layers.iter_mut().zip(&shape.windows) {
                if window.is_some() && *retain == Retain::KeysValues {
                    *retain = Retain::Nothing;
                }
            }
            let plan = Plan::new(&shape, layers).expect("a plan for these layers");
            let mut found = cache(decoder, &plan, hot);
            let mut text: Vec<u32> = Vec::new();
            for (index, call) in calls.into_iter().enumerate() {
                match call {
                    Call::Feed(count) => {
                        let ids = tokens(seed.wrapping_add(index as u64), count);
                        let mut full = FullKv::new(&shape);
                        if !text.is_empty() {
                            feed(decoder, &mut full, &text[..]);
                        }
                        let expected = feed(decoder, &mut full, &ids[..]);
                        let found = feed(decoder, &mut found, &ids[..]);
                        prop_assert!(found == expected, "{plan}, {hot} hot tokens, call {index}");
                        text.extend(ids);
                    }
                    Call::Truncate(share) => {
                        text.truncate((text.len() as f64 * share) as usize);
                        found
                            .truncate_all(text.len())
                            .expect("every length can be reached");
                    }
                    Call::Park => {
                        found.park().expect("it can rebuild");
                        let stored =
                            (0..5).filter(|&layer| plan.retain(layer) == Retain::KeysValues);
                        let stored = stored.count()
                            * 2
                            * (shape.kernels.kv_heads * shape.kernels.head_dim)
                            * 4
                            * text.len();
                        prop_assert_eq!(found.memory().keys_values, stored);
                    }
                    Call::Resume(stop) => {
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
                    Call::Reload => {
                        let state = found.state().expect("no open draft or step");
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
                let ids = if plan.retains_ids() {
                    4 * text.len()
                } else {
                    0
                };
                prop_assert_eq!(memory.tokens, ids);
            }
            Ok(())
        },
    );
}

#[test]
fn a_state_without_entries_the_plan_stores_is_refused() {
    let decoder = decoders().swap_remove(0);
    let shape = decoder.shape();
    let plan = Plan::retain_top(&shape, 2).expect("five layers");
    let mut cache = cache(&decoder, &plan, 3);
    feed(&decoder, &mut cache, &tokens(1, 20)[..]);
    let whole = cache.state().expect("no open draft or step");
    let mut state = State::new(whole.backend(), options(&whole), &shape);
    for (name, entry) in whole.values() {
        if !name.starts_with("layer.4.") {
            state.insert(name, entry.clone());
        }
    }
    let refused = cache.set_state(&state);
    assert!(
        matches!(&refused, Err(CacheError::State { value, .. }) if value == "layer.4.positions"),
        "{refused:?}"
    );
    assert_eq!(cache.length(0), 20);
}

/// A token that is no longer hot costs what the plan says, to the byte.
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
        Plan::retain_top(&shape, 2).expect("five layers"),
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
