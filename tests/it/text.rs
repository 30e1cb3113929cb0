//! Text in and out: encoding, decoding as it comes, stop strings.

use std::{
    fs,
    path::{Path, PathBuf},
};

use kv_direct::{
    cache::CacheBackend,
    generate::{FinishReason, Generation, Sampling},
    model::{Decoder, DecoderConfig},
    policy::FullKv,
    text::{Message, Stops, TextError, TextGeneration, TextStream, Tokenizer},
};
use proptest::prelude::*;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::{real::models, support::tiny as decoder};

const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/tiny");

/// A folder of a test's own; gone when dropped.
pub struct Folder(pub PathBuf);

impl Folder {
    fn new(test: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("kv-direct-{}-{test}", std::process::id()));
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

    fn refused(&self) -> TextError {
        Tokenizer::from_dir(&self.0).expect_err("a bad folder")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Pieces behind the byte tokens of [`Folder::byte_fallback`].
const PIECES: [&str; 8] = ["▁", "a", "b", "▁fox", "é", "\u{FFFD}", "<0xZZ>", "▁▁"];

fn byte_fallback() -> Value {
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

fn tiny() -> Tokenizer {
    Tokenizer::from_dir(TINY).expect("the built-in model")
}

/// The pieces of a stream, its end included.
fn pieces(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<String> {
    let mut stream = tokenizer.stream();
    let pushed = ids.iter().map(|&id| stream.push(id).expect("a good id"));
    let mut pieces: Vec<String> = pushed.collect();
    pieces.push(stream.finish().expect("an end"));
    assert_eq!(stream.finish().expect("another end"), "", "it begins anew");
    pieces
}

/// Checks the law of streams on `ids`: the pieces together are the text, and only the end of it may
/// be a broken character.
fn streams(tokenizer: &Tokenizer, ids: &[u32]) {
    let text = tokenizer.decode(ids).expect("good ids");
    assert_eq!(pieces(tokenizer, ids).concat(), text, "{ids:?}");
}

#[test]
fn the_byte_tokenizer_gives_text_back() {
    let tokenizer = tiny();
    for text in ["", "fox", " two  spaces\n", "é 🦊 世界 \u{FFFD}"] {
        let ids = tokenizer.encode(text).expect("text");
        assert_eq!(ids.len(), text.len());
        assert_eq!(tokenizer.decode(&ids).expect("ids"), text);
    }
}

#[test]
fn a_text_begins_with_one_begin_of_text_whoever_asks_for_it() {
    let asks = |post_processor: bool, config: Option<Value>| -> Vec<Vec<u32>> {
        let folder = Folder::new("bos");
        let mut json = byte_fallback();
        if !post_processor {
            json["post_processor"] = Value::Null;
        }
        folder.write("tokenizer.json", &json.to_string());
        if let Some(config) = config {
            folder.write("tokenizer_config.json", &config.to_string());
        }
        let tokenizer = folder.tokenizer();
        let texts = ["a", "<s>a", "", "<s><s>a"];
        texts
            .map(|text| tokenizer.encode(text).expect("text"))
            .to_vec()
    };
    let a = 259;
    let once = [vec![0, a], vec![0, a], vec![0], vec![0, 0, a]];
    let own = [vec![a], vec![0, a], vec![], vec![0, 0, a]];
    let named = json!({"bos_token": "<s>"});
    let yes = json!({"bos_token": {"content": "<s>"}, "add_bos_token": true});
    let no = json!({"bos_token": "<s>", "add_bos_token": false});
    assert_eq!(asks(true, Some(named.clone())), once);
    assert_eq!(asks(true, Some(yes.clone())), once);
    assert_eq!(asks(true, Some(no.clone())), once);
    assert_eq!(asks(false, Some(yes)), once);
    assert_eq!(asks(false, Some(no)), own);
    assert_eq!(asks(false, Some(named)), own);
    assert_eq!(asks(false, None), own);
    assert_eq!(asks(true, None)[0], [0, a]);
}

#[test]
fn truncation_and_padding_of_the_file_are_off() {
    let folder = Folder::new("truncation");
    let mut json = byte_fallback();
    json["truncation"] = json!({
        "direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0,
    });
    json["padding"] = json!({
        "strategy": {"Fixed": 20}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 1,
        "pad_type_id": 0, "pad_token": "</s>",
    });
    folder.write("tokenizer.json", &json.to_string());
    let ids = folder.tokenizer().encode("aaaaa").expect("text");
    assert_eq!(ids, [0, 259, 259, 259, 259, 259]);
}

#[test]
fn bad_folders_are_refused_with_the_file() {
    let file = |error: &TextError, name: &str| {
        assert!(error.to_string().contains(name), "{error}");
    };
    let folder = Folder::new("bad-folder");
    let error = folder.refused();
    assert!(matches!(error, TextError::Io { .. }), "{error:?}");
    file(&error, "tokenizer.json");
    folder.write("tokenizer.json", "{}");
    let error = folder.refused();
    assert!(matches!(error, TextError::Tokenizer { .. }), "{error:?}");
    file(&error, "tokenizer.json");

    folder.write("tokenizer.json", &byte_fallback().to_string());
    for bad in ["[1]", "{", "\u{0}"] {
        folder.write("tokenizer_config.json", bad);
        let error = folder.refused();
        assert!(matches!(error, TextError::Json { .. }), "{error:?}");
        file(&error, "tokenizer_config.json");
    }
    for (field, bad) in [
        ("bos_token", json!({"bos_token": 7})),
        ("bos_token", json!({"bos_token": {"id": 7}})),
        ("add_bos_token", json!({"add_bos_token": "yes"})),
        ("chat_template", json!({"chat_template": {"default": "x"}})),
    ] {
        folder.write("tokenizer_config.json", &bad.to_string());
        let error = folder.refused();
        assert!(
            matches!(&error, TextError::Field { field: found, .. } if *found == field),
            "{error:?}"
        );
        file(&error, "tokenizer_config.json");
    }
    for bos in [None, Some("<bos>")] {
        let config = json!({"bos_token": bos, "add_bos_token": true});
        folder.write("tokenizer_config.json", &config.to_string());
        let error = folder.refused();
        assert!(
            matches!(&error, TextError::UnknownBos { token, .. } if token.as_deref() == bos),
            "{error:?}"
        );
        file(&error, "tokenizer_config.json");
    }
    folder.write("tokenizer_config.json", "{}");
    fs::write(folder.0.join("chat_template.jinja"), [0xFF]).expect("written");
    let error = folder.refused();
    assert!(matches!(error, TextError::Io { .. }), "{error:?}");
    file(&error, "chat_template.jinja");
}

#[test]
fn what_is_no_regular_file_is_refused() {
    for name in [
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    ] {
        let folder = Folder::new("irregular");
        if name != "tokenizer.json" {
            folder.write("tokenizer.json", &byte_fallback().to_string());
        }
        fs::create_dir(folder.0.join(name)).expect("a folder");
        let error = folder.refused();
        assert!(matches!(error, TextError::Io { .. }), "{error:?}");
        assert!(error.to_string().contains(name), "{error}");
    }
}

#[test]
fn a_character_is_shown_when_its_last_byte_is_there() {
    let tokenizer = tiny();
    let ids = tokenizer.encode("a🦊é").expect("text");
    assert_eq!(
        pieces(&tokenizer, &ids),
        ["a", "", "", "", "🦊", "", "é", ""]
    );
    // Cut off in the middle: the end shows what decoding shows.
    assert_eq!(pieces(&tokenizer, &ids[..3]), ["a", "", "", "\u{FFFD}"]);
}

#[test]
fn bytes_that_are_no_text_do_not_hold_up_what_follows() {
    let tokenizer = tiny();
    let id = |text: &str, at: usize| tokenizer.encode(text).expect("text")[at];
    // A byte that only goes on with a character, and no character before it.
    let on = id("é", 1);
    let ids = [on, on, on, id("x", 0)];
    assert_eq!(
        pieces(&tokenizer, &ids),
        ["", "\u{FFFD}", "\u{FFFD}", "\u{FFFD}x", ""]
    );
}

#[test]
fn a_run_of_byte_tokens_is_shown_when_it_ends() {
    let tokenizer = Folder::byte_fallback("run").tokenizer();
    let byte = |byte: u32| 2 + byte;
    let (a, fox) = (259, 261);
    // A fox in bytes, then a piece.
    let ids = [fox, byte(0xF0), byte(0x9F), byte(0xA6), byte(0x8A), 1, fox];
    let found = pieces(&tokenizer, &ids);
    assert_eq!(found, ["fox", "", "", "", "", "", "🦊 fox", ""]);
    // Bytes that are good by themselves and not with those that follow.
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
fn every_decoder_streams_what_it_decodes() {
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
    fn pieces_together_are_the_text_on_random_bytes(
        ids in prop::collection::vec(0u32..256, 0..40),
    ) {
        streams(&tiny(), &ids);
    }

    #[test]
    fn pieces_together_are_the_text_of_characters_in_bytes(text in "\\PC{0,12}") {
        let (tokenizer, text) = (tiny(), text.replace('\u{FFFD}', "?"));
        let ids = tokenizer.encode(&text).unwrap();
        for piece in pieces(&tokenizer, &ids) {
            prop_assert!(text.contains(&piece) && (piece.chars().count() <= 1));
        }
        streams(&tokenizer, &ids);
    }

    #[test]
    fn pieces_together_are_the_text_where_bytes_fall_back(
        ids in prop::collection::vec(
            prop_oneof![0u32..2, 2u32..258, 258u32..266, Just(0xF0 + 2), Just(0x9F + 2), 9990u32..9999],
            0..40,
        ),
    ) {
        streams(&Folder::byte_fallback("fallback").tokenizer(), &ids);
    }

    #[test]
    fn stops_do_not_depend_on_how_the_text_is_cut(
        text in "[abc\u{e9}]{0,24}",
        list in prop::collection::vec("[abc\u{e9}]{1,4}", 0..4),
        sizes in prop::collection::vec(1usize..5, 24),
    ) {
        // The oracle looks at the whole text: the first place, there the first of the list.
        let oracle = text.char_indices().find_map(|(at, _)| {
            let stop = list.iter().find(|stop| text[at..].starts_with(&***stop))?;
            Some((text[..at].to_owned(), stop.as_str()))
        });
        let mut stops = Stops::new();
        for stop in &list {
            stops.add(stop).unwrap();
        }
        let (mut shown, mut rest) = (String::new(), text.chars().peekable());
        for size in sizes {
            let piece: String = rest.by_ref().take(size).collect();
            shown += &stops.push(&piece);
            prop_assert!(text.starts_with(&shown));
        }
        shown += &stops.finish();
        match oracle {
            Some((before, stop)) => {
                prop_assert_eq!(shown, before);
                prop_assert_eq!(stops.found(), Some(stop));
            }
            None => {
                prop_assert_eq!(shown, text);
                prop_assert_eq!(stops.found(), None);
            }
        }
    }
}

fn stops(list: &[&str]) -> Stops {
    let mut stops = Stops::new();
    for stop in list {
        stops.add(*stop).expect("not empty");
    }
    stops
}

#[test]
fn a_stop_string_is_never_shown() {
    let mut end = stops(&["</end>"]);
    assert_eq!(end.push("a < b </"), "a < b ");
    assert_eq!(end.push("en"), "");
    assert_eq!(end.push("emy> </end"), "</enemy> ");
    assert_eq!(end.push("> behind"), "");
    assert_eq!(end.found(), Some("</end>"));
    assert_eq!(end.push("more") + &end.finish(), "");
}

#[test]
fn text_held_back_is_shown_when_no_more_comes() {
    let mut end = stops(&["END"]);
    assert_eq!(end.push("the EN"), "the ");
    assert_eq!(end.finish(), "EN");
    assert_eq!(end.found(), None);
}

#[test]
fn the_stop_that_begins_first_wins_and_there_the_one_listed_first() {
    let found = |list: &[&str], text: &str| {
        let mut stops = stops(list);
        let mut shown: String = text.chars().map(|c| stops.push(&c.to_string())).collect();
        shown += &stops.finish();
        (shown, stops.found().map(str::to_owned))
    };
    let some = |shown: &str, stop: &str| (shown.to_owned(), Some(stop.to_owned()));
    assert_eq!(found(&["c", "bcd"], "abcd"), some("a", "bcd"));
    assert_eq!(found(&["c", "bcd"], "abce"), some("ab", "c"));
    assert_eq!(found(&["b", "bc"], "abc"), some("a", "b"));
    assert_eq!(found(&["bc", "b"], "abc"), some("a", "bc"));
    assert_eq!(found(&["bc", "b"], "ab"), some("a", "b"));
    assert_eq!(found(&["aab"], "aaab"), some("a", "aab"));
}

#[test]
fn an_empty_stop_string_is_refused() {
    assert!(matches!(Stops::new().add(""), Err(TextError::EmptyStop)));
}

/// A decoder over the byte tokenizer's ids below 97, and ids sampled from it after a prompt.
fn sampled<'a>(decoder: &'a Decoder, cache: &'a mut FullKv) -> Generation<'a, FullKv> {
    let sampling = Sampling::new().with_temperature(1.0).expect("in range");
    let generation = Generation::new(decoder, cache, &[1, 2, 3]).expect("a prompt");
    generation
        .with_sampling(sampling.with_seed(3))
        .with_max_new(30)
}

#[test]
fn generated_text_ends_before_a_stop_string_and_tells() {
    let (decoder, tokenizer) = (decoder(2), tiny());
    let mut cache = FullKv::new(&decoder.shape());
    let mut all = TextGeneration::new(sampled(&decoder, &mut cache), &tokenizer);
    let text = all.by_ref().collect::<Result<String, _>>().expect("text");
    assert_eq!(all.finish_reason(), Some(FinishReason::Length));
    assert_eq!(all.ids().len(), 30);
    assert_eq!(tokenizer.decode(all.ids()).expect("ids"), text);
    assert!(text.is_ascii() && text.len() == 30, "{text:?}");

    let stop = &text[12..15];
    let at = text.find(stop).expect("it is in there");
    cache.clear();
    let stopped = TextGeneration::new(sampled(&decoder, &mut cache), &tokenizer);
    let mut stopped = stopped.with_stop(stop).expect("not empty");
    assert_eq!(stopped.finish_reason(), None);
    let pieces: Vec<String> = stopped.by_ref().collect::<Result<_, _>>().expect("text");
    assert_eq!(pieces.concat(), text[..at]);
    assert!(pieces.iter().all(|piece| !piece.is_empty()));
    let reason = FinishReason::StopString(stop.to_owned());
    assert_eq!(stopped.finish_reason(), Some(reason));
    assert_eq!(
        stopped.ids().len(),
        at + 3,
        "nothing is generated behind it"
    );
    assert!(stopped.next().is_none());
}

#[test]
fn the_end_of_text_adds_no_text() {
    let (decoder, tokenizer) = (decoder(2), tiny());
    let mut cache = FullKv::new(&decoder.shape());
    let ids: Vec<u32> = sampled(&decoder, &mut cache)
        .collect::<Result<_, _>>()
        .expect("finite");
    let at = (4..30)
        .find(|&i| !ids[..i].contains(&ids[i]))
        .expect("a new id");
    cache.clear();
    let eos = [ids[at]];
    let ended = sampled(&decoder, &mut cache).with_eos(&eos);
    let mut ended = TextGeneration::new(ended, &tokenizer);
    let text = ended.by_ref().collect::<Result<String, _>>().expect("text");
    assert_eq!(text, tokenizer.decode(&ids[..at]).expect("ids"));
    let reason = FinishReason::EndOfText(ids[at]);
    assert_eq!(ended.finish_reason(), Some(reason));
    assert_eq!(ended.ids(), &ids[..=at]);
}

#[test]
fn an_error_ends_generated_text_once() {
    let (decoder, tokenizer) = (decoder(2), tiny());
    let mut cache = FullKv::new(&decoder.shape());
    let generation = Generation::new(&decoder, &mut cache, &[97]).expect("a prompt");
    let mut text = TextGeneration::new(generation, &tokenizer);
    let error = text.next().expect("one item");
    assert!(matches!(error, Err(TextError::Generate(_))), "{error:?}");
    assert!(text.next().is_none());
    assert_eq!(text.finish_reason(), None);
    // One that had failed before.
    let mut failed = Generation::new(&decoder, &mut cache, &[97]).expect("a prompt");
    assert!(failed.next().expect("one item").is_err());
    assert!(TextGeneration::new(failed, &tokenizer).next().is_none());
}

#[test]
fn a_conversation_goes_on_from_the_common_prefix() {
    let (decoder, folder) = (decoder(2), Folder::tiny("turns"));
    let template = "{% for m in messages %}{{ m.role[0] ~ m.content }};{% endfor %}";
    folder.write("chat_template.jinja", template);
    let tokenizer = folder.tokenizer();
    let mut messages = vec![Message::new("user", "one")];
    let first = tokenizer.encode_chat(&messages, true).expect("good");
    messages.push(Message::new("assistant", "two"));
    let second = tokenizer.encode_chat(&messages, true).expect("good");
    assert_eq!(second[..first.len()], first);
    let mut cache = FullKv::new(&decoder.shape());
    let next = |cache: &mut FullKv, ids: &[u32]| {
        let generation = Generation::new(&decoder, cache, ids).expect("a prompt");
        generation.with_max_new(3).collect::<Result<Vec<_>, _>>()
    };
    let cold = next(&mut cache, &second).expect("finite");
    cache.clear();
    next(&mut cache, &first).expect("finite");
    cache.truncate(&[first.len()]).expect("back");
    let warm = next(&mut cache, &second[first.len()..]).expect("finite");
    assert_eq!(warm, cold);
}

#[derive(Deserialize)]
struct Case {
    kind: String,
    prompt: Option<String>,
    prompt_ids: Vec<u32>,
    new_ids: Vec<u32>,
    text: String,
}

/// The tokenizer of a real model with what transformers made of it, or a visible note.
fn real(test: &str, model: &str) -> Option<(Tokenizer, Vec<Case>)> {
    let dir = models(test)?.join(model);
    let json: Value = serde_json::from_str(include_str!("../golden/real.json")).expect("JSON");
    let cases = serde_json::from_value(json["cases"][model].clone()).expect("cases");
    Some((Tokenizer::from_dir(dir).expect("a model folder"), cases))
}

/// Checks the ids of every prompt, the text of every answer, and that it streams.
fn equals_transformers(tokenizer: &Tokenizer, cases: &[Case], kinds: [usize; 2]) {
    let mut tested = [0, 0];
    for case in cases {
        let text = tokenizer.decode(&case.new_ids).expect("ids");
        assert_eq!(text, case.text);
        streams(tokenizer, &case.new_ids);
        streams(tokenizer, &case.prompt_ids);
        let Some(prompt) = &case.prompt else {
            continue;
        };
        let chat = case.kind == "chat";
        let ids = if chat {
            tokenizer.encode_chat(&[Message::new("user", prompt)], true)
        } else {
            tokenizer.encode(prompt)
        };
        assert_eq!(ids.expect("text"), case.prompt_ids, "{prompt}");
        tested[usize::from(chat)] += 1;
    }
    assert_eq!(tested, kinds, "plain prompts and chats");
}

/// Checks streams of many ids spread over the vocabulary, and of characters that fall into bytes.
fn streams_everything(tokenizer: &Tokenizer, vocab: u32) {
    let mut id = 1;
    for count in 1..200 {
        let ids: Vec<u32> = (0..count % 40)
            .map(|_| {
                id = (id * 48271_u64) % 0x7fff_ffff;
                (id % u64::from(vocab)) as u32
            })
            .collect();
        streams(tokenizer, &ids);
    }
    let rare = "👩‍👩‍👧 🦊𓀀𒀀\u{e000} 世界 ßﬁ";
    let ids = tokenizer.encode(rare).expect("text");
    assert_eq!(tokenizer.decode(&ids).expect("ids"), rare);
    for at in 0..=ids.len() {
        streams(tokenizer, &ids[..at]);
        streams(tokenizer, &ids[at..]);
    }
}

#[test]
fn smollm2_text_is_that_of_transformers() {
    let Some((tokenizer, cases)) = real(
        "smollm2_text_is_that_of_transformers",
        "smollm2-135m-instruct",
    ) else {
        return;
    };
    equals_transformers(&tokenizer, &cases, [2, 1]);
    streams_everything(&tokenizer, 49152);
}

#[test]
fn gemma_text_is_that_of_transformers() {
    let Some((tokenizer, cases)) = real("gemma_text_is_that_of_transformers", "gemma3-270m") else {
        return;
    };
    equals_transformers(&tokenizer, &cases, [2, 0]);
    streams_everything(&tokenizer, 262_144);
    // One begin of text, whoever writes it.
    let ids = tokenizer.encode("<bos>Hi").expect("text");
    assert_eq!(ids, tokenizer.encode("Hi").expect("text"));
    assert_eq!(ids.iter().filter(|&&id| id == 2).count(), 1);
}

#[test]
fn what_makes_text_can_be_sent_and_shown() {
    fn ok<T: Send + std::fmt::Debug>() {}
    ok::<Tokenizer>();
    ok::<TextStream<'_>>();
    ok::<Stops>();
    ok::<TextGeneration<'_, FullKv>>();
    ok::<TextGeneration<'_, dyn CacheBackend>>();
    fn error<T: Send + Sync + std::error::Error + 'static>() {}
    error::<TextError>();
    error::<kv_direct::generate::SamplingError>();
}

/// The context of the model ends a text in the middle of what could be a stop string.
#[test]
fn what_was_held_back_is_shown_before_an_error() {
    let tokenizer = Tokenizer::from_dir(TINY).expect("the built-in tokenizer");
    let mut config = DecoderConfig::new(256, 32, 1, 2, 2);
    config.max_positions = 12;
    let decoder = crate::support::random(&config);
    let text = |stop: Option<String>| {
        let mut cache = FullKv::new(&decoder.shape());
        let ids = Generation::new(&decoder, &mut cache, &[72, 105]).expect("a prompt");
        let mut pieces = TextGeneration::new(ids, &tokenizer);
        if let Some(stop) = stop {
            pieces = pieces.with_stop(stop).expect("a stop string");
        }
        let (mut shown, mut errors) = (String::new(), 0);
        for piece in pieces.by_ref() {
            match piece {
                Ok(piece) => shown += &piece,
                Err(error) => {
                    assert!(matches!(error, TextError::Generate(_)), "{error:?}");
                    errors += 1;
                }
            }
        }
        assert_eq!((errors, pieces.finish_reason()), (1, None));
        assert_eq!(shown, tokenizer.decode(pieces.ids()).expect("ids"));
        shown
    };
    let plain = text(None);
    assert!(!plain.is_empty());
    assert_eq!(text(Some(format!("{plain}!"))), plain);
}
