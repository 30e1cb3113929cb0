//! A byte budget holds at every moment, whatever is called, and bits stay those of `FullKv`.

use std::ops::ControlFlow;

use kv_direct::{
    cache::{CacheBackend, ModelShape},
    model::Decoder,
    planner::Planner,
    residual::{Plan, ResidualConfig, Retain},
};
use proptest::{prelude::*, test_runner::TestCaseError};

use crate::support::{
    caches::checkpoint,
    cases::{check, runner},
    plans::{decoders, retain, throughput},
    random::tokens,
    twin::Twin,
};

/// A call on a cache.
#[derive(Debug, Clone)]
enum Call {
    /// This many tokens, and a share of them in the second sequence.
    Feed(usize, f64),
    /// A share of what the context has room for.
    Fill(f64),
    Truncate(f64, f64),
    Draft,
    End(bool),
    Park,
    Resume,
    Reload,
    Select(Vec<usize>),
}

fn call() -> impl Strategy<Value = Call> {
    let select = prop_oneof![Just(vec![1, 0]), Just(vec![0, 0]), Just(vec![1])];
    prop_oneof![
        6 => (prop_oneof![Just(1_usize), 2_usize..40], 0.0..1.0).prop_map(|(n, r)| Call::Feed(n, r)),
        3 => (0.0..1.0).prop_map(Call::Fill),
        2 => (0.0..1.0, 0.0..1.0).prop_map(|(a, b)| Call::Truncate(a, b)),
        2 => Just(Call::Draft),
        1 => any::<bool>().prop_map(Call::End),
        1 => Just(Call::Park),
        1 => Just(Call::Resume),
        1 => Just(Call::Reload),
        1 => select.prop_map(Call::Select),
    ]
}

/// Runs these calls on a cache with a budget and on a `FullKv`. Where `context` and `step` are given, steps
/// within them are never refused.
fn run(
    decoder: &Decoder,
    (plan, budget): (&Plan, usize),
    (sequences, context, step): (usize, usize, Option<usize>),
    calls: &[Call],
    seed: u64,
) -> Result<(), TestCaseError> {
    let new = || {
        let config = ResidualConfig::new(plan.clone())
            .even_if_larger()
            .with_byte_budget(budget);
        checkpoint(decoder, config)
    };
    let mut twin = Twin::new(decoder, new(), sequences);
    for (index, call) in calls.iter().enumerate() {
        let room = context.saturating_sub(twin.longest());
        let (count, share) = match *call {
            Call::Feed(count, share) => (count, share),
            Call::Fill(share) => ((share * room as f64) as usize, 1.0),
            _ => (0, 0.0),
        };
        let count = count.min(room).min(step.unwrap_or(count));
        if count > 0 {
            let counts = [count, (share * count as f64) as usize];
            let batch = twin.text.iter().zip(counts);
            let batch: Vec<Vec<u32>> = batch
                .map(|(_, count)| tokens(seed.wrapping_add(index as u64), count))
                .collect();
            let recent = twin.recent(&batch);
            if let Err(needed) = twin.feed(&batch) {
                prop_assert!(needed > budget, "{needed} bytes are not beyond {budget}");
                prop_assert!(
                    twin.text.len() > sequences || step.is_none_or(|step| recent > step),
                    "{index}: {plan}, {} hot tokens, chunks of {}: {needed} bytes of {budget} at {} + {count}",
                    plan.hot(),
                    plan.chunk(),
                    twin.longest(),
                );
            }
        }
        let shape = decoder.shape();
        match call {
            Call::Truncate(first, second) => {
                let from = twin
                    .draft
                    .clone()
                    .unwrap_or_else(|| vec![0; twin.text.len()]);
                let sequences = twin.lengths().into_iter().zip(from).zip([first, second]);
                let to: Vec<usize> = sequences
                    .map(|((length, from), share)| from + ((length - from) as f64 * share) as usize)
                    .collect();
                if twin.longest() > 0 {
                    twin.truncate(&to);
                }
            }
            Call::Draft if twin.draft.is_none() => twin.begin_draft(),
            Call::End(accept) => twin.end(*accept),
            Call::Park => twin.found.park().expect("it can rebuild"),
            Call::Resume => {
                let resumed = twin
                    .found
                    .inner
                    .resume(|layer| decoder.at(layer), |_| ControlFlow::Continue(()));
                let recent = twin.recent(&vec![vec![]; twin.text.len()]);
                let promised =
                    twin.text.len() <= sequences && step.is_some_and(|step| recent <= step);
                prop_assert!(resumed.is_ok() || !promised, "{index}: {resumed:?}");
                let memory = twin.found.memory();
                twin.found.most = twin.found.most.max(memory.total() + memory.scratch_peak);
            }
            Call::Reload if twin.draft.is_none() => {
                let state = twin.found.state().expect("no open draft or step");
                twin.found.inner = new();
                twin.found.set_state(&state).expect("its own state");
            }
            Call::Select(chosen) if twin.draft.is_none() && twin.longest() > 0 => {
                let last = twin.text.len() - 1;
                let chosen: Vec<usize> =
                    chosen.iter().map(|&sequence| sequence.min(last)).collect();
                if let Err(needed) = twin.select(&chosen) {
                    prop_assert!(needed > budget && (step.is_none() || chosen.len() > sequences));
                }
            }
            _ => {}
        }
        let most = twin.found.most;
        prop_assert!(
            most <= budget,
            "{index}: {plan}, {} hot tokens, chunks of {}, {} windows: {most} bytes of {budget}",
            plan.hot(),
            plan.chunk(),
            shape.windows.iter().flatten().count(),
        );
    }
    Ok(())
}

/// A budget between the smallest and one for everything; small ones are more frequent.
fn between(shape: &ModelShape, planner: &Planner<'_>, share: f64) -> usize {
    let all = Plan::retain_top(shape, shape.layers()).expect("as many layers");
    let (smallest, all) = (
        planner.smallest(),
        planner.cost(&all).expect("a cost").peak(),
    );
    smallest + (all.saturating_sub(smallest) as f64 * share * share) as usize
}

fn planned(contexts: std::ops::Range<usize>, count: u32, calls: std::ops::Range<usize>) {
    let (decoders, throughput) = (decoders(), throughput());
    let strategy = (
        0..decoders.len(),
        contexts,
        1_usize..3,
        prop_oneof![Just(1.0), 0.02..1.0],
        0.0..1.1,
        prop::collection::vec(call(), calls),
        any::<u64>(),
    );
    check(
        runner(count),
        &strategy,
        |(model, context, sequences, step, share, calls, seed)| {
            let decoder = &decoders[model];
            let shape = decoder.shape();
            let step = ((context as f64 * step) as usize).max(1);
            let planner = Planner::new(&shape, &throughput, context)
                .expect("sizes are known")
                .with_sequences(sequences)
                .with_steps_of(step);
            let budget = between(&shape, &planner, share);
            let plan = planner.plan(budget).expect("no less than the smallest");
            prop_assert!(planner.cost(&plan).expect("a cost").peak() <= budget);
            run(
                decoder,
                (&plan, budget),
                (sequences, context, Some(step)),
                &calls,
                seed,
            )
        },
    );
}

#[test]
fn a_plan_holds_its_limit_at_every_step_it_was_made_for() {
    planned(2..700, 64, 3..12);
}

#[test]
fn a_plan_holds_its_limit_for_long_texts() {
    planned(1_000..4_097, 6, 3..7);
}

#[test]
fn any_plan_holds_its_limit_or_refuses_the_step() {
    let decoders = decoders();
    let throughput = throughput();
    let strategy = (
        0..decoders.len(),
        prop::collection::vec(retain(), 5),
        (
            prop_oneof![Just(0_usize), 1_usize..40, 40_usize..700],
            1_usize..80,
        ),
        1_usize..3,
        0.0..1.1,
        prop::collection::vec(call(), 3..12),
        any::<u64>(),
    );
    check(
        runner(64),
        &strategy,
        |(model, mut layers, (hot, chunk), sequences, share, calls, seed)| {
            let decoder = &decoders[model];
            let shape = decoder.shape();
            for (retain, window) in layers.iter_mut().zip(&shape.windows) {
                if window.is_some() && *retain == Retain::KeysValues {
                    *retain = Retain::Nothing;
                }
            }
            let plan = Plan::new(&shape, layers).expect("a plan for these layers");
            let plan = plan.with_hot(hot).with_chunk(chunk);
            let planner = Planner::new(&shape, &throughput, 1_200).expect("sizes are known");
            let planner = planner.with_sequences(sequences);
            let budget = between(&shape, &planner, share);
            run(
                decoder,
                (&plan, budget),
                (sequences, 1_200, None),
                &calls,
                seed,
            )
        },
    );
}

#[test]
fn a_deep_truncation_of_one_sequence_leaves_room_to_resume() {
    let (decoders, throughput) = (decoders(), throughput());
    let (decoder, context, sequences) = (&decoders[0], 353, 2);
    let calls = [
        Call::Fill(0.52),
        Call::Draft,
        Call::Fill(0.74),
        Call::Truncate(0.88, 0.0),
        Call::Resume,
        Call::Feed(1, 1.0),
    ];
    let shape = decoder.shape();
    let planner = Planner::new(&shape, &throughput, context)
        .expect("sizes are known")
        .with_sequences(sequences);
    let budget = between(&shape, &planner, 0.67);
    let plan = planner.plan(budget).expect("no less than the smallest");
    run(
        decoder,
        (&plan, budget),
        (sequences, context, Some(context)),
        &calls,
        0,
    )
    .expect("the budget holds every step it was made for");
}
