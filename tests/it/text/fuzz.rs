//! Damaged tokenizer files: whatever the bytes, a folder is read and used, or refused, within bounds.
//! `KV_DIRECT_FUZZ_CASES` asks for more cases.

use std::{
    cell::Cell,
    fs,
    time::{Duration, Instant},
};

use kv_direct::text::Tokenizer;
use proptest::prelude::*;

use crate::support::{
    allocator::measure,
    cases::{check, runner},
    fuzz::{bytes, fuzz_cases},
    real_models::models,
    tokenizer_folder::{Folder, byte_fallback},
};

/// The most bytes that a small folder may hold.
const BYTES: usize = 256 << 20;

/// Reads the folder and uses what it has. Returns whether it could be read.
fn used(folder: &Folder) -> bool {
    let Ok(tokenizer) = Tokenizer::from_dir(&folder.0) else {
        return false;
    };
    for text in [
        "",
        "a fox",
        "aaaa \n\u{e9}<s>\u{1F98A}",
        "<unk>\u{0} \u{2581}\u{2581}",
    ] {
        let Ok(ids) = tokenizer.encode(text) else {
            continue;
        };
        let _ = tokenizer.decode(&ids);
    }
    let mut stream = tokenizer.stream();
    for id in (0..400).chain([u32::MAX]) {
        let _ = stream.push(id);
    }
    let _ = stream.finish();
    true
}

fn bounded(folder: &Folder, file: &str, good: Vec<u8>, cases: u32) {
    let path = folder.0.join(file);
    // A large vocabulary takes more than that as it stands.
    let most = BYTES.max(2 * measure(|| used(folder)).1);
    let (read, refused) = (Cell::new(0), Cell::new(0));
    check(runner(fuzz_cases(cases)), &bytes(good), |bytes| {
        fs::write(&path, &bytes).expect("written");
        let begin = Instant::now();
        let (good, peak, _) = measure(|| used(folder));
        let counter = if good { &read } else { &refused };
        counter.set(counter.get() + 1);
        prop_assert!(
            peak <= most,
            "{peak} bytes were allocated, at most {most} may be"
        );
        prop_assert!(begin.elapsed() < Duration::from_secs(30));
        Ok(())
    });
    let (read, refused) = (read.get(), refused.get());
    assert!(read > 0 && refused > 0, "{read} read, {refused} refused");
}

#[test]
fn any_bytes_of_a_tokenizer_are_used_or_refused() {
    let folder = Folder::tiny("fuzz-byte-level");
    let good = fs::read(folder.0.join("tokenizer.json")).expect("there");
    bounded(&folder, "tokenizer.json", good, 300);
    let folder = Folder::new("fuzz-byte-fallback");
    let good = byte_fallback().to_string().into_bytes();
    bounded(&folder, "tokenizer.json", good, 300);
}

#[test]
fn any_bytes_of_its_configuration_are_used_or_refused() {
    let folder = Folder::byte_fallback("fuzz-config");
    let good = br#"{"add_bos_token": true, "bos_token": {"content": "<s>"}, "eos_token": "</s>", "x": [NaN, "\"NaN"],
        "added_tokens_decoder": {}, "chat_template": [{"name": "default", "template": "{{ bos_token }}"}]}"#;
    bounded(&folder, "tokenizer_config.json", good.to_vec(), 300);
}

/// The files of real models, where `KV_DIRECT_MODELS` names a folder of them.
#[test]
fn any_bytes_of_real_tokenizers_are_used_or_refused() {
    let Some(dir) = models("any_bytes_of_real_tokenizers_are_used_or_refused") else {
        return;
    };
    for model in ["smollm2-135m-instruct", "gemma3-270m"] {
        let folder = Folder::new("fuzz-real");
        let good = fs::read(dir.join(model).join("tokenizer.json")).expect("there");
        fs::write(folder.0.join("tokenizer.json"), &good).expect("written");
        bounded(&folder, "tokenizer.json", good, 10);
    }
}
