//! States that were tampered with: refused with a reason, and never a panic, then or later.

use crate::support::CacheExt as _;
use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::tensor::Tensor;
use kv_direct::{
    cache::{CacheBackend, CacheError, Draft, Entry, State},
    model::Input,
};

use crate::{
    life_kinds::{FIRST_SLIDING, Held, Kind, Model, models},
    life_model::Life,
    life_traps::kinds,
    simulator::Policy,
    support::{PlanKind, options, seen, tokens},
};

/// The same state without an entry, or with another in its place.
fn with(state: &State, model: &Model, name: &str, entry: Option<Entry>) -> State {
    let mut new = State::new(state.backend(), options(state), &model.decoder.shape());
    for (other, entry) in state.entries().filter(|(other, _)| *other != name) {
        new.insert(other, entry.clone());
    }
    if let Some(entry) = entry {
        new.insert(name, entry);
    }
    new
}

/// Entries that may have been put in the place of this one.
fn forged(entry: &Entry) -> Vec<Entry> {
    let mut all = vec![
        Entry::Integers(vec![]),
        Entry::Integers(vec![u64::MAX - 1]),
        Entry::Ids(vec![]),
        Entry::Floats(vec![]),
        Entry::Floats(vec![f32::NAN; 3]),
    ];
    match entry {
        Entry::Tensor(tensor) => {
            let [a, b, c, d] = tensor.dims();
            let options = (&tensor.device(), tensor.dtype());
            for dims in [
                [a + 1, b, c, d],
                [a, b + 1, c, d],
                [a, b, c + 1, d],
                [a, b, c, d + 1],
            ] {
                all.push(Entry::Tensor(Tensor::zeros(dims, options)));
            }
            all.push(Entry::Tensor(tensor.clone().cast(burn::tensor::DType::F64)));
        }
        Entry::Integers(values) => {
            let each = |change: &dyn Fn(u64) -> u64| {
                let ends = [0, values.len().saturating_sub(1)];
                ends.into_iter()
                    .filter(|&at| at < values.len())
                    .map(|at| {
                        let mut new = values.clone();
                        new[at] = change(new[at]);
                        Entry::Integers(new)
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
            all.push(Entry::Integers([&values[..], &[0]].concat()));
            all.push(Entry::Integers([&values[..], &values[..]].concat()));
            all.push(Entry::Integers(
                values[..values.len().saturating_sub(1)].to_vec(),
            ));
            all.push(Entry::Integers(values.iter().rev().copied().collect()));
        }
        Entry::Ids(values) => {
            all.push(Entry::Ids([&values[..], &[0]].concat()));
            all.push(Entry::Ids(
                values[..values.len().saturating_sub(1)].to_vec(),
            ));
            all.push(Entry::Ids(vec![u32::MAX; values.len()]));
        }
        Entry::Floats(values) => {
            all.push(Entry::Floats([&values[..], &[0.0]].concat()));
            all.push(Entry::Floats(
                values[..values.len().saturating_sub(1)].to_vec(),
            ));
            all.push(Entry::Floats(vec![f32::NAN; values.len()]));
            all.push(Entry::Floats(vec![f32::INFINITY; values.len()]));
        }
        _ => {}
    }
    all
}

/// Lives on for a while; what is refused is refused.
fn live_on(model: &Model, cache: &mut dyn CacheBackend) {
    let rows = cache.lengths().len().max(1);
    for turn in 0..3u64 {
        let call: Vec<_> = (0..rows as u64).map(|row| tokens(turn + row, 2)).collect();
        let input = Input::from(call).more_follows(turn == 0);
        if model.decoder.forward(input, cache).is_err() {
            break;
        }
        let _ = seen(cache, model.layers());
        for layer in 0..model.layers() {
            let kept = cache.cached(kv_direct::cache::LayerIndex::new(layer));
            assert_eq!(kept.sequences(), cache.lengths().len());
        }
    }
    let _ = cache.state();
    let ends: Vec<usize> = (0..rows)
        .map(|row| cache.length(row).saturating_sub(3))
        .collect();
    let _ = cache.truncate(&ends);
    let _ = cache.begin_draft();
    let _ = model.decoder.forward(vec![vec![1, 2]; rows], cache);
    let _ = cache.end_draft(Draft::Accept);
    let _ = cache.park();
    let _ = cache.select_sequences(&[0, 0]);
    let _ = model.decoder.forward(vec![vec![1], vec![2]], cache);
    cache.clear();
    assert_eq!(cache.memory().total(), 0);
}

fn alive(model: &'static Model, kind: Kind) -> Life {
    let mut life = Life::new(model, kind);
    life.feed(&[9, 2], true, 1);
    life.feed(&[1, 4], true, 2);
    life
}

/// Every entry in turn is missing, or another; the open prompt makes policies hold most.
#[test]
fn a_tampered_state_is_refused_or_harmless_but_never_a_panic() {
    let mut panicked = Vec::new();
    for (model, kind) in [&models()[1], &models()[FIRST_SLIDING]]
        .into_iter()
        .flat_map(|model| kinds().into_iter().map(move |kind| (model, kind)))
    {
        if let (
            true,
            Kind::Policy(Policy::Streaming {
                reindexed: true, ..
            }),
        ) = (model.slides(), kind)
        {
            continue;
        }
        let mut life = alive(model, kind);
        for over in [false, true] {
            if over {
                life.feed(&[1, 1], false, 3);
                life.feed(&[1, 1], false, 4);
            }
            let state = life.held.get().state().expect("no draft");
            for (name, entry) in state
                .entries()
                .filter(|(name, _)| !name.starts_with("layer.2"))
            {
                let missing = std::iter::once(None);
                let forged = missing.chain(forged(entry).into_iter().map(Some));
                for (index, entry) in forged.enumerate() {
                    let forged = with(&state, model, name, entry.clone());
                    let lived = catch_unwind(AssertUnwindSafe(|| {
                        let mut cache = life.held.get().fork();
                        let before = seen(&*cache, model.layers());
                        match cache.set_state(&forged) {
                            Ok(()) => live_on(model, &mut *cache),
                            Err(
                                CacheError::State { .. }
                                | CacheError::Shape { .. }
                                | CacheError::Dtype { .. },
                            ) => assert_eq!(seen(&*cache, model.layers()), before),
                            Err(other) => panic!("{other:?}"),
                        }
                    }));
                    if lived.is_err() {
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

/// What every cache must have to go on as it was.
#[test]
fn a_state_without_its_rows_is_refused() {
    for model in [&models()[1], &models()[FIRST_SLIDING]] {
        for kind in kinds() {
            if let (
                true,
                Kind::Policy(Policy::Streaming {
                    reindexed: true, ..
                }),
            ) = (model.slides(), kind)
            {
                continue;
            }
            let life = alive(model, kind);
            let state = life.held.get().state().expect("no draft");
            for (name, _) in state.entries() {
                let parts = [
                    "lengths", "prompts", "ids", "keys", "values", "slots", "bases", "from",
                ];
                if !parts.iter().any(|part| name.ends_with(part)) || name.contains("lengths.") {
                    continue;
                }
                // Rows that can be rebuilt may be missing, in all layers that have them.
                let rebuilds = matches!(kind, Kind::Residual { .. });
                if rebuilds && model.slides() && name == "layer.1.keys" {
                    continue;
                }
                let mut cache = life.held.get().fork();
                let refused = cache.set_state(&with(&state, model, name, None));
                assert!(
                    matches!(refused, Err(CacheError::State { .. })),
                    "{kind:?} without {name}, slides {}: {refused:?}",
                    model.slides()
                );
            }
        }
    }
}

/// A cache that says its rows must be rebuilt holds none.
#[test]
fn a_state_that_holds_rows_and_says_it_was_emptied_is_refused() {
    for model in [&models()[1], &models()[FIRST_SLIDING]] {
        for hot in [2, usize::MAX] {
            let floor = PlanKind::Tokens;
            let life = alive(model, Kind::Residual { hot, floor });
            let state = life.held.get().state().expect("no draft");
            for value in [vec![1], vec![2], vec![], vec![0, 0]] {
                let forged = with(
                    &state,
                    model,
                    "parked",
                    Some(Entry::Integers(value.clone())),
                );
                let mut cache = Held::new(model, life.kind);
                let refused = cache.get_mut().set_state(&forged);
                assert!(
                    matches!(refused, Err(CacheError::State { .. })),
                    "{value:?} with {hot}: {refused:?}"
                );
            }
        }
    }
}
