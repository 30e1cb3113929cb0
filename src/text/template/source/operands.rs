//! What is written between the tokens of an expression: filters of the operands of `~`, and behind generators.

use super::{
    GENERATED, SourceError, TEXT, literal,
    tokens::{Token, closing, depths, is_space},
};

/// The filters of jinja2 that are generators.
const GENERATORS: [&str; 9] = [
    "batch",
    "items",
    "map",
    "reject",
    "rejectattr",
    "reverse",
    "select",
    "selectattr",
    "slice",
];

/// Writes tokens, with strings, operands of `~` and generators rewritten.
pub(super) fn write(tokens: &[Token<'_>], out: &mut String) -> Result<(), SourceError> {
    if calls_cycle_without_items(tokens) {
        return Err(SourceError::Cycle);
    }
    let marks = marks(tokens);
    for at in 0..=tokens.len() {
        for mark in marks.iter().filter(|mark| mark.at == at) {
            out.push_str(mark.text);
            if let Some(filter) = mark.filter {
                out.push_str(filter);
                out.push(' ');
            }
        }
        let Some(token) = tokens.get(at) else { break };
        match token {
            Token::String(string) => literal::write(string, out)?,
            Token::Space(text) | Token::Name(text) | Token::Other(text) => out.push_str(text),
        }
    }
    Ok(())
}

/// Whether `loop.cycle()` is called with nothing to choose from, which Python refuses and the engine cannot.
fn calls_cycle_without_items(tokens: &[Token<'_>]) -> bool {
    let significant = tokens.iter().filter(|token| !is_space(token));
    let significant: Vec<_> = significant.copied().collect();
    let call = [Token::Name("cycle"), Token::Other("("), Token::Other(")")];
    significant.windows(3).any(|window| window == call)
}

/// Something written in front of a token.
struct Mark {
    at: usize,
    text: &'static str,
    filter: Option<&'static str>,
}

/// What is written between tokens: brackets around operands of `~`, and filters behind generators.
fn marks(tokens: &[Token<'_>]) -> Vec<Mark> {
    let depths = depths(tokens);
    let mut marks = Vec::new();
    let close = |filter| (")|", Some(filter));
    let mut tildes: Vec<usize> = Vec::new();
    for (at, token) in tokens.iter().enumerate() {
        if *token == Token::Other("~") {
            tildes.push(at);
        }
        let Token::Name(name) = token else { continue };
        let before = tokens[..at].iter().rev().find(|token| !is_space(token));
        if before == Some(&Token::Other("|")) && GENERATORS.contains(name) {
            let end = after_call(tokens, &depths, at);
            let (text, filter) = ("|", Some(GENERATED));
            marks.push(Mark {
                at: end,
                text,
                filter,
            });
        }
    }
    // Each operand once: the left one of every `~`, and the right one of the last of a row.
    for &at in &tildes {
        let from = operand_start(tokens, &depths, at);
        let to = operand_end(tokens, &depths, at);
        let (text, filter) = close(TEXT);
        let open = |at| Mark {
            at,
            text: "(",
            filter: None,
        };
        marks.push(open(from));
        marks.push(Mark { at, text, filter });
        let followed = matches!(tokens.get(to), Some(Token::Other("~")));
        if !followed {
            marks.push(open(at + 1));
            let (text, filter) = close(TEXT);
            marks.push(Mark {
                at: to,
                text,
                filter,
            });
        }
    }
    marks
}

/// The index after a filter at `at`, and the brackets with its arguments.
fn after_call(tokens: &[Token<'_>], depths: &[usize], at: usize) -> usize {
    let next = (at + 1..tokens.len()).find(|&next| !is_space(&tokens[next]));
    match next {
        Some(open) if tokens[open] == Token::Other("(") => {
            let close = (open + 1..tokens.len()).find(|&close| depths[close] == depths[open]);
            close.map_or(tokens.len(), |close| close + 1)
        }
        _ => at + 1,
    }
}

/// Where the operand in front of `at` begins.
fn operand_start(tokens: &[Token<'_>], depths: &[usize], at: usize) -> usize {
    let mut from = at;
    while from > 0 {
        let before = from - 1;
        let inside = depths[before] > depths[at];
        let opens = !inside && is_open(tokens[before]) && depths[before] < depths[at];
        if !inside && (opens || separates(tokens, before)) {
            break;
        }
        from = before;
    }
    from
}

/// Where the operand behind `at` ends.
fn operand_end(tokens: &[Token<'_>], depths: &[usize], at: usize) -> usize {
    let mut to = at + 1;
    let end = closing(tokens);
    while to < tokens.len() && (to < end || depths[at] > 0) {
        if depths[to] < depths[at] || depths[to] == depths[at] && separates(tokens, to) {
            break;
        }
        to += 1;
    }
    to
}

fn is_open(token: Token<'_>) -> bool {
    matches!(token, Token::Other("(" | "[" | "{"))
}

/// Whether a token is an operator that binds weaker than `~`, or stands between expressions.
fn separates(tokens: &[Token<'_>], at: usize) -> bool {
    match tokens[at] {
        Token::Other("~" | "," | ":" | "=" | "==" | "!=" | "<" | "<=" | ">" | ">=") => true,
        Token::Other("{{" | "{%" | "}}" | "%}") => true,
        // A sign in front of a number is part of the operand.
        Token::Other("+" | "-") => {
            let before = tokens[..at].iter().rev().find(|token| !is_space(token));
            match before {
                Some(Token::Name(name)) => !is_operator(name),
                Some(Token::String(_) | Token::Other(")" | "]" | "}")) => true,
                _ => false,
            }
        }
        Token::Name(name) => {
            is_operator(name) && !matches!(name, "is") && !tests(tokens, at) || is_tag(tokens, at)
        }
        _ => false,
    }
}

/// Whether a name is an operator.
fn is_operator(name: &str) -> bool {
    matches!(name, "and" | "or" | "not" | "in" | "if" | "else" | "is")
}

/// Whether a name belongs to a test: `is not`, `is in`.
fn tests(tokens: &[Token<'_>], at: usize) -> bool {
    let mut before = tokens[..at].iter().rev().filter(|token| !is_space(token));
    match before.next() {
        Some(Token::Name("is")) => true,
        Some(Token::Name("not")) => before.next() == Some(&Token::Name("is")),
        _ => false,
    }
}

/// Whether a name is that of the tag: nothing but a sign stands in front of it.
fn is_tag(tokens: &[Token<'_>], at: usize) -> bool {
    let keyword = matches!(
        tokens[at],
        Token::Name("if" | "elif" | "for" | "set" | "with" | "call" | "filter" | "macro")
    );
    let mut before = tokens[..at].iter().filter(|token| !is_space(token));
    keyword && before.all(|token| matches!(token, Token::Other("-" | "+")))
}
