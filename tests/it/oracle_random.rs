//! The oracle under random policies, cuttings, batches and truncations.

use crate::support::CacheExt as _;
use std::cell::Cell;

use kv_direct::policy::{Group, Pooling};
use proptest::{
    prelude::*,
    sample::select,
    test_runner::{RngAlgorithm, TestRng, TestRunner},
};

use crate::{
    driver::{Calls, Model, assert_obeys, assert_row_obeys, backend, of_row, run, run_on},
    random::{VOCAB, tokens},
    simulator::{
        Amount::{Rows, Share},
        Cuts, Policy, prompt,
    },
};

/// The same cases in every run.
fn runner(cases: u32) -> TestRunner {
    let config = ProptestConfig {
        cases,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha))
}

/// A policy whose budget, where it is a number, is `most` rows at most.
pub fn any_policy(most: usize) -> impl Strategy<Value = Policy> {
    let amount = move |least: usize| {
        prop_oneof![
            3 => (least..=most).prop_map(Rows),
            1 => (0.05f64..=1.0).prop_map(Share),
        ]
    };
    let group = || select(vec![Group::Mean, Group::Sum, Group::Max]);
    let streaming = (0usize..8, amount(1), any::<bool>());
    let h2o = (amount(1), 0.0..=1.0, 0.0..=1.0, group());
    let snap = (
        amount(2),
        0.0..=1.0,
        select(vec![Pooling::Average, Pooling::Max]),
        select(vec![1usize, 3, 5, 7, 31]),
        group(),
    );
    prop_oneof![
        (1..most).prop_map(|size| Policy::Window { size }),
        streaming.prop_map(|(sinks, recent, reindexed)| Policy::Streaming {
            sinks,
            recent,
            reindexed,
        }),
        h2o.prop_map(|(budget, recent, sinks, group)| {
            let part = |share: f64, of: usize| (share * of as f64).round() as usize;
            let (recent, sinks) = match budget {
                Rows(rows) => {
                    let recent = part(recent, rows);
                    (Rows(recent), part(sinks, rows - recent))
                }
                Share(share) => (Share((share * recent).max(0.01)), part(sinks, 6)),
            };
            Policy::H2o {
                budget,
                recent,
                sinks,
                group,
            }
        }),
        (amount(1), any::<bool>()).prop_map(|(budget, protect_last)| Policy::Tova {
            budget,
            protect_last,
        }),
        snap.prop_map(|(budget, window, pooling, kernel, group)| Policy::Snap {
            budget,
            window: match budget {
                Rows(rows) => ((window * rows as f64) as usize).clamp(1, rows - 1),
                Share(_) => 1 + (window * 9.0) as usize,
            },
            pooling,
            kernel,
            group,
        }),
    ]
}

/// Calls of one to three rows, 50 tokens a row at most, none without a token.
fn any_calls() -> impl Strategy<Value = Calls> {
    let length = || prop_oneof![2 => Just(0usize), 4 => Just(1), 3 => 2usize..=5, 2 => 6usize..=24];
    let calls = move |rows| {
        let call = (prop::collection::vec(length(), rows), any::<bool>());
        prop::collection::vec(call, 1..12)
    };
    (1usize..=3).prop_flat_map(calls).prop_map(|calls| {
        let mut totals = vec![0; calls[0].0.len()];
        let mut fitting = Calls::new();
        for (mut lengths, more_follows) in calls {
            for (total, length) in totals.iter_mut().zip(&mut lengths) {
                *length = (*length).min(50 - *total);
                *total += *length;
            }
            if lengths.iter().any(|&n| n > 0) {
                fitting.push((lengths, more_follows));
            }
        }
        if fitting.is_empty() {
            fitting.push((vec![1; totals.len()], false));
        }
        fitting
    })
}

#[test]
fn any_policy_holds_what_it_says_however_tokens_are_cut() {
    let models = Model::all();
    let mut runner = runner(48);
    let strategy = (0..models.len(), any_policy(30), any_calls(), 0u64..1000);
    let cuts = Cell::new(Cuts::default());
    runner
        .run(&strategy, |(model, policy, calls, seed)| {
            let model = &models[model];
            let reindexed = matches!(
                policy,
                Policy::Streaming {
                    reindexed: true,
                    ..
                }
            );
            prop_assume!(!(reindexed && model.slides()));
            let mut cache = backend(policy, &model.decoder.shape()).expect("fits");
            let run = run(model, &mut *cache, &calls, seed);
            cuts.set(cuts.get().and(assert_obeys(model, policy, &calls, &run)));
            Ok(())
        })
        .unwrap_or_else(|failure| panic!("{failure}"));
    let cuts = cuts.get();
    println!("{cuts:?}");
    assert!(
        cuts.doubtful * 20 <= cuts.made,
        "rounding decides: {cuts:?}"
    );
}

/// Where a truncation is accepted the tokens from there on might never have been: a prompt that was
/// over goes on if it lost some.
#[test]
fn what_is_taken_back_leaves_no_trace() {
    let models = Model::all();
    let (asked, accepted) = (Cell::new(0), Cell::new(0));
    let parts = (0.0..1.0, 0.0..1.0);
    let strategy = (
        0..models.len(),
        any_policy(30),
        any_calls(),
        parts,
        0u64..1000,
    );
    runner(64)
        .run(&strategy, |(model, policy, calls, (at, to), seed)| {
            let model = &models[model];
            let Ok(mut cache) = backend(policy, &model.decoder.shape()) else {
                return Ok(());
            };
            let at = 1 + (at * (calls.len() - 1) as f64) as usize;
            let (before, after) = calls.split_at(at);
            let mut whole = run(model, &mut *cache, before, seed);
            let longest = whole.tokens.iter().map(Vec::len).max().expect("a row");
            let to = 1 + (to * longest as f64) as usize;
            asked.set(asked.get() + 1);
            if cache.truncate_all(to).is_err() {
                return Ok(());
            }
            accepted.set(accepted.get() + 1);
            let ids = (0..whole.tokens.len()).map(|row| tokens(seed + 70 + row as u64, 50));
            let rest = run_on(model, &mut *cache, after, ids.collect());
            for row in 0..whole.tokens.len() {
                let length = whole.tokens[row].len();
                let mut of_row = of_row(&calls, row);
                let prompt = prompt(&of_row[..at]).map(|(_, length)| length);
                let goes_on = length > to && prompt.is_none_or(|prompt| prompt > to);
                let mut total = 0;
                for call in &mut of_row[..at] {
                    total += call.tokens;
                    call.tokens -= total.saturating_sub(to).min(call.tokens);
                    call.more_follows |= goes_on && total > 0;
                }
                // Queries that were taken back have no vote, and such cuts go by fewer of them.
                let mut fresh = 0;
                let ends = of_row[at..].iter().any(|call| {
                    fresh += call.tokens;
                    !call.more_follows
                });
                let fewer = match policy {
                    Policy::Snap { window, .. } => fresh < window,
                    Policy::Tova { .. } => fresh == 0,
                    _ => false,
                };
                if goes_on && ends && fewer {
                    continue;
                }
                whole.tokens[row].truncate(to);
                whole.logits[row].truncate(to * VOCAB);
                whole.extend(row, &rest);
                assert_row_obeys(model, policy, &of_row, &whole, row, at);
            }
            Ok(())
        })
        .unwrap_or_else(|failure| panic!("{failure}"));
    let [accepted, asked] = [accepted.get(), asked.get()];
    assert!(accepted * 4 > asked, "{accepted} of {asked} were accepted");
}
