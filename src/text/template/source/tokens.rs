//! The tokens of a tag.

use super::Limit;

/// The most tokens of a tag. The engine recurses over them, and takes time that grows with their square.
const TOKENS: usize = 2048;
/// The most brackets within brackets.
const BRACKETS: usize = 32;
/// The most digits of a number.
const DIGITS: usize = 400;

/// A part of a tag. Parts together are the text of the tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Token<'a> {
    Space(&'a str),
    Name(&'a str),
    /// With its quotes.
    String(&'a str),
    Other(&'a str),
}

pub(super) const fn is_space(token: &Token<'_>) -> bool {
    matches!(token, Token::Space(_))
}

/// The tokens of a tag, its `end` included, and how many bytes they are.
pub(super) fn tokens<'a>(tag: &'a str, end: &str) -> Result<(Vec<Token<'a>>, usize), Limit> {
    let (mut tokens, mut at, mut open) = (Vec::new(), 0, 0_usize);
    while at < tag.len() {
        let rest = &tag[at..];
        if open == 0 && rest.starts_with(end) {
            tokens.push(Token::Other(&rest[..2]));
            return Ok((tokens, at + 2));
        }
        let first = rest.chars().next().unwrap_or_default();
        let run = |of: fn(char) -> bool| rest.find(|c| !of(c)).unwrap_or(rest.len());
        let (token, length) = match first {
            '\'' | '"' => {
                let length = string(rest);
                (Token::String(&rest[..length]), length)
            }
            c if c.is_whitespace() => {
                let length = run(char::is_whitespace);
                (Token::Space(&rest[..length]), length)
            }
            c if c.is_ascii_digit() => {
                let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
                Limit::check("digits of a number of the template", digits, DIGITS)?;
                let length = number(rest, tokens.last() != Some(&Token::Other(".")));
                (Token::Name(&rest[..length]), length)
            }
            c if c.is_alphanumeric() || c == '_' => {
                let length = run(|c| c.is_alphanumeric() || c == '_');
                (Token::Name(&rest[..length]), length)
            }
            c => {
                match c {
                    '(' | '[' | '{' => open += 1,
                    ')' | ']' | '}' => open = open.saturating_sub(1),
                    _ => {}
                }
                Limit::check("brackets within brackets of the template", open, BRACKETS)?;
                let pairs = ["==", "!=", "<=", ">=", "**", "//"];
                let pair = pairs.iter().any(|pair| rest.starts_with(pair));
                let length = if pair { 2 } else { c.len_utf8() };
                (Token::Other(&rest[..length]), length)
            }
        };
        tokens.push(token);
        at += length;
        Limit::check("tokens of a tag of the template", tokens.len(), TOKENS)?;
    }
    Ok((tokens, at))
}

/// Bytes of the number that a text begins with. Behind a dot, an index, it has no fraction.
fn number(text: &str, fraction: bool) -> usize {
    let bytes = text.as_bytes();
    let digit = |at: usize| bytes.get(at).is_some_and(u8::is_ascii_digit);
    let digits = |mut at: usize| {
        while digit(at) || bytes.get(at) == Some(&b'_') {
            at += 1;
        }
        at
    };
    let mut at = digits(0);
    if fraction && bytes.get(at) == Some(&b'.') && digit(at + 1) {
        at = digits(at + 1);
    }
    if fraction && matches!(bytes.get(at), Some(b'e' | b'E')) {
        let sign = usize::from(matches!(bytes.get(at + 1), Some(b'+' | b'-')));
        if digit(at + 1 + sign) {
            at = digits(at + 1 + sign);
        }
    }
    let more = |c: char| c.is_alphanumeric() || c == '_';
    at + text[at..].find(|c| !more(c)).unwrap_or(text.len() - at)
}

/// Bytes of the string that a text begins with.
fn string(text: &str) -> usize {
    let (bytes, mut at) = (text.as_bytes(), 1);
    while at < bytes.len() {
        match bytes[at] {
            b'\\' => at += 2,
            byte if byte == bytes[0] => return at + 1,
            _ => at += 1,
        }
    }
    text.len()
}

/// How deep each token stands in brackets, an opening and a closing one as deep as what is outside.
pub(super) fn depths(tokens: &[Token<'_>]) -> Vec<usize> {
    let mut depth = 0_usize;
    let deep = |token: &Token<'_>| match token {
        Token::Other("(" | "[" | "{") => {
            depth += 1;
            depth - 1
        }
        Token::Other(")" | "]" | "}") => {
            depth = depth.saturating_sub(1);
            depth
        }
        _ => depth,
    };
    tokens.iter().map(deep).collect()
}

/// The index of the tokens that close a tag: its end, and a sign in front of it. Parts of a tag have none.
pub(super) fn closing(tokens: &[Token<'_>]) -> usize {
    match tokens {
        [.., Token::Other("-" | "+"), Token::Other("}}" | "%}")] => tokens.len() - 2,
        [.., Token::Other("}}" | "%}")] => tokens.len() - 1,
        _ => tokens.len(),
    }
}
