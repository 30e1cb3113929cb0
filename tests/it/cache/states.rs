//! States: what one contains, and which a cache refuses.

use std::collections::BTreeSet;

use kv_direct::{
    cache::{CacheBackend, CacheError, Draft, StateValue, Step},
    model::Decoder,
    policy::FullKv,
    session::{self, SessionError},
};

use crate::support::{
    caches::{CacheExt as _, seen, zoo},
    feed::feed,
    kinds::{FIRST_SLIDING, Held, Kind, continue_alike, decoders, every_kind, kinds},
    models::tiny,
    random::tokens,
    test_run::TestRun,
};

#[test]
fn one_already_taken_does_not_change_with_its_cache() {
    for (decoder, kind) in every_kind() {
        let mut run = TestRun::new(decoder, kind);
        run.feed(&[9, 2], false, 1);
        run.feed(&[3, 0], false, 2);
        let state = run.held.get().state().expect("no draft");
        let mut twin = run.fork();
        run.feed(&[4, 4], false, 3);
        run.finish();
        let [mut one, mut two] = [Held::new(decoder, kind), Held::new(decoder, kind)];
        one.get_mut().set_state(&state).expect("its own");
        continue_alike(decoder, one.get_mut(), twin.held.get_mut());
        two.get_mut().set_state(&state).expect("again");
        one.get_mut().set_state(&state).expect("over another");
        continue_alike(decoder, one.get_mut(), two.get_mut());
    }
}

#[test]
fn every_cache_refuses_one_of_another_kind() {
    let (one, two) = (&decoders()[1], &decoders()[3]);
    let mut all: Vec<(&Decoder, Kind)> = kinds().into_iter().map(|kind| (one, kind)).collect();
    all.extend([(&decoders()[2], Kind::Full), (&decoders()[4], Kind::Full)]);
    all.push((&decoders()[FIRST_SLIDING], Kind::Full));
    let fed: Vec<TestRun> = all
        .iter()
        .map(|&(decoder, kind)| {
            let mut run = TestRun::new(decoder, kind);
            run.feed(&[9, 2], false, 1);
            run
        })
        .collect();
    for (from, origin) in fed.iter().enumerate() {
        let state = origin.held.get().state().expect("no draft");
        for (to, other) in fed.iter().enumerate().filter(|(to, _)| *to != from) {
            let mut other = other.fork();
            other.begin_draft();
            other.feed(&[1, 1], false, 2);
            other.refused(&format!("{from} into {to}"), |cache| {
                let refused = cache.set_state(&state);
                matches!(refused, Err(CacheError::Foreign { .. }))
            });
            other.end_draft(Draft::Discard);
            other.finish();
        }
    }
    // The shape does not contain biases: a file identifies its weights, a state does not.
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("session");
    let model = one.fingerprint();
    session::save(&path, fed[0].held.get(), &model).expect("it can be written");
    let mut other = FullKv::new(&two.shape());
    let refused = session::load(&path, &mut other, &two.fingerprint(), two.device());
    assert!(
        matches!(refused, Err(SessionError::Model { .. })),
        "{refused:?}"
    );
}

#[test]
fn an_open_step_refuses_all_but_loading_and_clear() {
    for (decoder, kind) in every_kind() {
        let mut run = TestRun::new(decoder, kind);
        run.feed(&[9, 2], false, 1);
        let state = run.held.get().state().expect("no draft");
        let expected = run.fork();
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("session");
        std::fs::write(&path, "what was there").expect("a file");
        let step = Step::new(vec![vec![1], vec![2]].into(), &[9, 2]).expect("a step");
        run.held.get_mut().begin(&step).expect("it follows");
        let poisoned = |refused: Result<(), CacheError>| {
            assert!(
                matches!(refused, Err(CacheError::Poisoned)),
                "{kind:?}: {refused:?}"
            );
        };
        let before = seen(run.held.get(), decoder.shape().layers());
        let cache = run.held.get_mut();
        poisoned(cache.begin(&step));
        poisoned(cache.truncate_all(3));
        poisoned(cache.truncate(&[3, 2]));
        poisoned(cache.begin_draft());
        poisoned(cache.end_draft(Draft::Discard));
        poisoned(cache.end_draft(Draft::Accept));
        poisoned(cache.select_sequences(&[0]));
        poisoned(cache.state().map(drop));
        let saved = session::save(&path, cache, &decoder.fingerprint());
        assert!(
            matches!(
                saved,
                Err(SessionError::Cache {
                    source: CacheError::Poisoned,
                    ..
                })
            ),
            "{saved:?}"
        );
        if matches!(kind, Kind::Residual { .. }) {
            poisoned(cache.park());
        }
        if let Held::Residual(cache) = &mut run.held {
            let go_on = |_| std::ops::ControlFlow::Continue(());
            poisoned((**cache).resume(|layer| decoder.at(layer), go_on).map(drop));
        }
        assert_eq!(seen(run.held.get(), decoder.shape().layers()), before);
        let file = std::fs::read(&path).expect("it is there");
        assert_eq!(file, b"what was there");
        assert_eq!(
            std::fs::read_dir(folder.path()).expect("a folder").count(),
            1,
            "nothing is left beside it"
        );
        let cache = run.held.get_mut();
        cache.set_state(&state).expect("whatever happened before");
        let mut expected = expected.held;
        continue_alike(decoder, cache, expected.get_mut());
    }
}

/// Entries that are valid alone but contradict each other. No checksum can detect them.
#[test]
fn a_contradiction_is_refused_with_its_entry() {
    let decoder = tiny(2);
    let entries = [
        ("prompts", StateValue::Integers(vec![13])),
        ("lengths", StateValue::Integers(vec![3])),
        ("lengths", StateValue::Integers(vec![11, 11])),
        ("layer.1.slots.0", StateValue::Integers(vec![0; 6])),
        ("layer.1.slots.0", StateValue::Integers(vec![9; 12])),
        ("layer.1.slots.0", StateValue::Floats(vec![0.0; 6])),
        ("layer.1.positions.0", StateValue::Integers(vec![0; 12])),
        ("layer.1.positions.0", StateValue::Floats(vec![0.0; 12])),
        ("layer.1.scores.0", StateValue::Floats(vec![0.0; 13])),
        ("layer.1.residuals.0", StateValue::Floats(vec![0.0; 12])),
    ];
    let mut replaced = BTreeSet::new();
    let all = zoo(&decoder, 32).into_iter().chain(zoo(&decoder, 6));
    for (name, mut cache) in all {
        feed(&decoder, &mut cache, &tokens(1, 11)[..]);
        feed(&decoder, &mut cache, &[7][..]);
        let there = seen(&cache, 3);
        for (entry, bad) in entries.clone() {
            let mut state = cache.state().expect("no open draft or step");
            if !state.contains(entry) {
                continue;
            }
            replaced.insert(entry);
            state.insert(entry, bad);
            let refused = cache.set_state(&state).expect_err(entry);
            assert!(
                matches!(refused, CacheError::State { .. } | CacheError::Shape { .. }),
                "{name}, {entry}: {refused:?}"
            );
            assert_eq!(seen(&cache, 3), there, "{name}, {entry}");
        }
    }
    assert!(entries.iter().all(|(entry, _)| replaced.contains(entry)));
}
