//! The `tojson` filter of transformers: Python's `json.dumps`, without HTML escapes.

use minijinja::{
    Error, ErrorKind, State, Value,
    value::{Kwargs, ValueKind},
};

use super::python::{Generated, Text, check_depth, number};

/// The widest indent that is accepted. A template is not trusted, so its output must be bounded.
const WIDEST: usize = 64;

/// `value` as JSON. `ensure_ascii`, `indent`, `separators` and `sort_keys` have their meaning in Python.
pub(super) fn to_json(
    state: &State<'_, '_>,
    value: &Value,
    options: Kwargs,
) -> Result<String, Error> {
    let indent = options.get::<Option<Value>>("indent")?;
    let indent = match indent.filter(|indent| !indent.is_none()) {
        None => None,
        Some(indent) => Some(match indent.as_str() {
            Some(text) => text.to_owned(),
            None => " ".repeat(width(&indent)?),
        }),
    };
    if let Some(indent) = indent.as_ref().filter(|indent| indent.len() > WIDEST) {
        return Err(too_wide(indent.len()));
    }
    let separators: Option<Vec<String>> = options.get("separators")?;
    let ascii: Option<bool> = options.get("ensure_ascii")?;
    let sort: Option<bool> = options.get("sort_keys")?;
    options.assert_all_used()?;
    let mut separators = separators.unwrap_or_default().into_iter();
    let comma = if indent.is_some() { "," } else { ", " };
    let mut json = Json {
        text: Text::new(state),
        indent,
        comma: separators.next().unwrap_or_else(|| comma.into()),
        colon: separators.next().unwrap_or_else(|| ": ".into()),
        ascii: ascii.unwrap_or(false),
        sort: sort.unwrap_or(false),
    };
    json.value(value, 0)?;
    Ok(json.text.text)
}

/// Spaces of an indent. Python takes what is below zero for zero.
fn width(indent: &Value) -> Result<usize, Error> {
    let width = i64::try_from(indent.clone())?;
    match usize::try_from(width.max(0)) {
        Ok(width) if width <= WIDEST => Ok(width),
        _ => Err(too_wide(width)),
    }
}

fn too_wide(indent: impl std::fmt::Display) -> Error {
    let message = format!("indent is {indent}, the widest accepted is {WIDEST}");
    Error::new(ErrorKind::InvalidOperation, message)
}

/// Text in the layout of Python.
struct Json<'a, 'b, 'c> {
    text: Text<'a, 'b, 'c>,
    indent: Option<String>,
    comma: String,
    colon: String,
    ascii: bool,
    sort: bool,
}

impl Json<'_, '_, '_> {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        check_depth(depth)?;
        let list = matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable);
        match (value.kind(), value.as_object()) {
            (ValueKind::None, _) => self.text.push("null"),
            (ValueKind::Bool, _) => self
                .text
                .push(if value.is_true() { "true" } else { "false" }),
            (ValueKind::Number, _) => self.number(value),
            (ValueKind::String, _) => self.string(value.as_str().unwrap_or_default()),
            (_, Some(object)) if list && !object.is::<Generated>() => {
                let items = object.try_iter().into_iter().flatten();
                self.list(['[', ']'], items, depth, |json, item| {
                    json.value(&item, depth + 1)
                })
            }
            (ValueKind::Map, Some(object)) => {
                let mut pairs: Vec<_> = object.try_iter_pairs().into_iter().flatten().collect();
                if self.sort {
                    pairs.sort();
                }
                self.list(
                    ['{', '}'],
                    pairs.into_iter(),
                    depth,
                    |json, (key, value)| {
                        match key.kind() {
                            ValueKind::String => json.string(key.as_str().unwrap_or_default()),
                            ValueKind::None | ValueKind::Bool | ValueKind::Number => {
                                json.text.push("\"")?;
                                json.value(&key, depth + 1)?;
                                json.text.push("\"")
                            }
                            _ => Err(no_json(&key)),
                        }?;
                        json.text.push(&json.colon.clone())?;
                        json.value(&value, depth + 1)
                    },
                )
            }
            _ => Err(no_json(value)),
        }
    }

    fn number(&mut self, value: &Value) -> Result<(), Error> {
        match &*number(value) {
            "nan" => self.text.push("NaN"),
            "inf" => self.text.push("Infinity"),
            "-inf" => self.text.push("-Infinity"),
            number => self.text.push(number),
        }
    }

    /// Items between brackets.
    fn list<T>(
        &mut self,
        [open, close]: [char; 2],
        items: impl Iterator<Item = T>,
        depth: usize,
        mut write: impl FnMut(&mut Self, T) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.text.display(open)?;
        let mut filled = false;
        for item in items {
            if filled {
                self.text.push(&self.comma.clone())?;
            }
            self.line(depth + 1)?;
            write(self, item)?;
            filled = true;
        }
        if filled {
            self.line(depth)?;
        }
        self.text.display(close)
    }

    fn line(&mut self, depth: usize) -> Result<(), Error> {
        match &self.indent {
            None => Ok(()),
            Some(indent) => {
                let line = format!("\n{}", indent.repeat(depth));
                self.text.push(&line)
            }
        }
    }

    fn string(&mut self, text: &str) -> Result<(), Error> {
        let mut json = String::with_capacity(text.len() + 2);
        json.push('"');
        for c in text.chars() {
            match c {
                '"' => json.push_str("\\\""),
                '\\' => json.push_str("\\\\"),
                '\n' => json.push_str("\\n"),
                '\r' => json.push_str("\\r"),
                '\t' => json.push_str("\\t"),
                '\x08' => json.push_str("\\b"),
                '\x0c' => json.push_str("\\f"),
                c if c < ' ' || self.ascii && c >= '\x7f' => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        json.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => json.push(c),
            }
        }
        json.push('"');
        self.text.push(&json)
    }
}

fn no_json(value: &Value) -> Error {
    let message = format!("a value of type {} is no JSON", value.kind());
    Error::new(ErrorKind::BadSerialization, message)
}
