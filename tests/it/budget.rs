//! A budget of bytes holds at every moment, whatever is done, and bits stay those of `FullKv`.

use std::ops::ControlFlow;

use kv_direct::{
    cache::{CacheBackend, ModelShape},
    model::Decoder,
    planner::{Planner, Throughput},
    residual::{Plan, ResidualCheckpoint, ResidualConfig, Retain},
};
use proptest::{
    prelude::*,
    test_runner::{Config, TestCaseError, TestRunner},
};

use crate::{
    plans::{decoders, old},
    support::tokens,
    twin::Twin,
};

/// What is done to a cache.
#[derive(Debug, Clone)]
pub enum Act {
    /// So many tokens, and a share of them in the second row.
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

fn act() -> impl Strategy<Value = Act> {
    let select = prop_oneof![Just(vec![1, 0]), Just(vec![0, 0]), Just(vec![1])];
    prop_oneof![
        6 => (prop_oneof![Just(1_usize), 2_usize..40], 0.0..1.0).prop_map(|(n, r)| Act::Feed(n, r)),
        3 => (0.0..1.0).prop_map(Act::Fill),
        2 => (0.0..1.0, 0.0..1.0).prop_map(|(a, b)| Act::Truncate(a, b)),
        2 => Just(Act::Draft),
        1 => any::<bool>().prop_map(Act::End),
        1 => Just(Act::Park),
        1 => Just(Act::Resume),
        1 => Just(Act::Reload),
        1 => select.prop_map(Act::Select),
    ]
}

pub fn speeds() -> Throughput {
    let text = "read 9e9; 16 tokens: projection 3e10, block 4e10, attention 1e10; \
        64 tokens: projection 5e10, block 6e10, attention 2e10";
    text.parse().expect("rates of two calls")
}

/// Does these things to a cache with a budget and to a `FullKv`. Where `context` and `call` are given, steps of
/// no more are never refused.
fn run(
    decoder: &Decoder,
    (plan, budget): (&Plan, usize),
    (rows, context, call): (usize, usize, Option<usize>),
    acts: &[Act],
    seed: u64,
) -> Result<(), TestCaseError> {
    let new = || {
        let config = ResidualConfig::new(plan.clone())
            .even_if_larger()
            .with_byte_budget(budget);
        ResidualCheckpoint::new(&decoder.shape(), decoder.conformance(), config)
    };
    let new = || new().expect("the probe passed");
    let mut twin = Twin::new(decoder, new(), rows);
    for (index, act) in acts.iter().enumerate() {
        let room = context.saturating_sub(twin.longest());
        let (count, share) = match *act {
            Act::Feed(count, share) => (count, share),
            Act::Fill(share) => ((share * room as f64) as usize, 1.0),
            _ => (0, 0.0),
        };
        let count = count.min(room).min(call.unwrap_or(count));
        if count > 0 {
            let counts = [count, (share * count as f64) as usize];
            let calls = twin.text.iter().zip(counts);
            let calls: Vec<Vec<u32>> = calls
                .map(|(_, count)| tokens(seed.wrapping_add(index as u64), count))
                .collect();
            let recent = twin.recent(&calls);
            if let Err(needed) = twin.feed(&calls) {
                prop_assert!(needed > budget, "{needed} bytes are not beyond {budget}");
                prop_assert!(
                    twin.text.len() > rows || call.is_none_or(|call| recent > call),
                    "{index}: {plan}, {} hot rows, chunks of {}: {needed} bytes of {budget} at {} + {count}",
                    plan.hot(),
                    plan.chunk(),
                    twin.longest(),
                );
            }
        }
        let shape = decoder.shape();
        match act {
            Act::Truncate(first, second) => {
                let kept = twin
                    .draft
                    .clone()
                    .unwrap_or_else(|| vec![0; twin.text.len()]);
                let rows = twin.lengths().into_iter().zip(kept).zip([first, second]);
                let to: Vec<usize> = rows
                    .map(|((length, kept), share)| kept + ((length - kept) as f64 * share) as usize)
                    .collect();
                if twin.longest() > 0 {
                    twin.truncate(&to);
                }
            }
            Act::Draft if twin.draft.is_none() => twin.begin_draft(),
            Act::End(keep) => twin.end(*keep),
            Act::Park => twin.found.park().expect("it rebuilds"),
            Act::Resume => {
                let resumed = twin
                    .found
                    .inner
                    .resume(|layer| decoder.at(layer), |_| ControlFlow::Continue(()));
                let recent = twin.recent(&vec![vec![]; twin.text.len()]);
                let promised = twin.text.len() <= rows && call.is_some_and(|call| recent <= call);
                prop_assert!(resumed.is_ok() || !promised, "{index}: {resumed:?}");
                let memory = twin.found.memory();
                twin.found.most = twin.found.most.max(memory.total() + memory.scratch_peak);
            }
            Act::Reload if twin.draft.is_none() => {
                let state = twin.found.state().expect("no draft, no step");
                twin.found.inner = new();
                twin.found.set_state(&state).expect("its own state");
            }
            Act::Select(chosen) if twin.draft.is_none() && twin.longest() > 0 => {
                let last = twin.text.len() - 1;
                let chosen: Vec<usize> = chosen.iter().map(|&row| row.min(last)).collect();
                if let Err(needed) = twin.select(&chosen) {
                    prop_assert!(needed > budget && (call.is_none() || chosen.len() > rows));
                }
            }
            _ => {}
        }
        let most = twin.found.most;
        prop_assert!(
            most <= budget,
            "{index}: {plan}, {} hot rows, chunks of {}, {} windows: {most} bytes of {budget}",
            plan.hot(),
            plan.chunk(),
            shape.windows.iter().flatten().count(),
        );
    }
    Ok(())
}

fn cases(count: u32) -> TestRunner {
    TestRunner::new(Config {
        cases: count,
        failure_persistence: None,
        max_shrink_time: 60_000,
        ..Config::default()
    })
}

/// A budget between the smallest and one that keeps everything, the smaller ones more often.
fn between(shape: &ModelShape, planner: &Planner<'_>, share: f64) -> usize {
    let all = Plan::keep_top(shape, shape.layers()).expect("as many layers");
    let (smallest, all) = (
        planner.smallest(),
        planner.cost(&all).expect("a cost").peak(),
    );
    smallest + (all.saturating_sub(smallest) as f64 * share * share) as usize
}

fn planned(contexts: std::ops::Range<usize>, count: u32, acts: std::ops::Range<usize>) {
    let (decoders, speeds) = (decoders(), speeds());
    let strategy = (
        0..decoders.len(),
        contexts,
        1_usize..3,
        prop_oneof![Just(1.0), 0.02..1.0],
        0.0..1.1,
        prop::collection::vec(act(), acts),
        any::<u64>(),
    );
    let result = cases(count).run(
        &strategy,
        |(model, context, rows, call, share, acts, seed)| {
            let decoder = &decoders[model];
            let shape = decoder.shape();
            let call = ((context as f64 * call) as usize).max(1);
            let planner = Planner::new(&shape, &speeds, context)
                .expect("sizes are known")
                .with_sequences(rows)
                .with_steps_of(call);
            let budget = between(&shape, &planner, share);
            let plan = planner.plan(budget).expect("no less than the smallest");
            prop_assert!(planner.cost(&plan).expect("a cost").peak() <= budget);
            run(
                decoder,
                (&plan, budget),
                (rows, context, Some(call)),
                &acts,
                seed,
            )
        },
    );
    if let Err(error) = result {
        panic!("{error}");
    }
}

#[test]
fn a_plan_for_a_budget_stays_inside_it_and_takes_every_step_it_was_made_for() {
    planned(2..700, 64, 3..12);
}

#[test]
fn so_it_does_where_texts_are_long() {
    planned(1_000..4_097, 6, 3..7);
}

#[test]
fn any_plan_with_a_budget_stays_inside_it_or_refuses_the_step() {
    let decoders = decoders();
    let speeds = speeds();
    let strategy = (
        0..decoders.len(),
        prop::collection::vec(old(), 5),
        (
            prop_oneof![Just(0_usize), 1_usize..40, 40_usize..700],
            1_usize..80,
        ),
        1_usize..3,
        0.0..1.1,
        prop::collection::vec(act(), 3..12),
        any::<u64>(),
    );
    let result = cases(64).run(
        &strategy,
        |(model, mut layers, (hot, chunk), rows, share, acts, seed)| {
            let decoder = &decoders[model];
            let shape = decoder.shape();
            for (old, window) in layers.iter_mut().zip(&shape.windows) {
                if window.is_some() && *old == Retain::KeysValues {
                    *old = Retain::Nothing;
                }
            }
            let plan = Plan::new(&shape, layers).expect("a plan for these layers");
            let plan = plan.with_hot(hot).with_chunk(chunk);
            let planner = Planner::new(&shape, &speeds, 1_200).expect("sizes are known");
            let planner = planner.with_sequences(rows);
            let budget = between(&shape, &planner, share);
            run(decoder, (&plan, budget), (rows, 1_200, None), &acts, seed)
        },
    );
    if let Err(error) = result {
        panic!("{error}");
    }
}
