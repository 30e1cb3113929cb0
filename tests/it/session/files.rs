//! Session files: every backend continues from one, and every fault of a file is reported.

use std::{fs, path::PathBuf};

use burn::tensor::Device;
use kv_direct::{
    Fingerprint,
    cache::{CacheBackend, CacheError, Draft, TokenIds},
    model::DecoderConfig,
    policy::{FullKv, Window},
    session::{self, SessionError},
};

use crate::support::{
    caches::{CacheExt as _, PlanKind, residual, seen, zoo},
    feed::feed,
    models::{random_decoder, sliding, tiny},
    random::tokens,
};

/// A temporary folder, removed with the value, and a file in it.
pub fn file() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("session.safetensors");
    (folder, path)
}

#[test]
fn every_backend_continues_with_the_same_bits() {
    let (_folder, path) = file();
    for decoder in [tiny(2), sliding(5)] {
        let model = decoder.fingerprint();
        for ((name, mut cache), (_, mut other)) in
            zoo(&decoder, 8).into_iter().zip(zoo(&decoder, 8))
        {
            feed(&decoder, &mut other, vec![tokens(8, 3); 3]);
            for (count, seed) in [(0, 1), (1, 2), (1, 3), (40, 4), (2, 5)] {
                let batch = vec![tokens(seed, count), tokens(seed + 50, count / 2)];
                if count > 0 {
                    feed(&decoder, &mut cache, batch);
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
                    let next = vec![tokens(9, next), tokens(10, 1)];
                    let mut alone = cache.fork();
                    let expected = feed(&decoder, &mut alone, next.clone());
                    let found = feed(&decoder, &mut other, next.clone());
                    assert!(found == expected, "{name} after {count} tokens");
                    feed(&decoder, &mut cache, next);
                }
            }
        }
    }
}

#[test]
fn a_parked_cache_writes_its_ids_only() {
    let (_folder, path) = file();
    let decoder = tiny(2);
    let model = decoder.fingerprint();
    let mut cache = residual(&decoder, usize::MAX, PlanKind::Tokens);
    feed(&decoder, &mut cache, &tokens(1, 2_000)[..]);
    let mut never_parked = cache.fork();
    cache.park().expect("entries can be rebuilt");
    session::save(&path, &cache, &model).expect("a state");
    let size = fs::metadata(&path).expect("a file").len();
    assert!(size < 4 * 2_000 + 1_500, "{size} bytes for 2,000 ids");
    let mut other = cache.fork();
    other.clear();
    session::load(&path, &mut other, &model, &Device::flex()).expect("its own file");
    let expected = feed(&decoder, &mut never_parked, &[7][..]);
    assert!(feed(&decoder, &mut other, &[7][..]) == expected);
}

/// Loads into a cache that holds another text. The load must be refused, and the cache continues.
#[track_caller]
pub fn refused(
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
fn one_of_another_cache_is_refused_with_what_differs() {
    let (folder, path) = file();
    let decoder = tiny(2);
    let shape = decoder.shape();
    let model = decoder.fingerprint();
    let mut cache = Window::new(&shape, 8).expect("a budget");
    feed(&decoder, &mut cache, &tokens(1, 12)[..]);
    session::save(&path, &cache, &model).expect("a state");

    let other = random_decoder(&DecoderConfig::new(97, 64, 3, 4, 4)).fingerprint();
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
    let mut wide = FullKv::new(&random_decoder(&DecoderConfig::new(97, 64, 3, 4, 4)).shape());
    session::save(&path, &FullKv::new(&shape), &model).expect("a state");
    let error = session::load(&path, &mut wide, &model, &Device::flex());
    let error = error.expect_err("other heads");
    assert!(kind("the model's kv_heads")(&error), "{error:?}");

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
        "no other file is left"
    );
}

#[test]
fn every_flipped_bit_is_noticed() {
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
fn an_open_step_or_draft_is_not_written() {
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
        cache.begin(&step).expect("a valid step");
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
        // A poisoned cache continues from a file.
        session::load(&path, &mut cache, &model, &Device::flex()).expect("its own file");
        assert_eq!(cache.length(0), 3, "{name}");
        feed(&decoder, &mut cache, &[1][..]);
    }
}

#[cfg(unix)]
#[test]
fn every_name_can_be_written_and_nothing_special_is_replaced() {
    let folder = tempfile::tempdir().expect("a folder");
    let decoder = tiny(2);
    let model = decoder.fingerprint();
    let mut cache = FullKv::new(&decoder.shape());
    feed(&decoder, &mut cache, vec![tokens(1, 3)]);
    let long = folder.path().join("n".repeat(255));
    session::save(&long, &cache, &model).expect("the longest name");
    session::load(&long, &mut cache, &model, &Device::flex()).expect("its own file");

    let special = folder.path().join("socket");
    let _listener = std::os::unix::net::UnixListener::bind(&special).expect("a socket");
    for path in [&*special, folder.path()] {
        let error = session::save(path, &cache, &model).expect_err("not a file");
        assert!(matches!(error, SessionError::Io { .. }), "{error}");
    }
    assert!(!special.metadata().expect("still there").is_file());
    let entries = fs::read_dir(folder.path()).expect("a folder").count();
    assert_eq!(entries, 2, "nothing is left aside");
}
