//! Chat templates, in an environment that equals the jinja2 environment of transformers.
//!
//! A filter or string method of Python that is missing here causes an error, never a different text.

use std::{
    error::Error,
    fmt,
    path::{Path, PathBuf},
};

use jiff::{Zoned, fmt::strtime};
use minijinja::{
    AutoEscape, Environment, ErrorKind, Value, context, syntax::SyntaxConfig, value::ValueKind,
};
use minijinja_contrib::pycompat::unknown_method_callback;

use super::{TextError, json::to_json};

/// One message of a conversation.
///
/// ```
/// use kv_direct::text::Message;
///
/// let message = Message::new("user", "Why is the sky blue?");
/// assert_eq!(message.role, "user");
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Message {
    /// The author: `system`, `user`, `assistant`, or another role of the template.
    pub role: String,
    /// The text.
    pub content: String,
}

impl Message {
    /// A message of `role`.
    #[must_use]
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self {
            role: role.into(),
            content: content.into(),
        }
    }

    fn value(&self) -> Value {
        Value::from_pairs([("role", &*self.role), ("content", &*self.content)])
    }
}

/// A template that may be missing, and the variables that are always defined.
#[derive(Debug)]
pub(super) struct Template {
    dir: PathBuf,
    source: Option<String>,
    tokens: Value,
}

impl Template {
    pub(super) fn new(
        dir: &Path,
        source: Option<String>,
        tokens: Vec<(&'static str, String)>,
    ) -> Self {
        Self {
            dir: dir.into(),
            source: source.map(|source| prepared(&source)),
            tokens: Value::from_pairs(tokens),
        }
    }

    pub(super) fn render(
        &self,
        messages: &[Message],
        add_generation_prompt: bool,
    ) -> Result<String, TextError> {
        let dir = &self.dir;
        let no_template = || TextError::NoTemplate { dir: dir.clone() };
        let source = self.source.as_ref().ok_or_else(no_template)?;
        let messages: Vec<Value> = messages.iter().map(Message::value).collect();
        let variables = context! {
            messages,
            add_generation_prompt,
            tools => (),
            documents => (),
            ..self.tokens.clone()
        };
        let text = environment().and_then(|env| env.render_str(source, variables));
        text.map_err(|error| {
            let mut cause: Option<&(dyn Error + 'static)> = Some(&error);
            while let Some(error) = cause {
                if let Some(Raised(message)) = error.downcast_ref() {
                    let message = message.clone();
                    return TextError::Raised { message };
                }
                cause = error.source();
            }
            TextError::Template {
                dir: dir.clone(),
                source: Box::new(error),
            }
        })
    }
}

/// The message of a template that refuses its messages.
#[derive(Debug)]
struct Raised(String);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for Raised {}

fn environment() -> Result<Environment<'static>, minijinja::Error> {
    let mut env = Environment::new();
    let mut syntax = SyntaxConfig::builder();
    env.set_syntax(syntax.trim_blocks(true).lstrip_blocks(true).build()?);
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_unknown_method_callback(unknown_method_callback);
    env.add_filter("tojson", to_json);
    // As in Python: strings and dictionaries are sequences, too, and `None` is not iterable.
    env.add_test("sequence", |value: &Value| {
        let kind = value.kind();
        matches!(kind, ValueKind::Seq | ValueKind::String | ValueKind::Map)
    });
    env.add_test("iterable", |value: &Value| {
        !value.is_none() && value.try_iter().is_ok()
    });
    env.add_function("raise_exception", |message: Value| {
        let raised = Raised(message.to_string());
        let error = minijinja::Error::new(ErrorKind::InvalidOperation, "raise_exception");
        Err::<Value, _>(error.with_source(raised))
    });
    env.add_function("strftime_now", |format: &str| {
        strtime::format(format, &Zoned::now()).map_err(|error| {
            minijinja::Error::new(ErrorKind::InvalidOperation, "strftime_now").with_source(error)
        })
    });
    Ok(env)
}

/// The source as jinja2 would read it: every line ends in `\n`. The tags `generation` and `endgeneration` of
/// transformers, which mark replies for training, have no effect.
fn prepared(source: &str) -> String {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let mut parts = source.split("{%");
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        text.push_str("{%");
        let inner = part.trim_start_matches(['-', '+']);
        let sign = &part[..part.len() - inner.len()];
        let name_end = inner.find("%}").unwrap_or(inner.len());
        let (tag, rest) = inner.split_at(name_end);
        let name = tag.trim_end_matches(['-', '+']).trim();
        let plain = match name {
            "generation" => "if true",
            "endgeneration" => "endif",
            _ => {
                text.push_str(part);
                continue;
            }
        };
        let end = &tag[tag.trim_end_matches(['-', '+']).len()..];
        for piece in [sign, " ", plain, " ", end, rest] {
            text.push_str(piece);
        }
    }
    text
}
