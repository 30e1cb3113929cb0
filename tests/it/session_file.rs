//! Session files: every backend goes on from one, and whatever is wrong with a file is said.

use crate::support::CacheExt as _;
use std::{collections::HashMap, fs, path::PathBuf};

use burn::tensor::Device;
use kv_direct::{
    cache::{CacheBackend, CacheError, Draft, Entry, TokenIds},
    fingerprint::Fingerprint,
    model::{Decoder, DecoderConfig},
    policy::{FullKv, Window},
    session::{self, SessionError},
};
use safetensors::{SafeTensors, serialize};

use crate::{
    support::{PlanKind, feed, random, residual, seen, tiny, tokens},
    zoo::zoo,
};

/// A folder that is gone with the value, and a file in it.
fn file() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("session.safetensors");
    (folder, path)
}

/// Gemma's layers: two with a window of 5 around one that shows all keys.
fn windowed() -> Decoder {
    let mut config = DecoderConfig::new(97, 64, 3, 4, 2);
    for layer in [0, 2] {
        config.layers[layer].window = std::num::NonZeroUsize::new(5);
    }
    random(&config)
}

#[test]
fn every_backend_goes_on_from_its_file_with_the_same_bits() {
    let (_folder, path) = file();
    for decoder in [tiny(2), windowed()] {
        let model = decoder.fingerprint();
        for ((name, mut cache), (_, mut other)) in
            zoo(&decoder, 8).into_iter().zip(zoo(&decoder, 8))
        {
            feed(&decoder, &mut other, vec![tokens(8, 3); 3]);
            for (calls, seed) in [(0, 1), (1, 2), (1, 3), (40, 4), (2, 5)] {
                let rows = vec![tokens(seed, calls), tokens(seed + 50, calls / 2)];
                if calls > 0 {
                    feed(&decoder, &mut cache, rows);
                }
                session::save(&path, &cache, &model).expect("a state that can be written");
                let held = cache.memory();
                session::load(&path, &mut other, &model, &Device::flex()).expect("its own file");
                assert_eq!(seen(&other, 3).0, seen(&cache, 3).0, "{name}");
                assert_eq!(seen(&other, 3).1, seen(&cache, 3).1, "{name}");
                let loaded = other.memory();
                assert_eq!(
                    (loaded.keys_values, loaded.residuals, loaded.tokens),
                    (held.keys_values, held.residuals, held.tokens),
                    "{name}"
                );
                assert!(
                    loaded.total() <= held.total(),
                    "{name}: slack is not written"
                );
                for next in [1, 3] {
                    let call = vec![tokens(9, next), tokens(10, 1)];
                    let mut alone = cache.fork();
                    let expected = feed(&decoder, &mut alone, call.clone());
                    let found = feed(&decoder, &mut other, call.clone());
                    assert!(found == expected, "{name} after {calls} tokens");
                    feed(&decoder, &mut cache, call);
                }
            }
        }
    }
}

#[test]
fn a_parked_session_is_a_file_of_ids() {
    let (_folder, path) = file();
    let decoder = tiny(2);
    let model = decoder.fingerprint();
    let mut cache = residual(&decoder, usize::MAX, PlanKind::Tokens);
    feed(&decoder, &mut cache, &tokens(1, 2_000)[..]);
    let mut never_parked = cache.fork();
    cache.park().expect("rows can be rebuilt");
    session::save(&path, &cache, &model).expect("a state");
    let size = fs::metadata(&path).expect("a file").len();
    assert!(size < 4 * 2_000 + 1_500, "{size} bytes for 2,000 ids");
    let mut other = cache.fork();
    other.clear();
    session::load(&path, &mut other, &model, &Device::flex()).expect("its own file");
    let expected = feed(&decoder, &mut never_parked, &[7][..]);
    assert!(feed(&decoder, &mut other, &[7][..]) == expected);
}

/// Loads into a cache with a text of its own, which must be refused and go on.
#[track_caller]
fn refused(
    path: &std::path::Path,
    model: &Fingerprint,
    mut cache: impl CacheBackend,
) -> SessionError {
    let decoder = tiny(2);
    feed(&decoder, &mut cache, &tokens(3, 11)[..]);
    let (mut before, there) = (cache.fork(), seen(&cache, 3));
    let error = session::load(path, &mut cache, model, &Device::flex()).expect_err("a bad file");
    assert_eq!(seen(&cache, 3), there, "{error}");
    let expected = feed(&decoder, &mut before, &[1, 2][..]);
    assert!(
        feed(&decoder, &mut cache, &[1, 2][..]) == expected,
        "{error}"
    );
    error
}

#[test]
fn a_file_of_something_else_is_refused_by_what_differs() {
    let (folder, path) = file();
    let decoder = tiny(2);
    let shape = decoder.shape();
    let model = decoder.fingerprint();
    let mut cache = Window::new(&shape, 8).expect("a budget");
    feed(&decoder, &mut cache, &tokens(1, 12)[..]);
    session::save(&path, &cache, &model).expect("a state");

    let other = random(&DecoderConfig::new(97, 64, 3, 4, 4)).fingerprint();
    let error = refused(&path, &other, Window::new(&shape, 8).expect("a budget"));
    let text = error.to_string();
    assert!(
        text.contains(&model.to_string()) && text.contains(&other.to_string()),
        "{text}"
    );

    let kind = |what| {
        move |error: &SessionError| match error {
            SessionError::Cache {
                source: CacheError::Foreign { what: found, .. },
                ..
            } => *found == what,
            _ => false,
        }
    };
    let error = refused(&path, &model, FullKv::new(&shape));
    assert!(kind("the backend")(&error), "{error:?}");
    let error = refused(&path, &model, Window::new(&shape, 9).expect("a budget"));
    assert!(kind("the option size")(&error), "{error:?}");
    assert_eq!(
        std::error::Error::source(&error)
            .expect("the reason")
            .to_string(),
        "the state has the option size 8, this cache has 9"
    );
    let mut wide = FullKv::new(&random(&DecoderConfig::new(97, 64, 3, 4, 4)).shape());
    session::save(&path, &FullKv::new(&shape), &model).expect("a state");
    let error = session::load(&path, &mut wide, &model, &Device::flex());
    assert!(kind("a model with")(&error.expect_err("other heads")));

    let missing = refused(&folder.path().join("none"), &model, FullKv::new(&shape));
    assert!(matches!(missing, SessionError::Io { .. }), "{missing:?}");
    let no_file = refused(folder.path(), &model, FullKv::new(&shape));
    assert!(matches!(no_file, SessionError::Io { .. }), "{no_file:?}");
    let nowhere = session::save(&folder.path().join("no/file"), &cache, &model);
    assert!(
        matches!(nowhere, Err(SessionError::Io { .. })),
        "{nowhere:?}"
    );
    assert_eq!(
        fs::read_dir(folder.path()).expect("a folder").count(),
        1,
        "no litter"
    );
}

/// The file with other facts, its checksums left as they are.
fn with_facts(bytes: &[u8], change: impl FnOnce(&mut HashMap<String, String>)) -> Vec<u8> {
    let (_, header) = SafeTensors::read_metadata(bytes).expect("a good file");
    let mut facts = header.metadata().clone().unwrap_or_default();
    change(&mut facts);
    let tensors = SafeTensors::deserialize(bytes).expect("a good file");
    serialize(tensors.tensors(), Some(facts)).expect("it can be written")
}

#[test]
fn a_file_of_the_future_or_of_another_kind_is_refused() {
    let (_folder, path) = file();
    let decoder = tiny(2);
    let model = decoder.fingerprint();
    session::save(&path, &FullKv::new(&decoder.shape()), &model).expect("a state");
    let good = fs::read(&path).expect("a file");
    let cases: [(&str, Option<&str>, &str); 4] = [
        ("format", None, "Format"),
        ("format", Some("weights"), "Format"),
        ("version", Some("2"), "Version"),
        ("backend", Some("full_kV"), "Damaged"),
    ];
    for (fact, value, expected) in cases {
        let bytes = with_facts(&good, |facts| {
            match value {
                Some(value) => facts.insert(fact.into(), value.into()),
                None => facts.remove(fact),
            };
        });
        fs::write(&path, bytes).expect("a file");
        let error = refused(&path, &model, FullKv::new(&decoder.shape()));
        assert!(
            format!("{error:?}").starts_with(expected),
            "{fact}: {error:?}"
        );
    }
}

#[test]
fn no_byte_of_a_file_can_change_unnoticed() {
    let (_folder, path) = file();
    let decoder = tiny(1);
    let model = decoder.fingerprint();
    let mut cache = Window::new(&decoder.shape(), 2).expect("a budget");
    feed(&decoder, &mut cache, vec![tokens(1, 4), tokens(2, 2)]);
    session::save(&path, &cache, &model).expect("a state");
    let good = fs::read(&path).expect("a file");
    let expected = seen(&cache, 3);
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 1 << (at % 8);
        fs::write(&path, &bad).expect("a file");
        let loaded = session::load(&path, &mut cache, &model, &Device::flex());
        let error = loaded.expect_err("a bit was flipped");
        assert!(
            !matches!(error, SessionError::Io { .. }),
            "bit {} of byte {at}: {error:?}",
            at % 8
        );
        if at % 7 == 0 {
            fs::write(&path, &good[..at]).expect("a file");
            let loaded = session::load(&path, &mut cache, &model, &Device::flex());
            assert!(loaded.is_err(), "cut at {at}");
        }
    }
    assert_eq!(seen(&cache, 3), expected, "it was refused each time");
}

#[test]
fn a_state_is_not_handed_out_in_a_step_or_a_draft() {
    let (_folder, path) = file();
    let decoder = tiny(2);
    let model = decoder.fingerprint();
    for (name, mut cache) in zoo(&decoder, 8) {
        feed(&decoder, &mut cache, &tokens(1, 3)[..]);
        session::save(&path, &cache, &model).expect("a state");
        let good = fs::read(&path).expect("a file");
        cache.begin_draft().expect("no draft is open");
        let drafted = session::save(&path, &cache, &model);
        assert!(
            matches!(
                drafted,
                Err(SessionError::Cache {
                    source: CacheError::DraftOpen,
                    ..
                })
            ),
            "{name}: {drafted:?}"
        );
        cache.end_draft(Draft::Discard).expect("a draft");
        let step = kv_direct::cache::Step::new(TokenIds::from(&[1][..]), &[3]).expect("a step");
        cache.begin(&step).expect("a good step");
        let open = session::save(&path, &cache, &model);
        assert!(
            matches!(
                open,
                Err(SessionError::Cache {
                    source: CacheError::Poisoned,
                    ..
                })
            ),
            "{name}: {open:?}"
        );
        assert!(
            fs::read(&path).expect("a file") == good,
            "{name}: the old file stays"
        );
        // What was poisoned goes on from a file.
        session::load(&path, &mut cache, &model, &Device::flex()).expect("its own file");
        assert_eq!(cache.length(0), 3, "{name}");
        feed(&decoder, &mut cache, &[1][..]);
    }
}

/// What no checksum can see: entries that fit their kind and not each other.
#[test]
fn a_state_that_contradicts_itself_is_refused_by_the_entry() {
    let decoder = tiny(2);
    let entries = [
        ("prompts", Entry::Integers(vec![12])),
        ("lengths", Entry::Integers(vec![3])),
        ("lengths", Entry::Integers(vec![11, 11])),
        ("layer.1.slots", Entry::Integers(vec![0; 11])),
        ("layer.1.slots", Entry::Floats(vec![0.0; 11])),
    ];
    for (name, mut cache) in zoo(&decoder, 32) {
        feed(&decoder, &mut cache, &tokens(1, 11)[..]);
        let there = seen(&cache, 3);
        for (entry, bad) in entries.clone() {
            let mut state = cache.state().expect("no draft, no step");
            if !state.contains(entry) {
                continue;
            }
            state.insert(entry, bad);
            let refused = cache.set_state(&state).expect_err(entry);
            assert!(
                matches!(refused, CacheError::State { .. } | CacheError::Shape { .. }),
                "{name}, {entry}: {refused:?}"
            );
            assert_eq!(seen(&cache, 3), there, "{name}, {entry}");
        }
    }
}

#[test]
fn the_fingerprint_tells_models_apart() {
    let mut config = DecoderConfig::new(97, 64, 3, 4, 2);
    let one = random(&config).fingerprint();
    assert_eq!(one, random(&config).fingerprint(), "the same model");
    config.norm_epsilon *= 2.0;
    assert_ne!(one, random(&config).fingerprint(), "another configuration");
    let weights = |bump: f32| {
        Decoder::from_weights(
            DecoderConfig::new(97, 64, 3, 4, 2),
            &Device::flex(),
            |name, shape| {
                let mut weight = vec![0.01_f32; shape.iter().product()];
                if name == "layers.2.down" {
                    weight[5] += bump;
                }
                Ok::<_, std::convert::Infallible>(weight)
            },
        )
        .expect("weights in shape")
        .fingerprint()
    };
    assert_eq!(weights(0.0), weights(0.0));
    assert_ne!(weights(0.0), weights(1e-8), "one bit of one weight");
}
