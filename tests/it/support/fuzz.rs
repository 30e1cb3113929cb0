//! Damaged and made-up bytes, and how much memory they may ask for.

use proptest::{
    prelude::*,
    sample::{Index, select},
};

use crate::support::cases::asked_for;

/// Bytes held for a byte of JSON at worst: in a header a two-byte list makes a value of 32 bytes, and a
/// list that grows is held twice. Configurations take far less.
pub const FACTOR: usize = 32;

/// What a few hundred bytes may ask for: lists of the names of a thousand layers.
pub const CONSTANT: usize = 16 << 20;

#[derive(Debug, Clone)]
enum Edit {
    Set(Index, u8),
    Insert(Index, &'static str),
    Remove(Index, usize),
    Repeat(Index, usize),
    Cut(Index),
}

fn edit() -> impl Strategy<Value = Edit> {
    let tokens = vec![
        "null",
        "true",
        "-1",
        "0",
        "1e999",
        "1e-320",
        "18446744073709551615",
        "4294967296",
        "16777217",
        "\"",
        "\\u0000",
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        "[[[[[[[[",
        "{\"a\":",
        "\"F64\"",
        "\"BF16\"",
        "9",
        "\"llama\"",
        "\"qwen2\"",
        "\"gemma3\"",
        "\"linear\"",
        "\"full_attention\"",
        "\"text_config\":{",
    ];
    prop_oneof![
        3 => (any::<Index>(), any::<u8>()).prop_map(|(at, byte)| Edit::Set(at, byte)),
        3 => (any::<Index>(), select(b"0123456789\"{}[],:".as_slice())).prop_map(|(at, byte)| Edit::Set(at, byte)),
        3 => (any::<Index>(), select(tokens)).prop_map(|(at, token)| Edit::Insert(at, token)),
        2 => (any::<Index>(), 1_usize..40).prop_map(|(at, length)| Edit::Remove(at, length)),
        2 => (any::<Index>(), 1_usize..400).prop_map(|(at, length)| Edit::Repeat(at, length)),
        1 => any::<Index>().prop_map(Edit::Cut),
    ]
}

fn edited(good: &[u8], edits: &[Edit]) -> Vec<u8> {
    let mut bytes = good.to_vec();
    for edit in edits {
        let at = |index: &Index| index.index(bytes.len() + 1);
        match edit {
            Edit::Set(index, byte) => {
                let at = at(index);
                if let Some(old) = bytes.get_mut(at) {
                    *old = *byte;
                }
            }
            Edit::Insert(index, token) => {
                let at = at(index);
                bytes.splice(at..at, token.bytes());
            }
            Edit::Remove(index, length) => {
                let at = at(index);
                bytes.drain(at..(at + length).min(bytes.len()));
            }
            Edit::Repeat(index, length) => {
                let at = at(index);
                let part = bytes[at..(at + length).min(bytes.len())].to_vec();
                bytes.splice(at..at, part);
            }
            Edit::Cut(index) => bytes.truncate(at(index)),
        }
    }
    bytes
}

/// Edits of `good`, or bytes that owe it nothing.
pub fn bytes(good: Vec<u8>) -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        9 => prop::collection::vec(edit(), 0..6).prop_map(move |edits| edited(&good, &edits)),
        1 => prop::collection::vec(any::<u8>(), 0..600),
    ]
}

/// Cases of a fuzz test: `KV_DIRECT_FUZZ_CASES` may ask for more.
pub fn fuzz_cases(default: u32) -> u32 {
    asked_for("KV_DIRECT_FUZZ_CASES").unwrap_or(default)
}
