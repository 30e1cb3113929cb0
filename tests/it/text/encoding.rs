//! Encoding text, and tokenizer folders that are refused.

use std::fs;

use kv_direct::text::TextError;
use serde_json::{Value, json};

use crate::support::tokenizer_folder::{Folder, byte_fallback, tiny};

#[test]
fn decoding_returns_the_encoded_text() {
    let tokenizer = tiny();
    for text in ["", "fox", " two  spaces\n", "é 🦊 世界 \u{FFFD}"] {
        let ids = tokenizer.encode(text).expect("text");
        assert_eq!(ids.len(), text.len());
        assert_eq!(tokenizer.decode(&ids).expect("ids"), text);
    }
}

#[test]
fn a_text_begins_with_one_begin_of_text() {
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
fn a_part_of_a_text_has_no_begin_of_text() {
    let tokenizer = Folder::byte_fallback("plain").tokenizer();
    assert_eq!(tokenizer.encode("ab").expect("text"), [0, 259, 260]);
    assert_eq!(tokenizer.encode_plain("ab").expect("text"), [259, 260]);
    assert_eq!(tokenizer.encode_plain("").expect("text"), [0; 0]);
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
    let config = json!({"bos_token": "<bos>", "add_bos_token": true});
    folder.write("tokenizer_config.json", &config.to_string());
    let error = folder.refused();
    assert!(
        matches!(&error, TextError::UnknownBos { token, .. } if token == "<bos>"),
        "{error:?}"
    );
    file(&error, "tokenizer_config.json");
    folder.write("tokenizer_config.json", "{}");
    fs::write(folder.0.join("chat_template.jinja"), [0xFF]).expect("written");
    let error = folder.refused();
    assert!(matches!(error, TextError::Io { .. }), "{error:?}");
    file(&error, "chat_template.jinja");
}

#[test]
fn irregular_files_are_refused() {
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
fn a_folder_without_a_begin_of_text_adds_none() {
    let folder = Folder::tiny("no-bos");
    for config in [
        json!({"add_bos_token": true, "bos_token": null}),
        json!({"add_bos_token": true}),
    ] {
        folder.write("tokenizer_config.json", &config.to_string());
        assert_eq!(folder.tokenizer().encode("ab").expect("text").len(), 2);
    }
}

#[test]
fn the_end_of_text_that_the_folder_names_is_known() {
    let folder = Folder::byte_fallback("eos");
    assert_eq!(folder.tokenizer().eos(), None);
    let config = json!({"eos_token": {"content": "</s>"}});
    folder.write("tokenizer_config.json", &config.to_string());
    assert_eq!(folder.tokenizer().eos(), Some(1));
}

/// Files that make the tokenizers crate panic, when it reads them or when it uses them.
#[test]
fn tokenizers_that_panic_are_errors() {
    let mut cycle = byte_fallback();
    cycle["model"]["vocab"] = json!({"<s>": 0, "</s>": 1, "a": 2, "aa": 3});
    cycle["model"]["merges"] = json!(["a a", "aa a"]);
    let mut normalizer = byte_fallback();
    normalizer["normalizer"] = json!({"type": "Precompiled", "precompiled_charsmap": null});
    let mut processor = byte_fallback();
    processor["post_processor"]["special_tokens"] = json!({});
    for bad in [cycle, normalizer, processor] {
        let folder = Folder::new("panic");
        folder.write("tokenizer.json", &bad.to_string());
        let error = folder.refused();
        assert!(matches!(error, TextError::Tokenizer { .. }), "{error:?}");
        assert!(error.to_string().contains("tokenizer.json"), "{error}");
    }
}

/// A byte-level tokenizer with an added token whose letters stand for bytes in other tokens.
fn byte_level(test: &str) -> Folder {
    let folder = Folder::tiny(test);
    let path = folder.0.join("tokenizer.json");
    let text = fs::read_to_string(&path).expect("a tokenizer");
    let mut json: Value = serde_json::from_str(&text).expect("JSON");
    let count = json["model"]["vocab"]
        .as_object()
        .expect("a vocabulary")
        .len();
    let tokens = json["added_tokens"].as_array_mut().expect("tokens");
    let first = count + tokens.len();
    for (at, (content, special)) in [("đem", false), ("<stop>", true)].into_iter().enumerate() {
        tokens.push(json!({
            "id": first + at, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": special,
        }));
    }
    folder.write("tokenizer.json", &json.to_string());
    folder
}

#[test]
fn added_tokens_stand_for_their_text() {
    let tokenizer = byte_level("added").tokenizer();
    let text = "xin đem đi\n é";
    let ids = tokenizer.encode(text).expect("text");
    assert!(ids.len() < text.len(), "the added token is one id");
    assert_eq!(tokenizer.decode(&ids).expect("ids"), text);
    let mut stream = tokenizer.stream();
    let mut shown = String::new();
    for id in ids {
        shown += &stream.push(id).expect("an id");
    }
    assert_eq!(shown + &stream.finish().expect("the end"), text);
}

#[test]
fn white_space_that_would_not_be_split_is_refused() {
    let folder = Folder::tiny("spaces");
    let path = folder.0.join("tokenizer.json");
    let text = fs::read_to_string(&path).expect("a tokenizer");
    let mut json: Value = serde_json::from_str(&text).expect("JSON");
    json["pre_tokenizer"] = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    folder.write("tokenizer.json", &json.to_string());
    let tokenizer = folder.tokenizer();
    for space in [" ", "\t", "\n"] {
        let error = tokenizer.encode(&format!("a{}b", space.repeat(1_100_000)));
        assert!(matches!(error, Err(TextError::Encode { .. })));
    }
    let text = format!("a{}b", " ".repeat(400_000));
    let ids = tokenizer.encode(&text).expect("few enough");
    assert_eq!(tokenizer.decode(&ids).expect("ids"), text);
}

#[test]
fn numbers_that_are_no_json_are_read_where_nobody_needs_them() {
    let folder = Folder::tiny("infinity");
    let config = r#"{"model_max_length": Infinity, "x": [-Infinity, NaN, "NaN \" Infinity"], "bos_token": null}"#;
    folder.write("tokenizer_config.json", config);
    folder.tokenizer();
    folder.write("tokenizer_config.json", r#"{"add_bos_token": NaN}"#);
    let error = folder.refused();
    assert!(
        matches!(
            error,
            TextError::Field {
                field: "add_bos_token",
                ..
            }
        ),
        "{error:?}"
    );
}
