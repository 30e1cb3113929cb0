//! Small `config.json`s of every family, with what is read of them.

use kv_direct::{
    model::DecoderConfig,
    pretrained::{LoadError, config},
};
use serde_json::{Value, json};

use crate::support::folder::Folder;

pub const TYPES: [&str; 5] = ["llama", "qwen2", "qwen3", "gemma3_text", "gemma3"];

/// A small good configuration; in a wrapper's `text_config` for `gemma3`.
pub fn base(model_type: &str) -> Value {
    let text = json!({ "model_type": model_type, "vocab_size": 97, "hidden_size": 64, "head_dim": 16,
        "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 256, "rope_theta": 1e6 });
    if model_type != "gemma3" {
        return text;
    }
    let mut wrapper = json!({ "model_type": "gemma3", "text_config": text });
    wrapper["text_config"]["model_type"] = json!("gemma3_text");
    wrapper
}

/// `base` with fields of the text model changed.
fn with(model_type: &str, fields: &Value) -> Value {
    let mut json = base(model_type);
    let text = if model_type == "gemma3" {
        &mut json["text_config"]
    } else {
        &mut json
    };
    for (field, value) in fields.as_object().expect("fields") {
        text[field] = value.clone();
    }
    json
}

pub fn read(json: &Value) -> Result<DecoderConfig, LoadError> {
    let thread = format!("{:?}", std::thread::current().id());
    let folder = Folder::empty(&format!("config-{}", thread.replace(['(', ')'], "-")));
    folder.write("config.json", json);
    config(&folder.0)
}

#[track_caller]
pub fn good(model_type: &str, fields: &Value) -> DecoderConfig {
    read(&with(model_type, fields)).unwrap_or_else(|error| panic!("{model_type} {fields}: {error}"))
}

#[track_caller]
pub fn refused(model_type: &str, fields: &Value) -> LoadError {
    read(&with(model_type, fields)).expect_err(&format!("{model_type} {fields}"))
}

/// Checks that the error names `field = value`, whichever kind it is.
#[track_caller]
pub fn names(error: &LoadError, field: &str, value: &str) {
    let (found, shown) = match error {
        LoadError::Unsupported { field, value, .. }
        | LoadError::InvalidField { field, value, .. }
        | LoadError::Conflict { field, value, .. } => (field, value),
        other => panic!("{other}"),
    };
    let text = found.strip_prefix("text_config.").unwrap_or(found);
    assert_eq!((text, &shown[..]), (field, value), "{error}");
    assert!(
        error.to_string().contains(&format!("{found} = {value}")),
        "{error}"
    );
}
