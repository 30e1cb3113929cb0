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
