//! Any life of any cache: whatever is done to it, it goes on as one that saw only what survived.

use crate::support::PlanKind;
use kv_direct::cache::Draft;
use proptest::{
    prelude::*,
    sample::select,
    test_runner::{RngAlgorithm, TestRng, TestRunner},
};

use crate::{
    life_kinds::{FIRST_SLIDING, Kind, models},
    life_model::Life,
    oracle_random::any_policy,
    simulator::Policy,
};

#[derive(Debug, Clone)]
enum Act {
    Feed {
        lengths: [usize; 4],
        more: bool,
    },
    /// All rows to a share of the longest.
    Truncate(f64),
    /// Each row to a share of its own.
    TruncateRows([f64; 4]),
    UndoLastCall,
    BeyondTheEnd,
    Checkpoint,
    Restore,
    Accept,
    /// Goes on with the fork or with the origin; the other may have its turn later.
    Fork {
        with_it: bool,
    },
    TakeTurns,
    /// Row numbers, modulo one more than there are, or than there are.
    SelectRows {
        rows: Vec<usize>,
        may_fail: bool,
    },
    Move {
        by_file: bool,
        dirty: bool,
    },
    Park,
    Resume(Option<usize>),
    Clear,
}

fn any_act() -> impl Strategy<Value = Act> {
    let length = || prop_oneof![2 => Just(0usize), 4 => Just(1), 3 => 2usize..=5, 1 => 6usize..=14];
    let lengths = [length(), length(), length(), length()];
    let share = || prop_oneof![2 => Just(1.0), 1 => Just(0.0), 3 => 0.0..=1.0f64];
    let shares = [share(), share(), share(), share()];
    prop_oneof![
        12 => (lengths, any::<bool>()).prop_map(|(lengths, more)| Act::Feed { lengths, more }),
        1 => share().prop_map(Act::Truncate),
        4 => shares.prop_map(Act::TruncateRows),
        2 => Just(Act::UndoLastCall),
        1 => Just(Act::BeyondTheEnd),
        7 => Just(Act::Checkpoint),
        4 => Just(Act::Restore),
        4 => Just(Act::Accept),
        2 => any::<bool>().prop_map(|with_it| Act::Fork { with_it }),
        1 => Just(Act::TakeTurns),
        3 => (prop::collection::vec(0usize..4, 0..4), prop::bool::weighted(0.1))
            .prop_map(|(rows, may_fail)| Act::SelectRows { rows, may_fail }),
        3 => (any::<bool>(), any::<bool>())
            .prop_map(|(by_file, dirty)| Act::Move { by_file, dirty }),
        1 => Just(Act::Park),
        1 => prop::option::of(0usize..=3).prop_map(Act::Resume),
        1 => Just(Act::Clear),
    ]
}

/// What happens to a cache; now and then it begins just below the end of a piece.
fn any_life() -> impl Strategy<Value = (usize, Option<usize>, Vec<Act>, u64)> {
    (
        1usize..=3,
        prop_oneof![7 => Just(None), 1 => (495usize..=514).prop_map(Some)],
        prop::collection::vec(any_act(), 1..20),
        0u64..1_000_000,
    )
}

fn live(mut life: Life, (batch, long, acts, seed): (usize, Option<usize>, Vec<Act>, u64)) {
    let mut other: Option<Life> = None;
    if let Some(long) = long {
        let mut lengths = vec![3; batch];
        lengths[batch - 1] = long;
        life.feed(&lengths, seed % 2 == 0, seed);
    }
    for (step, act) in acts.into_iter().enumerate() {
        let seed = seed + 10 * step as u64;
        let lengths = life.lengths();
        let rows = lengths.len();
        match act {
            Act::Feed { lengths: fed, more } => {
                let batch = if rows == 0 { batch } else { rows };
                let fed: Vec<usize> = fed.iter().cycle().take(batch).copied().collect();
                life.feed(&fed, more, seed);
            }
            Act::Truncate(share) => {
                let longest = lengths.iter().copied().max().unwrap_or(0);
                let to = (longest as f64 * share).round() as usize;
                let to: Vec<usize> = lengths.iter().map(|&length| to.min(length)).collect();
                life.truncate(&to);
            }
            Act::TruncateRows(shares) => {
                let to = lengths.iter().zip(shares.iter().cycle());
                let to = to.map(|(&length, share)| (length as f64 * share).round() as usize);
                life.truncate(&to.collect::<Vec<_>>());
            }
            Act::UndoLastCall => life.truncate(&life.undo()),
            Act::BeyondTheEnd => {
                let to: Vec<usize> = lengths.iter().map(|&length| length + 1).collect();
                if rows > 0 {
                    life.truncate(&to);
                }
                life.truncate(&vec![0; rows + 1]);
            }
            Act::Checkpoint => life.begin_draft(),
            Act::Restore => life.end_draft(Draft::Discard),
            Act::Accept => life.end_draft(Draft::Accept),
            Act::Fork { with_it } => {
                let fork = life.fork();
                other = Some(if with_it {
                    std::mem::replace(&mut life, fork)
                } else {
                    fork
                });
            }
            Act::TakeTurns => {
                if let Some(other) = &mut other {
                    std::mem::swap(&mut life, other);
                }
            }
            Act::SelectRows { rows: of, may_fail } => {
                let modulo = rows + usize::from(may_fail);
                let of = of.into_iter().filter(|_| modulo > 0);
                life.select_sequences(&of.map(|row| row % modulo).collect::<Vec<_>>());
            }
            Act::Move { by_file, dirty } => life.move_to_another(by_file, dirty),
            Act::Park => life.park(),
            Act::Resume(layers) => life.resume(layers),
            Act::Clear => life.clear(),
        }
    }
    for mut life in other.into_iter().chain([life]) {
        life.verify_all();
        if life.is_draft() {
            life.end_draft(Draft::Accept);
        }
        life.finish();
    }
}

fn check(cases: u32, kind: impl Strategy<Value = (usize, Kind)>) {
    let more = std::env::var("KV_DIRECT_LIFE_CASES").ok();
    let more = more.map(|cases| cases.parse().expect("KV_DIRECT_LIFE_CASES is a number"));
    let config = ProptestConfig {
        cases: more.unwrap_or(cases),
        failure_persistence: None,
        max_shrink_iters: 2000,
        ..ProptestConfig::default()
    };
    // The same cases in every run, unless more are asked for.
    let mut runner = match more {
        Some(_) => TestRunner::new(config),
        None => TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha)),
    };
    runner
        .run(&(kind, any_life()), |((model, kind), acts)| {
            live(Life::new(&models()[model], kind), acts);
            Ok(())
        })
        .unwrap_or_else(|failure| panic!("{failure}"));
}

#[test]
fn any_life_of_full_kv_is_that_of_its_tokens() {
    check(
        40,
        (0..models().len()).prop_map(|model| (model, Kind::Full)),
    );
}

#[test]
fn any_life_of_a_residual_checkpoint_is_that_of_its_tokens() {
    let hot = prop_oneof![2 => Just(0), 3 => 1usize..=12, 2 => Just(usize::MAX)];
    let floor = select(vec![PlanKind::Tokens, PlanKind::Residuals]);
    let kind = (0..models().len(), hot, floor);
    check(
        80,
        kind.prop_map(|(model, hot, floor)| (model, Kind::Residual { hot, floor })),
    );
}

#[test]
fn any_life_of_a_policy_is_that_of_the_calls_that_survived() {
    let kind = prop_oneof![
        8 => any_policy(12).prop_map(Kind::Policy),
        1 => (0.05f64..=1.0).prop_map(Kind::WindowShare),
    ];
    let kind = (0..models().len(), kind).prop_map(|(model, kind)| match kind {
        Kind::Policy(Policy::Streaming {
            reindexed: true, ..
        }) => (model % FIRST_SLIDING, kind),
        kind => (model, kind),
    });
    check(100, kind);
}
