//! Random calls on any cache: it continues as one that received only what remains.

use kv_direct::cache::Draft;
use proptest::{prelude::*, sample::select};

use crate::support::{
    caches::PlanKind,
    cases::{self, asked_for, repeating, runner},
    kinds::{FIRST_SLIDING, Kind, decoders},
    policies::any_policy,
    simulator::Policy,
    test_run::TestRun,
};

#[derive(Debug, Clone)]
enum Call {
    Feed {
        lengths: [usize; 4],
        more: bool,
    },
    /// All sequences to a share of the longest.
    Truncate(f64),
    /// Each sequence to a share of its own length.
    TruncateEach([f64; 4]),
    UndoLastStep,
    BeyondTheEnd,
    BeginDraft,
    Discard,
    Accept,
    /// Continues with the fork or with the original; `Swap` may return to the other.
    Fork {
        with_it: bool,
    },
    Swap,
    /// Indices of sequences, modulo their number, or modulo one more.
    Select {
        sequences: Vec<usize>,
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

fn any_call() -> impl Strategy<Value = Call> {
    let length = || prop_oneof![2 => Just(0usize), 4 => Just(1), 3 => 2usize..=5, 1 => 6usize..=14];
    let lengths = [length(), length(), length(), length()];
    let share = || prop_oneof![2 => Just(1.0), 1 => Just(0.0), 3 => 0.0..=1.0f64];
    let shares = [share(), share(), share(), share()];
    prop_oneof![
        12 => (lengths, any::<bool>()).prop_map(|(lengths, more)| Call::Feed { lengths, more }),
        1 => share().prop_map(Call::Truncate),
        4 => shares.prop_map(Call::TruncateEach),
        2 => Just(Call::UndoLastStep),
        1 => Just(Call::BeyondTheEnd),
        7 => Just(Call::BeginDraft),
        4 => Just(Call::Discard),
        4 => Just(Call::Accept),
        2 => any::<bool>().prop_map(|with_it| Call::Fork { with_it }),
        1 => Just(Call::Swap),
        3 => (prop::collection::vec(0usize..4, 0..4), prop::bool::weighted(0.1))
            .prop_map(|(sequences, may_fail)| Call::Select { sequences, may_fail }),
        3 => (any::<bool>(), any::<bool>())
            .prop_map(|(by_file, dirty)| Call::Move { by_file, dirty }),
        1 => Just(Call::Park),
        1 => prop::option::of(0usize..=3).prop_map(Call::Resume),
        1 => Just(Call::Clear),
    ]
}

/// Random calls. Now and then the cache begins just below the end of a block of attention.
fn any_calls() -> impl Strategy<Value = (usize, Option<usize>, Vec<Call>, u64)> {
    (
        1usize..=3,
        prop_oneof![7 => Just(None), 1 => (495usize..=514).prop_map(Some)],
        prop::collection::vec(any_call(), 1..20),
        0u64..1_000_000,
    )
}

fn perform(mut run: TestRun, (batch, long, calls, seed): (usize, Option<usize>, Vec<Call>, u64)) {
    let mut other: Option<TestRun> = None;
    if let Some(long) = long {
        let mut lengths = vec![3; batch];
        lengths[batch - 1] = long;
        run.feed(&lengths, seed % 2 == 0, seed);
    }
    for (step, call) in calls.into_iter().enumerate() {
        let seed = seed + 10 * step as u64;
        let lengths = run.lengths();
        let sequences = lengths.len();
        match call {
            Call::Feed { lengths: fed, more } => {
                let batch = if sequences == 0 { batch } else { sequences };
                let fed: Vec<usize> = fed.iter().cycle().take(batch).copied().collect();
                run.feed(&fed, more, seed);
            }
            Call::Truncate(share) => {
                let longest = lengths.iter().copied().max().unwrap_or(0);
                let to = (longest as f64 * share).round() as usize;
                let to: Vec<usize> = lengths.iter().map(|&length| to.min(length)).collect();
                run.truncate(&to);
            }
            Call::TruncateEach(shares) => {
                let to = lengths.iter().zip(shares.iter().cycle());
                let to = to.map(|(&length, share)| (length as f64 * share).round() as usize);
                run.truncate(&to.collect::<Vec<_>>());
            }
            Call::UndoLastStep => run.truncate(&run.undo()),
            Call::BeyondTheEnd => {
                let to: Vec<usize> = lengths.iter().map(|&length| length + 1).collect();
                if sequences > 0 {
                    run.truncate(&to);
                }
                run.truncate(&vec![0; sequences + 1]);
            }
            Call::BeginDraft => run.begin_draft(),
            Call::Discard => run.end_draft(Draft::Discard),
            Call::Accept => run.end_draft(Draft::Accept),
            Call::Fork { with_it } => {
                let fork = run.fork();
                other = Some(if with_it {
                    std::mem::replace(&mut run, fork)
                } else {
                    fork
                });
            }
            Call::Swap => {
                if let Some(other) = &mut other {
                    std::mem::swap(&mut run, other);
                }
            }
            Call::Select {
                sequences: of,
                may_fail,
            } => {
                let modulo = sequences + usize::from(may_fail);
                let of = of.into_iter().filter(|_| modulo > 0);
                run.select_sequences(&of.map(|sequence| sequence % modulo).collect::<Vec<_>>());
            }
            Call::Move { by_file, dirty } => run.move_to_another(by_file, dirty),
            Call::Park => run.park(),
            Call::Resume(layers) => run.resume(layers),
            Call::Clear => run.clear(),
        }
    }
    for mut run in other.into_iter().chain([run]) {
        run.verify_all();
        if run.is_draft() {
            run.end_draft(Draft::Accept);
        }
        run.finish();
    }
}

fn check(cases: u32, kind: impl Strategy<Value = (usize, Kind)>) {
    // The same cases in every run, unless the variable sets their number.
    let runner = match asked_for("KV_DIRECT_RUN_CASES") {
        Some(more) => runner(more),
        None => repeating(cases),
    };
    cases::check(runner, &(kind, any_calls()), |((model, kind), calls)| {
        perform(TestRun::new(&decoders()[model], kind), calls);
        Ok(())
    });
}

#[test]
fn full_kv_depends_on_its_tokens_only() {
    check(
        40,
        (0..decoders().len()).prop_map(|model| (model, Kind::Full)),
    );
}

#[test]
fn residual_checkpoint_depends_on_its_tokens_only() {
    let hot = prop_oneof![2 => Just(0), 3 => 1usize..=12, 2 => Just(usize::MAX)];
    let plan_kind = select(vec![PlanKind::Tokens, PlanKind::Residuals]);
    let kind = (0..decoders().len(), hot, plan_kind);
    check(
        80,
        kind.prop_map(|(model, hot, plan_kind)| (model, Kind::Residual { hot, plan_kind })),
    );
}

#[test]
fn a_policy_depends_on_the_remaining_steps_only() {
    let kind = prop_oneof![
        8 => any_policy(12).prop_map(Kind::Policy),
        1 => (0.05f64..=1.0).prop_map(Kind::WindowShare),
    ];
    let kind = (0..decoders().len(), kind).prop_map(|(model, kind)| match kind {
        Kind::Policy(Policy::Streaming {
            reindexed: true, ..
        }) => (model % FIRST_SLIDING, kind),
        kind => (model, kind),
    });
    check(100, kind);
}
