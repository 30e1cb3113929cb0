//! `strftime_now`: Python's `datetime.now().strftime` in the C locale.

use std::fmt::Write;

use jiff::{Zoned, fmt::strtime};

/// The widest field.
const WIDEST: usize = 64;

/// A date in a format of Python. What Python does not know stays as it is.
pub(super) fn written(format: &str, now: &Zoned) -> String {
    let mut out = String::new();
    let mut rest = format;
    while let Some(at) = rest.find('%') {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let flags = rest[1..].find(|c| !matches!(c, '-' | '_' | '0' | '^' | '#'));
        let width = 1 + flags.unwrap_or(rest.len() - 1);
        let digits = rest[width..].find(|c: char| !c.is_ascii_digit());
        let kind = width + digits.unwrap_or(rest.len() - width);
        let Some(letter) = rest[kind..].chars().next() else {
            break;
        };
        let end = kind + letter.len_utf8();
        let (flags, digits) = (&rest[1..width], &rest[width..kind]);
        let fits = digits.is_empty() || digits.parse().is_ok_and(|width: usize| width <= WIDEST);
        let field = fits.then(|| field(letter, flags, digits, now)).flatten();
        out.push_str(field.as_deref().unwrap_or(&rest[..end]));
        rest = &rest[end..];
    }
    out.push_str(rest);
    out
}

/// One field, if it is one.
fn field(letter: char, flags: &str, width: &str, now: &Zoned) -> Option<String> {
    let text = match letter {
        // A date of now() has no zone.
        'z' | 'Z' => return Some(String::new()),
        'f' => return Some(format!("{:06}", now.subsec_nanosecond() / 1_000)),
        '%' => return Some("%".to_owned()),
        'c' => "%a %b %e %H:%M:%S %Y",
        'r' => "%I:%M:%S %p",
        'x' | 'D' => "%m/%d/%y",
        'X' | 'T' => "%H:%M:%S",
        'F' => "%Y-%m-%d",
        'R' => "%H:%M",
        'h' => "%b",
        'a' | 'A' | 'b' | 'B' | 'C' | 'd' | 'e' | 'g' | 'G' | 'H' | 'I' | 'j' | 'k' | 'l' | 'm'
        | 'M' | 'n' | 'p' | 'P' | 's' | 'S' | 't' | 'u' | 'U' | 'V' | 'w' | 'W' | 'y' | 'Y' => "",
        _ => return None,
    };
    if !text.is_empty() {
        let text = strtime::format(text, now).ok()?;
        let upper = flags.contains('^') || flags.contains('#') && letter == 'h';
        return Some(if upper { text.to_uppercase() } else { text });
    }
    let mut one = String::from("%");
    write!(one, "{flags}{width}{letter}").ok()?;
    strtime::format(one, now).ok()
}
