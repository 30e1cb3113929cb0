//! Values and strings as Python writes and splits them.

use std::{fmt, sync::Arc};

use minijinja::{
    Error, ErrorKind, State, Value,
    value::{DynObject, Enumerator, Object, ObjectRepr, ValueKind},
};

/// How deep values may be nested: far above what templates and tools need, and so little that no stack overflows.
pub(super) const DEEPEST: usize = 128;

/// Text under construction. Every piece is paid for by fuel before it is there.
pub(super) struct Text<'a, 'b, 'c> {
    pub(super) state: &'a State<'b, 'c>,
    pub(super) text: String,
}

impl<'a, 'b, 'c> Text<'a, 'b, 'c> {
    pub(super) const fn new(state: &'a State<'b, 'c>) -> Self {
        let text = String::new();
        Self { state, text }
    }

    pub(super) fn push(&mut self, text: &str) -> Result<(), Error> {
        self.state.consume_fuel(1 + text.len() as u64 / 64)?;
        self.text.push_str(text);
        Ok(())
    }

    pub(super) fn display(&mut self, value: impl fmt::Display) -> Result<(), Error> {
        self.push(&value.to_string())
    }

    /// `str(value)`.
    pub(super) fn str(&mut self, value: &Value) -> Result<(), Error> {
        match value.as_str() {
            Some(text) => self.push(text),
            None if value.is_undefined() => Ok(()),
            None => self.repr(value, 0),
        }
    }

    /// `repr(value)`.
    fn repr(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        check_depth(depth)?;
        let object = value.as_object();
        match (value.kind(), object) {
            (ValueKind::Number, _) => self.display(number(value)),
            (ValueKind::Seq, Some(object)) => {
                let tuple = value.is_tuple();
                self.push(if tuple { "(" } else { "[" })?;
                let mut count = 0;
                for item in object.try_iter().into_iter().flatten() {
                    self.push(if count > 0 { ", " } else { "" })?;
                    self.repr(&item, depth + 1)?;
                    count += 1;
                }
                self.push(match (tuple, count) {
                    (true, 1) => ",)",
                    (true, _) => ")",
                    (false, _) => "]",
                })
            }
            (ValueKind::Map, Some(object)) => {
                let namespace = is_namespace(object);
                self.push(if namespace { "<Namespace {" } else { "{" })?;
                for (at, (key, value)) in object.try_iter_pairs().into_iter().flatten().enumerate()
                {
                    self.push(if at > 0 { ", " } else { "" })?;
                    self.repr(&key, depth + 1)?;
                    self.push(": ")?;
                    self.repr(&value, depth + 1)?;
                }
                self.push(if namespace { "}>" } else { "}" })
            }
            (ValueKind::Iterable, Some(object)) => {
                // Slices and ranges.
                self.push("[")?;
                for (at, item) in object.try_iter().into_iter().flatten().enumerate() {
                    self.push(if at > 0 { ", " } else { "" })?;
                    self.repr(&item, depth + 1)?;
                }
                self.push("]")
            }
            (ValueKind::Invalid, _) => self.display(value),
            _ => self.push(&format!("{value:?}")),
        }
    }
}

/// What Python knows as a generator or a view: something to loop over, but no sequence.
#[derive(Debug)]
pub(super) struct Generated(Vec<Value>);

impl Object for Generated {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.0.clone())
    }
}

pub(super) fn generated(state: &State<'_, '_>, value: Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::String => Ok(value),
        _ => items(state, &value).map(|items| Value::from_object(Generated(items))),
    }
}

/// Everything that a loop over a value meets, paid for by fuel.
pub(super) fn items(state: &State<'_, '_>, value: &Value) -> Result<Vec<Value>, Error> {
    let mut items = Vec::new();
    for item in value.try_iter()? {
        state.consume_fuel(1)?;
        items.push(item);
    }
    Ok(items)
}

/// Whether an object is a `namespace()`.
pub(super) fn is_namespace(object: &DynObject) -> bool {
    object.type_name().ends_with("::Namespace")
}

pub(super) fn check_depth(depth: usize) -> Result<(), Error> {
    if depth > DEEPEST {
        let message = format!("a value is nested more than {DEEPEST} deep");
        return Err(Error::new(ErrorKind::InvalidOperation, message));
    }
    Ok(())
}

/// A number as Python writes it.
pub(super) fn number(value: &Value) -> String {
    match f64::try_from(value.clone()) {
        Ok(float) if !value.is_integer() => self::float(float),
        _ => value.to_string(),
    }
}

/// `repr` of a float: the shortest digits that are read back as this number.
fn float(float: f64) -> String {
    if !float.is_finite() {
        return match float {
            f64::INFINITY => "inf",
            f64::NEG_INFINITY => "-inf",
            _ => "nan",
        }
        .to_owned();
    }
    let scientific = format!("{float:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    match exponent.parse::<i32>() {
        Ok(exponent @ -4..16) => {
            let text = float.to_string();
            match exponent < 0 || text.contains('.') {
                true => text,
                false => text + ".0",
            }
        }
        Ok(exponent) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", exponent.unsigned_abs())
        }
        Err(_) => scientific,
    }
}

/// Whether Python's `str.isspace` holds for a character.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || matches!(c, '\x1c'..='\x1f')
}

/// `str.split()` without a separator, at most `most` times.
pub(super) fn split(text: &str, most: Option<usize>) -> Vec<&str> {
    let (mut words, mut rest) = (Vec::new(), text.trim_start_matches(is_space));
    while !rest.is_empty() {
        if most == Some(words.len()) {
            words.push(rest);
            break;
        }
        let end = rest.find(is_space).unwrap_or(rest.len());
        words.push(&rest[..end]);
        rest = rest[end..].trim_start_matches(is_space);
    }
    words
}

/// `str.splitlines`.
pub(super) fn lines(text: &str, keep_ends: bool) -> Vec<&str> {
    let ends = |c: char| {
        matches!(
            c,
            '\n' | '\r' | '\x0b' | '\x0c' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}'
        )
    };
    let (mut lines, mut rest) = (Vec::new(), text);
    while let Some(at) = rest.find(ends) {
        let end = if rest[at..].starts_with("\r\n") {
            2
        } else {
            rest[at..].chars().next().map_or(0, char::len_utf8)
        };
        lines.push(&rest[..if keep_ends { at + end } else { at }]);
        rest = &rest[at + end..];
    }
    if !rest.is_empty() {
        lines.push(rest);
    }
    lines
}
