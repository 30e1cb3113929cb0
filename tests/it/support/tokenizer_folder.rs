//! Tokenizer folders that a test makes and damages.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicUsize, Ordering},
};

use kv_direct::text::{TextError, Tokenizer};
use serde_json::{Value, json};

pub const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/tiny");

/// A temporary folder, removed when dropped.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new(test: &str) -> Self {
        static MADE: AtomicUsize = AtomicUsize::new(0);
        let made = MADE.fetch_add(1, Ordering::Relaxed);
        let name = format!("kv-direct-{}-{made}-{test}", std::process::id());
        let dir = std::env::temp_dir().join(name);
        fs::create_dir_all(&dir).expect("a folder");
        Self(dir)
    }

    /// The byte tokenizer of the built-in model.
    pub fn tiny(test: &str) -> Self {
        let folder = Self::new(test);
        let from = Path::new(TINY).join("tokenizer.json");
        fs::copy(from, folder.0.join("tokenizer.json")).expect("a copy");
        folder
    }

    /// A tokenizer in the manner of Llama 2 and Gemma: `<s>` 0, `</s>` 1, then 256 byte tokens,
    /// then pieces in which a space is `▁`. It puts `<s>` in front of a text.
    pub fn byte_fallback(test: &str) -> Self {
        let folder = Self::new(test);
        folder.write("tokenizer.json", &byte_fallback().to_string());
        folder
    }

    pub fn write(&self, file: &str, text: &str) {
        fs::write(self.0.join(file), text).expect("written");
    }

    pub fn tokenizer(&self) -> Tokenizer {
        Tokenizer::from_dir(&self.0).expect("a good folder")
    }

    pub fn refused(&self) -> TextError {
        Tokenizer::from_dir(&self.0).expect_err("a bad folder")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Pieces behind the byte tokens of [`Folder::byte_fallback`].
pub const PIECES: [&str; 8] = ["▁", "a", "b", "▁fox", "é", "\u{FFFD}", "<0xZZ>", "▁▁"];

pub fn byte_fallback() -> Value {
    let bytes = (0..256).map(|byte| format!("<0x{byte:02X}>"));
    let tokens = ["<s>".to_owned(), "</s>".to_owned()].into_iter();
    let tokens = tokens
        .chain(bytes)
        .chain(PIECES.map(str::to_owned))
        .enumerate();
    let vocab: serde_json::Map<_, _> = tokens.map(|(id, token)| (token, json!(id))).collect();
    let special = |id, content| {
        json!({
            "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true,
        })
    };
    json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [special(0, "<s>"), special(1, "</s>")],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": null,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [
                {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}},
            ],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
        },
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true,
            "ignore_merges": false, "vocab": vocab, "merges": [],
        },
    })
}

pub fn tiny() -> Tokenizer {
    Tokenizer::from_dir(TINY).expect("the built-in model")
}
