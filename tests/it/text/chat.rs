//! Chat templates against the strings that transformers renders.

use std::collections::{BTreeMap, HashSet};

use kv_direct::text::{Message, TextError};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::support::tokenizer_folder::Folder;

/// Renderings of transformers and jinja2, in the versions that the file names.
#[derive(Deserialize)]
struct Golden {
    templates: BTreeMap<String, GoldenTemplate>,
    conversations: Vec<Vec<Turn>>,
    renderings: Vec<Rendering>,
}

#[derive(Deserialize)]
struct GoldenTemplate {
    source: String,
    tokens: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct Turn {
    role: String,
    content: String,
}

#[derive(Deserialize)]
struct Rendering {
    template: String,
    conversation: usize,
    add_generation_prompt: bool,
    text: Option<String>,
    raised: Option<String>,
}

fn hello() -> Vec<Message> {
    vec![Message::new("user", "Hello")]
}

/// A folder with this `tokenizer_config.json`.
fn folder(test: &str, config: &Value) -> Folder {
    let folder = Folder::tiny(test);
    folder.write("tokenizer_config.json", &config.to_string());
    folder
}

#[test]
fn renderings_equal_those_of_transformers() {
    let golden: Golden =
        serde_json::from_str(include_str!("../../golden/chat.json")).expect("golden data");
    let mut tested = HashSet::new();
    for (name, template) in &golden.templates {
        let mut config = json!(template.tokens);
        config["chat_template"] = json!(template.source);
        let tokenizer = folder(&format!("chat-{name}"), &config).tokenizer();
        for case in golden.renderings.iter().filter(|r| &r.template == name) {
            let turns = golden.conversations[case.conversation].iter();
            let messages: Vec<Message> = turns
                .map(|turn| Message::new(&*turn.role, &*turn.content))
                .collect();
            let found = tokenizer.render(&messages, case.add_generation_prompt);
            let place = format!("{name}, conversation {}", case.conversation);
            match (found, &case.text, &case.raised) {
                (Ok(found), Some(text), None) => assert_eq!(&found, text, "{place}"),
                (Err(TextError::Raised { message }), None, Some(raised)) => {
                    assert_eq!(&message, raised, "{place}");
                }
                (found, ..) => panic!("{place}: {found:?}"),
            }
            tested.insert((name, case.text.is_some()));
        }
    }
    assert_eq!(golden.templates.len(), 5);
    assert_eq!(tested.len(), 6, "every template, and one that also refuses");
}

#[test]
fn messages_are_encoded_without_a_second_begin_of_text() {
    let template = "{{ bos_token }}{{ messages[0].content }}";
    let folder = Folder::byte_fallback("chat-bos");
    let config = json!({"bos_token": "<s>", "add_bos_token": true, "chat_template": template});
    folder.write("tokenizer_config.json", &config.to_string());
    let tokenizer = folder.tokenizer();
    let ids = tokenizer.encode_chat(&[Message::new("user", "ab")], true);
    let ids = ids.expect("a good template");
    assert_eq!(ids.iter().filter(|&&id| id == 0).count(), 1, "{ids:?}");
    assert_eq!(tokenizer.encode("<s>ab").expect("text"), ids);
}

#[test]
fn a_folder_without_a_template_is_an_error() {
    let folder = Folder::tiny("no-template");
    let without = |config: Option<Value>| {
        if let Some(config) = config {
            folder.write("tokenizer_config.json", &config.to_string());
        }
        match folder.tokenizer().render(&hello(), true) {
            Err(TextError::NoTemplate { dir }) => assert_eq!(dir, folder.0),
            other => panic!("{other:?}"),
        }
    };
    without(None);
    without(Some(json!({"chat_template": null})));
    without(Some(
        json!({"chat_template": [{"name": "tools", "template": "x"}]}),
    ));
}

#[test]
fn the_template_file_wins_then_the_default_template() {
    let named = json!({"chat_template": [
        {"name": "tools", "template": "with tools"},
        {"name": "default", "template": "by default"},
    ]});
    let folder = folder("template-files", &named);
    let render = || folder.tokenizer().render(&hello(), false).expect("good");
    assert_eq!(render(), "by default");
    folder.write("chat_template.jinja", "of {{ messages[0].role }}\r\n\n");
    assert_eq!(render(), "of user\n");
}

#[test]
fn a_bad_template_fails_rendering_only() {
    for bad in ["{% if %}", "{{ 1 + 'a' }}", "{{ messages[9].role }}"] {
        let folder = folder("bad-template", &json!({"chat_template": bad}));
        let tokenizer = folder.tokenizer();
        assert!(tokenizer.encode("text").is_ok());
        let error = tokenizer.render(&hello(), true).expect_err(bad);
        assert!(matches!(error, TextError::Template { .. }), "{error:?}");
        assert!(
            error.to_string().contains(&folder.0.display().to_string()),
            "{error}"
        );
        assert!(std::error::Error::source(&error).is_some());
    }
}

#[test]
fn endless_recursion_of_a_template_is_stopped() {
    let endless = "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}";
    let tokenizer = folder("endless", &json!({"chat_template": endless})).tokenizer();
    let error = tokenizer.render(&hello(), true).expect_err("endless");
    assert!(matches!(error, TextError::Template { .. }), "{error:?}");
}

#[test]
fn special_tokens_come_as_strings_or_objects_from_either_file() {
    let template = "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}|{{ pad_token is defined }}";
    let config = json!({
        "bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": false}, "pad_token": null,
        "chat_template": template,
    });
    let folder = folder("special", &config);
    let render = || folder.tokenizer().render(&hello(), false).expect("good");
    assert_eq!(render(), "<s>|</s>||False");
    // The older file counts, unless the newer one lists the added tokens.
    folder.write(
        "special_tokens_map.json",
        r#"{"bos_token": "<old>", "unk_token": {"content": "<unk>"}}"#,
    );
    assert_eq!(render(), "<old>|</s>|<unk>|False");
    let mut newer = config;
    newer["added_tokens_decoder"] = json!({});
    folder.write("tokenizer_config.json", &newer.to_string());
    assert_eq!(render(), "<s>|</s>||False");
}

#[test]
fn strftime_now_writes_the_date_of_today() {
    let template = "{{ strftime_now('%d %b %Y') }} {{ strftime_now('%Y-%m-%d') }}";
    let tokenizer = folder("date", &json!({"chat_template": template})).tokenizer();
    let text = tokenizer.render(&hello(), false).expect("good");
    let parts: Vec<&str> = text.split(' ').collect();
    assert_eq!(parts.len(), 4, "{text}");
    let (day, month, year) = (parts[0], parts[1], parts[2]);
    let months = [
        "Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec",
    ];
    let number = 1 + months.iter().position(|m| *m == month).expect("a month");
    assert_eq!(parts[3], format!("{year}-{number:02}-{day}"));
}

#[test]
fn a_huge_indent_of_tojson_is_refused() {
    for indent in ["65", "100000000000", "9223372036854775807"] {
        let template = format!("{{{{ messages | tojson(indent={indent}) }}}}");
        let folder = folder("indent", &json!({ "chat_template": template }));
        let error = folder
            .tokenizer()
            .render(&hello(), false)
            .expect_err("refused");
        assert!(matches!(error, TextError::Template { .. }), "{error:?}");
    }
}
