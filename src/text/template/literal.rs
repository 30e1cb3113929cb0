//! String literals with the escapes of Python.

use std::fmt::Write;

/// An escape that Python refuses, or a text that is not Unicode.
#[derive(Debug, thiserror::Error)]
#[error("the string {literal} has an escape that is not valid: {escape}")]
pub(super) struct BadEscape {
    literal: String,
    escape: String,
}

/// Writes a literal, quotes included, so that the engine reads the text that Python reads.
pub(super) fn write(literal: &str, out: &mut String) -> Result<(), BadEscape> {
    let quote = literal.chars().next().unwrap_or_default();
    let inner = literal.strip_prefix(quote).unwrap_or(literal);
    let closed = inner.strip_suffix(quote).filter(|_| literal.len() > 1);
    match closed.filter(|inner| inner.contains('\\')) {
        None => out.push_str(literal),
        Some(inner) => {
            let text = decoded(inner).map_err(|escape| BadEscape {
                literal: literal.to_owned(),
                escape,
            })?;
            out.push(quote);
            for c in text.chars() {
                if c == quote || c == '\\' {
                    out.push('\\');
                }
                out.push(c);
            }
            out.push(quote);
        }
    }
    Ok(())
}

/// What `text.encode("ascii", "backslashreplace").decode("unicode-escape")` gives in Python, as jinja2 calls it; or the
/// escape that is not valid.
fn decoded(text: &str) -> Result<String, String> {
    let text = ascii(text);
    let mut out = String::with_capacity(text.len());
    let mut rest = &*text;
    while let Some(at) = rest.find('\\') {
        out.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        let kind = rest.chars().next().unwrap_or_default();
        let after = &rest[usize::from(!rest.is_empty())..];
        let hex = |digits: usize| hexadecimal(after, digits, kind);
        let (text, taken) = match kind {
            '\n' => (String::new(), 1),
            '\\' | '\'' | '"' => (kind.to_string(), 1),
            'a' => ('\x07'.to_string(), 1),
            'b' => ('\x08'.to_string(), 1),
            'f' => ('\x0c'.to_string(), 1),
            'n' => ('\n'.to_string(), 1),
            'r' => ('\r'.to_string(), 1),
            't' => ('\t'.to_string(), 1),
            'v' => ('\x0b'.to_string(), 1),
            '0'..='7' => {
                let digits = rest.bytes().take(3);
                let digits = digits.take_while(|b| matches!(b, b'0'..=b'7')).count();
                let code = u32::from_str_radix(&rest[..digits], 8).unwrap_or_default();
                let c = char::from_u32(code).unwrap_or_default();
                (c.to_string(), digits)
            }
            'x' => (hex(2)?.to_string(), 3),
            'u' => (hex(4)?.to_string(), 5),
            'U' => (hex(8)?.to_string(), 9),
            'N' => named(after)?,
            _ => ("\\".to_owned(), 0),
        };
        out.push_str(&text);
        rest = &rest[taken..];
    }
    out.push_str(rest);
    Ok(out)
}

/// The text with every other character escaped, as Python does it.
fn ascii(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        // A string takes any text.
        let _ = match u32::from(c) {
            code @ 0..0x80 => {
                out.push(code as u8 as char);
                Ok(())
            }
            code @ 0x80..0x100 => write!(out, "\\x{code:02x}"),
            code @ 0x100..0x1_0000 => write!(out, "\\u{code:04x}"),
            code => write!(out, "\\U{code:08x}"),
        };
    }
    out
}

/// The character of so many digits. Surrogates are none.
fn hexadecimal(text: &str, digits: usize, kind: char) -> Result<char, String> {
    let digits = text.get(..digits);
    let code = digits.filter(|digits| digits.bytes().all(|b| b.is_ascii_hexdigit()));
    let code = code.and_then(|digits| u32::from_str_radix(digits, 16).ok());
    let bad = || format!("\\{kind}{}", digits.unwrap_or(text));
    code.and_then(char::from_u32).ok_or_else(bad)
}

/// The character of a name in braces, and the bytes of all behind the backslash.
fn named(text: &str) -> Result<(String, usize), String> {
    let name = text.strip_prefix('{').and_then(|text| text.split_once('}'));
    let name = name.map(|(name, _)| name);
    let bad = || format!("\\N{{{}}}", name.unwrap_or_default());
    let character = name.and_then(unicode_names2::character).ok_or_else(bad)?;
    let taken = name.map_or(0, |name| name.len() + 3);
    Ok((character.to_string(), taken))
}
