//! What is written between the tokens of an expression: filters of operands, and behind generators.

use std::{collections::BTreeMap, iter, ops::Range};

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
    let mut marks = marks(tokens).into_iter().peekable();
    for at in 0..=tokens.len() {
        while let Some(mark) = marks.next_if(|mark| mark.at == at) {
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

/// What is written between tokens, in their order: brackets and filters around operands, and filters behind generators.
fn marks(tokens: &[Token<'_>]) -> Vec<Mark> {
    let depths = depths(tokens);
    let mut marks = Vec::new();
    for (at, token) in tokens.iter().enumerate() {
        let Token::Name(name) = token else { continue };
        if GENERATORS.contains(name) && is_filter(tokens, at) {
            marks.push(Mark {
                at: after_call(tokens, &depths, at),
                text: "|",
                filter: Some(GENERATED),
            });
        }
    }
    for operand in rows(tokens, &depths, "~").concat() {
        filter(&mut marks, operand, TEXT);
    }
    for row in rows(tokens, &depths, "+") {
        // What is added to a safe text is escaped.
        let safe = |operand: &Range<usize>| is_safe(tokens, operand);
        if row.iter().any(safe) {
            let others = row.into_iter().filter(|operand| !safe(operand));
            others.for_each(|operand| filter(&mut marks, operand, "e"));
        }
    }
    marks.sort_by_key(|mark| mark.at);
    marks
}

/// Adds brackets around an operand, and a filter of it.
fn filter(marks: &mut Vec<Mark>, operand: Range<usize>, filter: &'static str) {
    marks.push(Mark {
        at: operand.start,
        text: "(",
        filter: None,
    });
    marks.push(Mark {
        at: operand.end,
        text: ")|",
        filter: Some(filter),
    });
}

/// The operands of a binary operator, those of one row together.
fn rows(tokens: &[Token<'_>], depths: &[usize], operator: &str) -> Vec<Vec<Range<usize>>> {
    let mut rows: Vec<Vec<Range<usize>>> = Vec::new();
    // The row that each depth is in.
    let mut open: BTreeMap<usize, (usize, usize)> = BTreeMap::new();
    for at in 0..tokens.len() {
        if tokens[at] != Token::Other(operator) || !separates(tokens, at, operator) {
            continue;
        }
        let to = operand_end(tokens, depths, at, operator);
        let row = match open.get(&depths[at]) {
            Some(&(row, end)) if end == at => row,
            _ => {
                let from = operand_start(tokens, depths, at, operator);
                rows.push(iter::once(from..at).collect());
                rows.len() - 1
            }
        };
        rows[row].push(at + 1..to);
        open.insert(depths[at], (row, to));
    }
    rows
}

/// Whether an operand ends in a filter that makes it a safe text.
fn is_safe(tokens: &[Token<'_>], operand: &Range<usize>) -> bool {
    let mut ends = operand.clone().rev().filter(|&at| !is_space(&tokens[at]));
    ends.next().is_some_and(|at| {
        let makes_safe = matches!(tokens[at], Token::Name("safe" | "e" | "escape"));
        makes_safe && is_filter(tokens, at)
    })
}

/// Whether a name is that of a filter.
fn is_filter(tokens: &[Token<'_>], at: usize) -> bool {
    let before = tokens[..at].iter().rev().find(|token| !is_space(token));
    before == Some(&Token::Other("|"))
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
fn operand_start(tokens: &[Token<'_>], depths: &[usize], at: usize, operator: &str) -> usize {
    let mut from = at;
    while from > 0 {
        let before = from - 1;
        let inside = depths[before] > depths[at];
        let opens = !inside && is_open(tokens[before]) && depths[before] < depths[at];
        if !inside && (opens || separates(tokens, before, operator)) {
            break;
        }
        from = before;
    }
    from
}

/// Where the operand behind `at` ends.
fn operand_end(tokens: &[Token<'_>], depths: &[usize], at: usize, operator: &str) -> usize {
    let mut to = at + 1;
    let end = closing(tokens);
    while to < tokens.len() && (to < end || depths[at] > 0) {
        if depths[to] < depths[at] || depths[to] == depths[at] && separates(tokens, to, operator) {
            break;
        }
        to += 1;
    }
    to
}

fn is_open(token: Token<'_>) -> bool {
    matches!(token, Token::Other("(" | "[" | "{"))
}

/// Whether a token is an operator that binds no stronger than this one, `~` or `+`, or stands between expressions.
fn separates(tokens: &[Token<'_>], at: usize, operator: &str) -> bool {
    match tokens[at] {
        Token::Other("~") => operator == "~",
        Token::Other("," | ":" | "=" | "==" | "!=" | "<" | "<=" | ">" | ">=") => true,
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
