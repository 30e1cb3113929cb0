//! The fields in the header of a file: each that is wrong is refused, and the error names it.

use std::{collections::HashMap, fs};

use burn::tensor::Device;
use kv_direct::{
    policy::FullKv,
    session::{self, SessionError},
};
use safetensors::{SafeTensors, serialize};

use super::{
    files::{file, refused},
    fuzz::small,
    parts::Parts,
};
use crate::support::{caches::zoo, feed::feed, models::tiny, random::tokens};

/// The file with other facts, its checksums unchanged.
fn with_facts(bytes: &[u8], change: impl FnOnce(&mut HashMap<String, String>)) -> Vec<u8> {
    let (_, header) = SafeTensors::read_metadata(bytes).expect("a good file");
    let mut facts = header.metadata().clone().unwrap_or_default();
    change(&mut facts);
    let tensors = SafeTensors::deserialize(bytes).expect("a good file");
    serialize(tensors.tensors(), Some(facts)).expect("it can be written")
}

#[test]
fn another_version_or_format_is_refused() {
    let (_folder, path) = file();
    let decoder = tiny(2);
    let model = decoder.fingerprint();
    session::save(&path, &FullKv::new(&decoder.shape()), &model).expect("a state");
    let good = fs::read(&path).expect("a file");
    let cases = [
        ("format", None, "Format"),
        ("format", Some("weights"), "Format"),
        ("version", None, "Version"),
        ("version", Some("1"), "Version"),
        ("version", Some("02"), "Version"),
        ("version", Some("3"), "Version"),
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
        if let ("Version", Some(value)) = (expected, value) {
            let both = format!("version {value} of the format, but version 2 is read");
            assert!(error.to_string().ends_with(&both), "{error}");
        }
    }
}

/// Here the checksums are right, and one field is wrong: the error names it.
#[test]
fn a_changed_field_is_refused() {
    let decoder = small(true);
    let model = decoder.fingerprint();
    let (_folder, path) = file();
    for (name, mut cache) in zoo(&decoder, 8) {
        feed(&decoder, &mut cache, &tokens(1, 12)[..]);
        session::save(&path, &cache, &model).expect("a state that can be written");
        let parts = Parts::read(&fs::read(&path).expect("a file"));
        let own = parts
            .facts
            .keys()
            .filter(|key| !key.starts_with("checksum"));
        let added = ["model.window", "option.", "option.later"].map(String::from);
        for key in own.cloned().chain(added) {
            let values = [
                "",
                "0",
                "-1",
                "1e3",
                "18446744073709551616",
                "prompt*2",
                "full,\u{1f980}",
            ];
            let values = values.into_iter().map(|value| Some(value.to_owned()));
            let there = parts.facts.get(&key);
            for value in values.chain([None, Some("9".repeat(100_000))]) {
                if value.as_ref() == there {
                    continue;
                }
                let mut parts = parts.clone();
                match &value {
                    Some(value) => parts.facts.insert(key.clone(), value.clone()),
                    None => parts.facts.remove(&key),
                };
                fs::write(&path, parts.sealed().expect("a file")).expect("written");
                let loaded = session::load(&path, &mut cache, &model, &Device::flex());
                let error = loaded.expect_err(&key);
                let what = key.rsplit_once('.').map_or(&key[..], |(_, name)| name);
                let text = match &error {
                    SessionError::Cache { source, .. } => source.to_string(),
                    error => format!("{error:?}").to_lowercase(),
                };
                let named = text.contains(what) || what == "fingerprint" && text.contains("model");
                assert!(named, "{name}, {key} as {value:?}: {text}");
            }
        }
        assert_eq!(cache.lengths(), [12], "{name}: it was refused each time");
    }
}
