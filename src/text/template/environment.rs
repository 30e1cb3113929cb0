//! The jinja2 environment of transformers: filters, tests, functions and methods as Python has them.

use std::{error::Error as StdError, fmt};

use jiff::Zoned;
use minijinja::{
    AutoEscape, Environment, Error, ErrorKind, Output, State, Value, escape_formatter,
    syntax::SyntaxConfig,
    value::{Kwargs, ValueKind, from_args},
};
use minijinja_contrib::pycompat::unknown_method_callback;

use super::{
    date,
    json::to_json,
    python::{self, Generated, Text, check_depth, generated, is_namespace},
    source::{GENERATED, LOOPED, STORED, TEXT},
};

/// The message of a template that refuses its messages.
#[derive(Debug)]
pub(super) struct Raised(pub(super) String);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl StdError for Raised {}

/// The environment, with so much fuel for a rendering.
pub(super) fn environment(fuel: u64) -> Result<Environment<'static>, Error> {
    let mut env = Environment::new();
    let mut syntax = SyntaxConfig::builder();
    env.set_syntax(syntax.trim_blocks(true).lstrip_blocks(true).build()?);
    env.set_fuel(Some(fuel));
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_formatter(write);
    env.set_unknown_method_callback(method);
    env.add_filter(LOOPED, looped);
    env.add_filter(STORED, stored);
    env.add_filter(TEXT, text);
    env.add_filter("string", text);
    env.add_filter(GENERATED, generated);
    env.add_filter("e", escape);
    env.add_filter("escape", escape);
    env.add_filter("join", join);
    env.add_filter("tojson", to_json);
    env.add_filter("trim", trim);
    env.add_test("sequence", is_sequence);
    env.add_test("integer", |value: &Value| {
        value.kind() == ValueKind::Number && value.is_integer()
    });
    env.add_test("mapping", |value: &Value| {
        let object = value.as_object().filter(|object| !is_namespace(object));
        object.is_some() && value.kind() == ValueKind::Map
    });
    env.add_test("iterable", |value: &Value| {
        !value.is_none() && value.try_iter().is_ok()
    });
    env.add_function("raise_exception", |message: Value| {
        let raised = Raised(message.to_string());
        Err::<Value, _>(refused("raise_exception").with_source(raised))
    });
    env.add_function("strftime_now", |format: Option<&str>, options: Kwargs| {
        let named: Option<&str> = options.get("format")?;
        options.assert_all_used()?;
        let missing = || Error::new(ErrorKind::MissingArgument, "strftime_now needs a format");
        let format = format.or(named).ok_or_else(missing)?;
        Ok(date::written(format, &Zoned::now()))
    });
    Ok(env)
}

fn refused(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

/// Writes a value as `str` does.
fn write(out: &mut Output<'_>, state: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    match value.kind() {
        ValueKind::Number | ValueKind::Seq | ValueKind::Map | ValueKind::Iterable => {
            let mut text = Text::new(state);
            text.str(value)?;
            out.write_str(&text.text).map_err(Error::from)
        }
        _ => escape_formatter(out, state, value),
    }
}

/// `str(value)`, for `~` and the filter `string`.
fn text(state: &State<'_, '_>, value: Value) -> Result<Value, Error> {
    if value.kind() == ValueKind::String {
        return Ok(value);
    }
    let mut text = Text::new(state);
    text.str(&value)?;
    Ok(Value::from(text.text))
}

/// The text with HTML's characters escaped, as markupsafe does it.
fn escape(state: &State<'_, '_>, value: Value) -> Result<String, Error> {
    let value = text(state, value)?;
    let mut escaped = String::new();
    for c in value.as_str().unwrap_or_default().chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '\'' => escaped.push_str("&#39;"),
            '"' => escaped.push_str("&#34;"),
            c => escaped.push(c),
        }
    }
    Ok(escaped)
}

/// What a loop runs over: a list where the engine would not know how long it is.
fn looped(state: &State<'_, '_>, value: Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::None => return Err(refused("None is not iterable")),
        ValueKind::String | ValueKind::Iterable => {}
        _ => return Ok(value),
    }
    python::items(state, &value).map(Value::from)
}

/// What is stored in a variable, `within` a namespace: not nested too deep, and no namespace that could come to hold
/// itself.
fn stored(state: &State<'_, '_>, value: Value, within: Option<bool>) -> Result<Value, Error> {
    check_stored(state, &value, within == Some(true), 0)?;
    Ok(value)
}

fn check_stored(
    state: &State<'_, '_>,
    value: &Value,
    within: bool,
    depth: usize,
) -> Result<(), Error> {
    state.consume_fuel(1)?;
    check_depth(depth)?;
    let Some(object) = value.as_object() else {
        return Ok(());
    };
    if is_namespace(object) {
        return match within {
            true => Err(refused("a namespace cannot be stored in a namespace")),
            false => Ok(()),
        };
    }
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => {
            let mut items = object.try_iter().into_iter().flatten();
            items.try_for_each(|item| check_stored(state, &item, within, depth + 1))
        }
        ValueKind::Map => {
            let mut pairs = object.try_iter_pairs().into_iter().flatten();
            pairs.try_for_each(|(_, item)| check_stored(state, &item, within, depth + 1))
        }
        _ => Ok(()),
    }
}

/// As in Python, what has a length and items: strings, dictionaries, slices and ranges, too, and what is undefined.
fn is_sequence(value: &Value) -> bool {
    let object = value.as_object();
    match value.kind() {
        ValueKind::Undefined | ValueKind::String | ValueKind::Seq => true,
        ValueKind::Map => object.is_some_and(|object| !is_namespace(object)),
        ValueKind::Iterable => value.downcast_object_ref::<Generated>().is_none(),
        _ => false,
    }
}

/// `d.join(str(item) for item in value)`.
fn join(
    state: &mut State<'_, '_>,
    value: Value,
    separator: Option<Value>,
    attribute: Option<Value>,
    options: Kwargs,
) -> Result<String, Error> {
    let separator = separator.map_or_else(|| options.get("d"), |value| Ok(Some(value)))?;
    let attribute = attribute.map_or_else(|| options.get("attribute"), |value| Ok(Some(value)))?;
    options.assert_all_used()?;
    let items = match attribute.filter(|attribute| !attribute.is_none()) {
        None => value,
        Some(attribute) => {
            let attribute = Kwargs::from_iter([("attribute", attribute)]);
            state.apply_filter("map", &[value, attribute.into()])?
        }
    };
    let mut separator_text = Text::new(state);
    separator_text.str(&separator.unwrap_or_else(|| Value::from("")))?;
    let separator = separator_text.text;
    let mut text = Text::new(state);
    for (at, item) in items.try_iter()?.enumerate() {
        text.push(if at > 0 { &separator } else { "" })?;
        text.str(&item)?;
    }
    Ok(text.text)
}

/// `str(value).strip(chars)`.
fn trim(
    state: &State<'_, '_>,
    value: Value,
    chars: Option<Value>,
    options: Kwargs,
) -> Result<String, Error> {
    let chars = chars.map_or_else(|| options.get("chars"), |value| Ok(Some(value)))?;
    options.assert_all_used()?;
    let value = text(state, value)?;
    stripped(
        value.as_str().unwrap_or_default(),
        chars.as_ref(),
        true,
        true,
    )
}

/// A text without these characters, or white space, at its ends.
fn stripped(text: &str, chars: Option<&Value>, start: bool, end: bool) -> Result<String, Error> {
    let chars = match chars.filter(|chars| !chars.is_none()) {
        None => None,
        Some(chars) => Some(
            chars
                .as_str()
                .ok_or_else(|| refused("strip takes a string"))?,
        ),
    };
    let strips = |c: char| chars.map_or_else(|| python::is_space(c), |chars| chars.contains(c));
    let text = if start {
        text.trim_start_matches(strips)
    } else {
        text
    };
    let text = if end {
        text.trim_end_matches(strips)
    } else {
        text
    };
    Ok(text.to_owned())
}

/// The methods of Python, where those of the engine differ.
fn method(
    state: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let list = |parts: Vec<&str>| Value::from_iter(parts.into_iter().map(Value::from));
    let Some(text) = value.as_str() else {
        let found = unknown_method_callback(state, value, method, args)?;
        let view = value.kind() == ValueKind::Map && matches!(method, "items" | "keys" | "values");
        return if view {
            generated(state, found)
        } else {
            Ok(found)
        };
    };
    match method {
        "strip" | "lstrip" | "rstrip" => {
            let (chars,): (Option<Value>,) = from_args(args)?;
            let (start, end) = (method != "rstrip", method != "lstrip");
            stripped(text, chars.as_ref(), start, end).map(Value::from)
        }
        "split" => {
            let (separator, most, options): (Option<Value>, Option<i64>, Kwargs) = from_args(args)?;
            let separator =
                separator.map_or_else(|| options.get("sep"), |value| Ok(Some(value)))?;
            let most = most.map_or_else(|| options.get("maxsplit"), |most| Ok(Some(most)))?;
            options.assert_all_used()?;
            match separator.filter(|separator| !separator.is_none()) {
                None => {
                    let most = most.and_then(|most| usize::try_from(most).ok());
                    Ok(list(python::split(text, most)))
                }
                Some(separator) => {
                    let most = most.map_or_else(|| Value::from(-1), Value::from);
                    unknown_method_callback(state, value, method, &[separator, most])
                }
            }
        }
        "splitlines" => {
            let (keep, options): (Option<bool>, Kwargs) = from_args(args)?;
            let keep = keep.map_or_else(|| options.get("keepends"), |keep| Ok(Some(keep)))?;
            options.assert_all_used()?;
            Ok(list(python::lines(text, keep == Some(true))))
        }
        "isspace" => {
            let () = from_args(args)?;
            let spaces = !text.is_empty() && text.chars().all(python::is_space);
            Ok(Value::from(spaces))
        }
        "format" => {
            check_widths(text)?;
            unknown_method_callback(state, value, method, args)
        }
        _ => unknown_method_callback(state, value, method, args),
    }
}

/// The most digits of a width in a format.
const DIGITS: usize = 4;

/// Refuses a format that asks for a long text by a number.
fn check_widths(format: &str) -> Result<(), Error> {
    let mut runs = format.split(|c: char| !c.is_ascii_digit());
    match runs.find(|run| run.len() > DIGITS) {
        Some(run) => Err(refused(format!(
            "the number {run} in a format has more than {DIGITS} digits"
        ))),
        None => Ok(()),
    }
}
