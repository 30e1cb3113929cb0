//! The `tojson` filter of transformers: Python's `json.dumps`, without HTML escapes.

use std::io;

use minijinja::{
    Error, ErrorKind, Value,
    value::{Kwargs, ValueKind},
};
use serde::Serialize;
use serde_json::ser::{Formatter, Serializer};

/// `value` as JSON. `indent`, `separators`, `ensure_ascii` and `sort_keys` have their meaning in Python.
pub(super) fn to_json(value: &Value, options: Kwargs) -> Result<String, Error> {
    if value.is_undefined() {
        let message = "an undefined value is no JSON";
        return Err(Error::new(ErrorKind::UndefinedError, message));
    }
    let indent: Option<usize> = options.get("indent")?;
    if let Some(indent) = indent.filter(|&indent| indent > WIDEST) {
        let message = format!("indent is {indent}, the widest accepted is {WIDEST}");
        return Err(Error::new(ErrorKind::InvalidOperation, message));
    }
    let separators: Option<Vec<String>> = options.get("separators")?;
    let ascii: Option<bool> = options.get("ensure_ascii")?;
    let sort: Option<bool> = options.get("sort_keys")?;
    options.assert_all_used()?;
    let mut separators = separators.unwrap_or_default().into_iter();
    let comma = if indent.is_some() { "," } else { ", " };
    let python = Python {
        indent,
        comma: separators.next().unwrap_or_else(|| comma.into()),
        colon: separators.next().unwrap_or_else(|| ": ".into()),
        ascii: ascii.unwrap_or(false),
        depth: 0,
        filled: false,
    };
    let sorted = if sort == Some(true) {
        sorted(value)?
    } else {
        value.clone()
    };
    let mut bytes = Vec::new();
    let mut serializer = Serializer::with_formatter(&mut bytes, python);
    let bad = |error| Error::new(ErrorKind::BadSerialization, "tojson").with_source(error);
    sorted.serialize(&mut serializer).map_err(bad)?;
    String::from_utf8(bytes)
        .map_err(|error| Error::new(ErrorKind::BadSerialization, "tojson").with_source(error))
}

/// The same value, with the keys of every map sorted.
fn sorted(value: &Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Map => {
            let mut keys: Vec<Value> = value.try_iter()?.collect();
            keys.sort();
            let pairs = keys.into_iter().map(|key| {
                let inner = sorted(&value.get_item(&key)?)?;
                Ok((key.to_string(), inner))
            });
            let pairs: Vec<(String, Value)> = pairs.collect::<Result<_, Error>>()?;
            Ok(Value::from_pairs(pairs))
        }
        ValueKind::Seq => value.try_iter()?.map(|inner| sorted(&inner)).collect(),
        _ => Ok(value.clone()),
    }
}

/// The widest indent that is accepted. A template is not trusted, so its output must be bounded.
const WIDEST: usize = 64;

/// The JSON layout of Python.
struct Python {
    indent: Option<usize>,
    comma: String,
    colon: String,
    ascii: bool,
    depth: usize,
    /// Whether the list or map that ends next has an element.
    filled: bool,
}

impl Python {
    fn line<W: ?Sized + io::Write>(&self, writer: &mut W) -> io::Result<()> {
        self.indent.map_or(Ok(()), |indent| {
            write!(writer, "\n{}", " ".repeat(indent * self.depth))
        })
    }

    fn open<W: ?Sized + io::Write>(&mut self, writer: &mut W, bracket: &str) -> io::Result<()> {
        self.depth += 1;
        self.filled = false;
        writer.write_all(bracket.as_bytes())
    }

    fn close<W: ?Sized + io::Write>(&mut self, writer: &mut W, bracket: &str) -> io::Result<()> {
        self.depth -= 1;
        if self.filled {
            self.line(writer)?;
        }
        // The enclosing list or map has at least this element.
        self.filled = true;
        writer.write_all(bracket.as_bytes())
    }

    fn item<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.filled = true;
        if !first {
            writer.write_all(self.comma.as_bytes())?;
        }
        self.line(writer)
    }
}

impl Formatter for Python {
    fn begin_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, "[")
    }

    fn end_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, "]")
    }

    fn begin_array_value<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.item(writer, first)
    }

    fn begin_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, "{")
    }

    fn end_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, "}")
    }

    fn begin_object_key<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.item(writer, first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(self.colon.as_bytes())
    }

    fn write_string_fragment<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        fragment: &str,
    ) -> io::Result<()> {
        if !self.ascii {
            return writer.write_all(fragment.as_bytes());
        }
        for unit in fragment.encode_utf16() {
            match u8::try_from(unit) {
                Ok(byte) if byte.is_ascii() => writer.write_all(&[byte])?,
                _ => write!(writer, "\\u{unit:04x}")?,
            }
        }
        Ok(())
    }
}
