//! The oracle under random policies, splits, batches and truncations.

use std::cell::Cell;

use proptest::prelude::*;

use crate::support::{
    caches::CacheExt as _,
    cases::{check, repeating},
    driver::{
        Model, Steps, assert_obeys, assert_sequence_obeys, backend, of_sequence, run, run_on,
    },
    policies::any_policy,
    random::{VOCAB, tokens},
    simulator::{Cuts, Policy, prompt},
};

/// Steps of one to three sequences, at most 50 tokens in each, and at least one token in every step.
fn any_steps() -> impl Strategy<Value = Steps> {
    let length = || prop_oneof![2 => Just(0usize), 4 => Just(1), 3 => 2usize..=5, 2 => 6usize..=24];
    let steps = move |sequences| {
        let step = (prop::collection::vec(length(), sequences), any::<bool>());
        prop::collection::vec(step, 1..12)
    };
    (1usize..=3).prop_flat_map(steps).prop_map(|steps| {
        let mut totals = vec![0; steps[0].0.len()];
        let mut fitting = Steps::new();
        for (mut lengths, more_follows) in steps {
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
fn any_policy_holds_what_it_says_for_any_split() {
    let models = Model::all();
    let strategy = (0..models.len(), any_policy(30), any_steps(), 0u64..1000);
    let cuts = Cell::new(Cuts::default());
    check(repeating(48), &strategy, |(model, policy, steps, seed)| {
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
        let run = run(model, &mut *cache, &steps, seed);
        cuts.set(cuts.get().and(assert_obeys(model, policy, &steps, &run)));
        Ok(())
    });
    let cuts = cuts.get();
    println!("{cuts:?}");
    assert!(
        cuts.doubtful * 20 <= cuts.made,
        "rounding decides: {cuts:?}"
    );
}

/// Where a truncation is accepted, the truncated tokens have no effect. A prompt that was over continues if
/// it lost some.
#[test]
fn truncated_tokens_leave_no_trace() {
    let models = Model::all();
    let (asked, accepted) = (Cell::new(0), Cell::new(0));
    let parts = (0.0..1.0, 0.0..1.0);
    let strategy = (
        0..models.len(),
        any_policy(30),
        any_steps(),
        parts,
        0u64..1000,
    );
    check(
        repeating(64),
        &strategy,
        |(model, policy, steps, (at, to), seed)| {
            let model = &models[model];
            let Ok(mut cache) = backend(policy, &model.decoder.shape()) else {
                return Ok(());
            };
            let at = 1 + (at * (steps.len() - 1) as f64) as usize;
            let (before, after) = steps.split_at(at);
            let mut whole = run(model, &mut *cache, before, seed);
            let longest = whole.tokens.iter().map(Vec::len).max().expect("a sequence");
            let to = 1 + (to * longest as f64) as usize;
            asked.set(asked.get() + 1);
            if cache.truncate_all(to).is_err() {
                return Ok(());
            }
            accepted.set(accepted.get() + 1);
            let ids =
                (0..whole.tokens.len()).map(|sequence| tokens(seed + 70 + sequence as u64, 50));
            let rest = run_on(model, &mut *cache, after, ids.collect());
            for sequence in 0..whole.tokens.len() {
                let length = whole.tokens[sequence].len();
                let mut of_sequence = of_sequence(&steps, sequence);
                let prompt = prompt(&of_sequence[..at]).map(|(_, length)| length);
                let goes_on = length > to && prompt.is_none_or(|prompt| prompt > to);
                let mut total = 0;
                for step in &mut of_sequence[..at] {
                    total += step.tokens;
                    step.tokens -= total.saturating_sub(to).min(step.tokens);
                    step.more_follows |= goes_on && total > 0;
                }
                // Truncated queries do not decide, so fewer queries decide such an eviction.
                let mut fresh = 0;
                let ends = of_sequence[at..].iter().any(|step| {
                    fresh += step.tokens;
                    !step.more_follows
                });
                let fewer = match policy {
                    Policy::Snap { window, .. } => fresh < window,
                    Policy::Tova { .. } => fresh == 0,
                    _ => false,
                };
                if goes_on && ends && fewer {
                    continue;
                }
                whole.tokens[sequence].truncate(to);
                whole.logits[sequence].truncate(to * VOCAB);
                whole.extend(sequence, &rest);
                assert_sequence_obeys(model, policy, &of_sequence, &whole, sequence, at);
            }
            Ok(())
        },
    );
    let [accepted, asked] = [accepted.get(), asked.get()];
    assert!(accepted * 4 > asked, "{accepted} of {asked} were accepted");
}
