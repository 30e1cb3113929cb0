//! Reads the configuration files beside `tokenizer.json`.

use std::path::Path;

use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Map, Value};

use super::TextError;
use crate::files;

/// The names of special tokens that a chat template may use.
const NAMES: [&str; 7] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
];

/// The fields that the tokenizer needs.
#[derive(Debug, Default)]
pub(super) struct Config {
    /// The special tokens that exist, by name.
    pub(super) tokens: Vec<(&'static str, String)>,
    pub(super) add_bos: bool,
    pub(super) template: Option<String>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Token {
    Text(String),
    Added { content: String },
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Templates {
    One(String),
    Named(Vec<Named>),
}

#[derive(Deserialize)]
struct Named {
    name: String,
    template: String,
}

impl Config {
    /// Reads the files of the folder. A missing file counts as empty.
    pub(super) fn read(dir: &Path) -> Result<Self, TextError> {
        let path = dir.join("tokenizer_config.json");
        let mut json = object(&path)?;
        let mut config = Self {
            tokens: Vec::new(),
            add_bos: field(&path, &mut json, "add_bos_token")?.unwrap_or(false),
            template: field(&path, &mut json, "chat_template")?.and_then(
                |templates| match templates {
                    Templates::One(template) => Some(template),
                    Templates::Named(named) => {
                        let mut named = named.into_iter();
                        let default = named.find(|template| template.name == "default")?;
                        Some(default.template)
                    }
                },
            ),
        };
        // An older file, which is used if the newer one does not list the added tokens.
        let older = dir.join("special_tokens_map.json");
        let mut map = if json.contains_key("added_tokens_decoder") {
            Map::new()
        } else {
            object(&older)?
        };
        for name in NAMES {
            let newer = field(&path, &mut json, name)?;
            let token = field(&older, &mut map, name)?.or(newer);
            if let Some(Token::Text(content) | Token::Added { content }) = token {
                config.tokens.push((name, content));
            }
        }
        let path = dir.join("chat_template.jinja");
        if path.exists() {
            let text = files::read(&path).and_then(|bytes| {
                String::from_utf8(bytes).map_err(|e| std::io::Error::other(e.utf8_error()))
            });
            config.template = Some(text.map_err(|source| TextError::Io { path, source })?);
        }
        Ok(config)
    }

    /// The special token with this name.
    pub(super) fn token(&self, name: &str) -> Option<&str> {
        let mut tokens = self.tokens.iter();
        let found = tokens.find(|(other, _)| *other == name)?;
        Some(&found.1)
    }
}

/// Reads the JSON object in a file; an empty one if the file does not exist.
fn object(path: &Path) -> Result<Map<String, Value>, TextError> {
    if !path.exists() {
        return Ok(Map::new());
    }
    let bytes = files::read(path).map_err(|source| TextError::Io {
        path: path.into(),
        source,
    })?;
    serde_json::from_slice(&files::json(bytes)).map_err(|source| TextError::Json {
        path: path.into(),
        source,
    })
}

/// Removes and parses a field that may be missing or null.
fn field<T: DeserializeOwned>(
    path: &Path,
    json: &mut Map<String, Value>,
    field: &'static str,
) -> Result<Option<T>, TextError> {
    let value = json.remove(field).unwrap_or_default();
    serde_json::from_value(value).map_err(|source| TextError::Field {
        path: path.into(),
        field,
        source,
    })
}
