//! Decoding id by id: the pieces together are the text.

use proptest::prelude::*;
use serde_json::json;

use crate::support::{
    streams::{pieces, streams},
    tokenizer_folder::{Folder, byte_fallback, tiny},
};

#[test]
fn a_character_appears_with_its_last_byte() {
    let tokenizer = tiny();
    let ids = tokenizer.encode("a🦊é").expect("text");
    assert_eq!(
        pieces(&tokenizer, &ids),
        ["a", "", "", "", "🦊", "", "é", ""]
    );
    // Cut in the middle of a character: the end is what decoding gives.
    assert_eq!(pieces(&tokenizer, &ids[..3]), ["a", "", "", "\u{FFFD}"]);
}

#[test]
fn invalid_bytes_do_not_delay_what_follows() {
    let tokenizer = tiny();
    let id = |text: &str, at: usize| tokenizer.encode(text).expect("text")[at];
    // A byte that continues a character, without a character before it.
    let on = id("é", 1);
    let ids = [on, on, on, id("x", 0)];
    assert_eq!(
        pieces(&tokenizer, &ids),
        ["\u{FFFD}", "\u{FFFD}", "\u{FFFD}", "x", ""]
    );
}

#[test]
fn byte_tokens_appear_when_their_run_ends() {
    let tokenizer = Folder::byte_fallback("run").tokenizer();
    let byte = |byte: u32| 2 + byte;
    let (a, fox) = (259, 261);
    // An emoji in bytes, then a piece.
    let ids = [fox, byte(0xF0), byte(0x9F), byte(0xA6), byte(0x8A), 1, fox];
    let found = pieces(&tokenizer, &ids);
    assert_eq!(found, ["fox", "", "", "", "", "", "🦊 fox", ""]);
    // Bytes that are valid alone, but not with those that follow.
    let ids = [a, byte(0x41), 0, byte(0xF0), a];
    let found = pieces(&tokenizer, &ids);
    assert_eq!(found, ["a", "", "", "", "\u{FFFD}\u{FFFD}a", ""]);
    let ids = [byte(0x41), byte(0x42)];
    assert_eq!(pieces(&tokenizer, &ids), ["", "", "AB"]);
}

#[test]
fn special_and_unknown_ids_show_nothing() {
    let tokenizer = Folder::byte_fallback("unknown").tokenizer();
    let ids = [0, 259, 1, 9999, u32::MAX, 260];
    assert_eq!(pieces(&tokenizer, &ids), ["", "a", "", "", "", "b", ""]);
}

#[test]
fn pieces_together_are_the_text_for_every_decoder() {
    let decoders = [
        json!(null),
        json!({"type": "ByteFallback"}),
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true}),
        json!({"type": "WordPiece", "prefix": "##", "cleanup": true}),
        json!({"type": "BPEDecoder", "suffix": "b"}),
        json!({"type": "Fuse"}),
    ];
    for decoder in decoders {
        let folder = Folder::new("decoders");
        let mut json = byte_fallback();
        json["decoder"] = decoder;
        folder.write("tokenizer.json", &json.to_string());
        let tokenizer = folder.tokenizer();
        for seed in 0..200_usize {
            let id = |i: usize| 250 + (seed * 31 + i * i * 17 + i * seed) as u32 % 17;
            let ids: Vec<u32> = (0..12).map(id).collect();
            streams(&tokenizer, &ids);
        }
    }
}

proptest! {
    #[test]
    fn pieces_together_are_the_text_of_random_bytes(
        ids in prop::collection::vec(0u32..256, 0..40),
    ) {
        streams(&tiny(), &ids);
    }

    #[test]
    fn pieces_together_are_the_text_of_any_characters(text in "\\PC{0,12}") {
        let (tokenizer, text) = (tiny(), text.replace('\u{FFFD}', "?"));
        let ids = tokenizer.encode(&text).unwrap();
        for piece in pieces(&tokenizer, &ids) {
            prop_assert!(text.contains(&piece) && (piece.chars().count() <= 1));
        }
        streams(&tokenizer, &ids);
    }

    #[test]
    fn pieces_together_are_the_text_of_byte_fallback(
        ids in prop::collection::vec(
            prop_oneof![0u32..2, 2u32..258, 258u32..266, Just(0xF0 + 2), Just(0x9F + 2), 9990u32..9999],
            0..40,
        ),
    ) {
        streams(&Folder::byte_fallback("fallback").tokenizer(), &ids);
    }
}

/// Every byte is looked at once: this would take minutes otherwise.
#[test]
fn long_runs_of_bytes_that_are_no_text_are_streamed() {
    let tokenizer = tiny();
    let id = tokenizer.encode("é").expect("text")[1];
    let mut stream = tokenizer.stream();
    for _ in 0..200_000 {
        assert_eq!(stream.push(id).expect("an id"), "\u{FFFD}");
    }
    assert_eq!(stream.finish().expect("the end"), "");
}
