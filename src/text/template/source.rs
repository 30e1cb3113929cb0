//! A template as jinja2 reads it, rewritten where the engine reads it otherwise.
//!
//! Strings have the escapes of Python; the tag `generation` of transformers, which marks replies for training, becomes
//! a scope; what a loop runs over, what is stored, and what is joined by `~` goes through a filter of [`environment`].
//!
//! [`environment`]: super::environment

mod operands;
mod tokens;

use self::{
    operands::write,
    tokens::{Token, closing, depths, is_space, tokens},
};
use super::{
    Limit,
    literal::{self, BadEscape},
};

/// The filter for what a loop runs over.
pub(super) const LOOPED: &str = "__looped";
/// The filter for what is stored in a variable.
pub(super) const STORED: &str = "__stored";
/// The filter for operands of `~`.
pub(super) const TEXT: &str = "__text";
/// The filter after filters that are generators in Python.
pub(super) const GENERATED: &str = "__generated";

/// The largest source, in bytes. The largest of 70 published ones has 17,000.
const LARGEST: usize = 1 << 19;
/// The most `elif` of a source: the engine recurses over them.
const BRANCHES: usize = 2048;

/// Why a source is refused.
#[derive(Debug, thiserror::Error)]
pub(super) enum SourceError {
    #[error(transparent)]
    Limit(#[from] Limit),
    #[error(transparent)]
    Escape(#[from] BadEscape),
    #[error("cycle() has no items to choose from")]
    Cycle,
}

/// Rewrites a source.
pub(super) fn prepared(source: &str) -> Result<String, SourceError> {
    Limit::check("bytes of the template", source.len(), LARGEST)?;
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let mut out = String::with_capacity(source.len());
    let (mut rest, mut branches) = (&*source, 0);
    while let Some(at) = next_tag(rest) {
        let (text, tag) = rest.split_at(at);
        out.push_str(text);
        let kind = tag.as_bytes()[1];
        if kind == b'#' {
            let end = tag[2..].find("#}").map_or(tag.len(), |end| end + 4);
            out.push_str(&tag[..end]);
            rest = &tag[end..];
            continue;
        }
        // A sign that controls white space belongs to the bracket.
        let begin = 2 + usize::from(tag[2..].starts_with(['-', '+']));
        let (tokens, end) = tokens(&tag[begin..], if kind == b'{' { "}}" } else { "%}" })?;
        let (inner, after) = tag[begin..].split_at(end);
        out.push_str(&tag[..begin]);
        rest = after;
        if kind == b'{' {
            write(&tokens, &mut out)?;
            continue;
        }
        let name = tokens.iter().find_map(|token| match token {
            Token::Name(name) => Some(*name),
            _ => None,
        });
        match name {
            Some("raw") => {
                out.push_str(inner);
                let raw = raw_end(rest).unwrap_or(rest.len());
                out.push_str(&rest[..raw]);
                rest = &rest[raw..];
            }
            Some("generation") => write(&renamed(&tokens, "with"), &mut out)?,
            Some("endgeneration") => write(&renamed(&tokens, "endwith"), &mut out)?,
            Some("for") => loop_(&tokens, &mut out)?,
            Some("set") => set(&tokens, &mut out)?,
            Some("elif") => {
                branches += 1;
                Limit::check("elif of the template", branches, BRANCHES)?;
                write(&tokens, &mut out)?;
            }
            _ => write(&tokens, &mut out)?,
        }
    }
    out.push_str(rest);
    Ok(out)
}

/// Where the next tag or comment begins.
fn next_tag(text: &str) -> Option<usize> {
    let bytes = text.as_bytes();
    let begins = |pair: &[u8]| pair[0] == b'{' && matches!(pair[1], b'{' | b'%' | b'#');
    bytes.windows(2).position(begins)
}

/// Where the tag `endraw` begins.
fn raw_end(text: &str) -> Option<usize> {
    text.match_indices("{%").map(|(at, _)| at).find(|&at| {
        let tag = text[at + 2..].trim_start_matches(['-', '+']).trim_start();
        let end = tag.strip_prefix("endraw").map(str::trim_start);
        end.is_some_and(|end| end.trim_start_matches(['-', '+']).starts_with("%}"))
    })
}

/// The tokens with another name of the tag.
fn renamed<'a>(tokens: &[Token<'a>], to: &'a str) -> Vec<Token<'a>> {
    let mut renamed = tokens.to_vec();
    let names = renamed.iter_mut();
    let mut names = names.filter(|token| matches!(token, Token::Name(_)));
    if let Some(name) = names.next() {
        *name = Token::Name(to);
    }
    renamed
}

/// `for TARGET in EXPRESSION`: what the loop runs over is filtered.
fn loop_(tokens: &[Token<'_>], out: &mut String) -> Result<(), SourceError> {
    let depths = depths(tokens);
    let outside = |name: &str| {
        let mut pairs = tokens.iter().zip(&depths);
        pairs.position(|(token, depth)| *depth == 0 && *token == Token::Name(name))
    };
    let Some(from) = outside("in") else {
        return write(tokens, out);
    };
    let end = closing(tokens);
    let to = [outside("if"), outside("recursive")];
    let to = to.into_iter().flatten().min().unwrap_or(end);
    if to <= from {
        return write(tokens, out);
    }
    write(&tokens[..=from], out)?;
    filtered(&tokens[from + 1..to], LOOPED, "", out)?;
    write(&tokens[to..], out)
}

/// `set TARGET = EXPRESSION`: what is stored is filtered. The filter is told whether that is in a namespace.
fn set(tokens: &[Token<'_>], out: &mut String) -> Result<(), SourceError> {
    let depths = depths(tokens);
    let mut pairs = tokens.iter().zip(&depths);
    let equals = pairs.position(|(token, depth)| *depth == 0 && *token == Token::Other("="));
    let Some(from) = equals else {
        return write(tokens, out);
    };
    let end = closing(tokens);
    if end <= from {
        return write(tokens, out);
    }
    let significant = |token: &&Token<'_>| !is_space(token);
    let target: Vec<_> = tokens[..from].iter().filter(significant).collect();
    let within = target.contains(&&Token::Other("."));
    write(&tokens[..=from], out)?;
    let arguments = if within { "(true)" } else { "" };
    filtered(&tokens[from + 1..end], STORED, arguments, out)?;
    write(&tokens[end..], out)
}

/// An expression in brackets, and a filter of it.
fn filtered(
    expression: &[Token<'_>],
    filter: &str,
    arguments: &str,
    out: &mut String,
) -> Result<(), SourceError> {
    // Names beside brackets stay apart.
    out.push_str(" (");
    write(expression, out)?;
    out.push_str(")|");
    out.push_str(filter);
    out.push_str(arguments);
    out.push(' ');
    Ok(())
}
