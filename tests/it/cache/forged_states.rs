//! States that were changed: refused with a reason, and never a panic, then or later.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::tensor::Tensor;
use kv_direct::{
    cache::{CacheBackend, CacheError, Draft, State, StateValue},
    model::{Decoder, Input},
};

use crate::support::{
    caches::{CacheExt as _, PlanKind, options, seen},
    kinds::{FIRST_SLIDING, Held, Kind, decoders, kinds},
    models::slides,
    random::tokens,
    simulator::Policy,
    test_run::TestRun,
};

/// The same state without an entry, or with another in its place.
fn with(state: &State, decoder: &Decoder, name: &str, entry: Option<StateValue>) -> State {
    let mut new = State::new(state.backend(), options(state), &decoder.shape());
    for (other, entry) in state.values().filter(|(other, _)| *other != name) {
        new.insert(other, entry.clone());
    }
    if let Some(entry) = entry {
        new.insert(name, entry);
    }
    new
}

/// Entries that may have been put in the place of this one.
fn forged(entry: &StateValue) -> Vec<StateValue> {
    let mut all = vec![
        StateValue::Integers(vec![]),
        StateValue::Integers(vec![u64::MAX - 1]),
        StateValue::Ids(vec![]),
        StateValue::Floats(vec![]),
        StateValue::Floats(vec![f32::NAN; 3]),
    ];
    match entry {
        StateValue::Tensor(tensor) => {
            let [a, b, c] = tensor.dims();
            let options = (&tensor.device(), tensor.dtype());
            for dims in [[a + 1, b, c], [a, b + 1, c], [a, b, c + 1]] {
                all.push(StateValue::Tensor(Tensor::zeros(dims, options)));
            }
            all.push(StateValue::Tensor(
                tensor.clone().cast(burn::tensor::DType::F64),
            ));
        }
        StateValue::Integers(values) => {
            let each = |change: &dyn Fn(u64) -> u64| {
                let ends = [0, values.len().saturating_sub(1)];
                ends.into_iter()
                    .filter(|&at| at < values.len())
                    .map(|at| {
                        let mut new = values.clone();
                        new[at] = change(new[at]);
                        StateValue::Integers(new)
                    })
                    .collect::<Vec<_>>()
            };
            all.extend(each(&|value| value.wrapping_add(1)));
            all.extend(each(&|value| value.wrapping_sub(1)));
            all.extend(each(&|_| 0));
            all.extend(each(&|_| 1 << 33));
            all.extend(each(&|_| u64::from(u32::MAX)));
            all.extend(each(&|_| u64::MAX));
            all.extend(each(&|_| u64::MAX - 3));
            all.push(StateValue::Integers([&values[..], &[0]].concat()));
            all.push(StateValue::Integers([&values[..], &values[..]].concat()));
            all.push(StateValue::Integers(
                values[..values.len().saturating_sub(1)].to_vec(),
            ));
            all.push(StateValue::Integers(values.iter().rev().copied().collect()));
        }
        StateValue::Ids(values) => {
            all.push(StateValue::Ids([&values[..], &[0]].concat()));
            all.push(StateValue::Ids(
                values[..values.len().saturating_sub(1)].to_vec(),
            ));
            all.push(StateValue::Ids(vec![u32::MAX; values.len()]));
        }
        StateValue::Floats(values) => {
            all.push(StateValue::Floats([&values[..], &[0.0]].concat()));
            all.push(StateValue::Floats(
                values[..values.len().saturating_sub(1)].to_vec(),
            ));
            all.push(StateValue::Floats(vec![f32::NAN; values.len()]));
            all.push(StateValue::Floats(vec![f32::INFINITY; values.len()]));
        }
        _ => {}
    }
    all
}

/// Calls everything for a while. A call may be refused, but must not panic.
fn exercise(decoder: &Decoder, cache: &mut dyn CacheBackend) {
    let sequences = cache.lengths().len().max(1);
    for step in 0..3u64 {
        let batch: Vec<_> = (0..sequences as u64)
            .map(|sequence| tokens(step + sequence, 2))
            .collect();
        let input = Input::from(batch).more_follows(step == 0);
        if decoder.forward(input, cache).is_err() {
            break;
        }
        let _ = seen(cache, decoder.shape().layers());
        for layer in 0..decoder.shape().layers() {
            let cached = cache.cached(kv_direct::cache::LayerIndex::new(layer));
            assert_eq!(cached.sequences(), cache.lengths().len());
        }
    }
    let _ = cache.state();
    let ends: Vec<usize> = (0..sequences)
        .map(|sequence| cache.length(sequence).saturating_sub(3))
        .collect();
    let _ = cache.truncate(&ends);
    let _ = cache.begin_draft();
    let _ = decoder.forward(vec![vec![1, 2]; sequences], cache);
    let _ = cache.end_draft(Draft::Accept);
    let _ = cache.park();
    let _ = cache.select_sequences(&[0, 0]);
    let _ = decoder.forward(vec![vec![1], vec![2]], cache);
    cache.clear();
    assert_eq!(cache.memory().total(), 0);
}

fn started(decoder: &'static Decoder, kind: Kind) -> TestRun {
    let mut run = TestRun::new(decoder, kind);
    run.feed(&[9, 2], true, 1);
    run.feed(&[1, 4], true, 2);
    run
}

/// Each entry of a state is removed or replaced. While the prompt is open, policies hold the most.
#[test]
fn a_changed_entry_is_refused_or_harmless_never_a_panic() {
    let mut panicked = Vec::new();
    for (decoder, kind) in [&decoders()[1], &decoders()[FIRST_SLIDING]]
        .into_iter()
        .flat_map(|decoder| kinds().into_iter().map(move |kind| (decoder, kind)))
    {
        if let (
            true,
            Kind::Policy(Policy::Streaming {
                reindexed: true, ..
            }),
        ) = (slides(decoder), kind)
        {
            continue;
        }
        let mut run = started(decoder, kind);
        for over in [false, true] {
            if over {
                run.feed(&[1, 1], false, 3);
                run.feed(&[1, 1], false, 4);
            }
            let state = run.held.get().state().expect("no draft");
            for (name, entry) in state
                .values()
                .filter(|(name, _)| !name.starts_with("layer.2"))
            {
                let missing = std::iter::once(None);
                let forged = missing.chain(forged(entry).into_iter().map(Some));
                for (index, entry) in forged.enumerate() {
                    let forged = with(&state, decoder, name, entry.clone());
                    let result = catch_unwind(AssertUnwindSafe(|| {
                        let mut cache = run.held.get().fork();
                        let before = seen(&*cache, decoder.shape().layers());
                        match cache.set_state(&forged) {
                            Ok(()) => exercise(decoder, &mut *cache),
                            Err(
                                CacheError::State { .. }
                                | CacheError::Shape { .. }
                                | CacheError::Dtype { .. },
                            ) => assert_eq!(seen(&*cache, decoder.shape().layers()), before),
                            Err(other) => panic!("{other:?}"),
                        }
                    }));
                    if result.is_err() {
                        let entry = format!("{entry:?}");
                        let entry: String = entry.chars().take(300).collect();
                        panicked.push(format!("{kind:?}, {over}: {name} as {index}: {entry}"));
                    }
                }
            }
        }
    }
    assert!(panicked.is_empty(), "{}", panicked.join("\n"));
}

/// A cache cannot continue without these.
#[test]
fn missing_entries_are_refused() {
    for decoder in [&decoders()[1], &decoders()[FIRST_SLIDING]] {
        for kind in kinds() {
            if let (
                true,
                Kind::Policy(Policy::Streaming {
                    reindexed: true, ..
                }),
            ) = (slides(decoder), kind)
            {
                continue;
            }
            let run = started(decoder, kind);
            let state = run.held.get().state().expect("no draft");
            for (name, _) in state.values() {
                let parts = [
                    "lengths",
                    "prompts",
                    "ids",
                    "keys",
                    "values",
                    "positions",
                    "residuals",
                ];
                let part = name.trim_end_matches(|c: char| c == '.' || c.is_ascii_digit());
                if !parts.iter().any(|known| part.ends_with(known)) || name.contains("lengths.") {
                    continue;
                }
                // Entries that can be rebuilt may be missing, in all layers that have them.
                let rebuilds = matches!(kind, Kind::Residual { .. });
                if rebuilds && slides(decoder) && name.starts_with("layer.1.keys.") {
                    continue;
                }
                let mut cache = run.held.get().fork();
                let refused = cache.set_state(&with(&state, decoder, name, None));
                assert!(
                    matches!(refused, Err(CacheError::State { .. })),
                    "{kind:?} without {name}, slides {}: {refused:?}",
                    slides(decoder)
                );
            }
        }
    }
}

/// A cache marked as parked holds no entries that it can rebuild.
#[test]
fn entries_beside_a_parked_mark_are_refused() {
    for decoder in [&decoders()[1], &decoders()[FIRST_SLIDING]] {
        for hot in [2, usize::MAX] {
            let plan_kind = PlanKind::Tokens;
            let run = started(decoder, Kind::Residual { hot, plan_kind });
            let state = run.held.get().state().expect("no draft");
            for value in [vec![1], vec![2], vec![], vec![0, 0]] {
                let forged = with(
                    &state,
                    decoder,
                    "parked",
                    Some(StateValue::Integers(value.clone())),
                );
                let mut cache = Held::new(decoder, run.kind);
                let refused = cache.get_mut().set_state(&forged);
                assert!(
                    matches!(refused, Err(CacheError::State { .. })),
                    "{value:?} with {hot}: {refused:?}"
                );
            }
        }
    }
}
