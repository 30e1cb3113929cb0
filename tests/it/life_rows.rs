//! What survived of a batch row: its tokens, and the calls they came in.

/// What a call brought to a row: nothing, where it only ended its prompt.
#[derive(Debug, Clone)]
pub struct Call {
    pub tokens: Vec<u32>,
    pub more: bool,
}

#[derive(Debug, Clone)]
pub enum Past {
    Call(Call),
    Accepted(Vec<Call>),
}

/// What survived of a batch row.
#[derive(Debug, Clone, Default)]
pub struct Row {
    pub past: Vec<Past>,
    /// Calls of the open draft.
    pub draft: Vec<Call>,
    pub tokens: Vec<u32>,
    /// By token.
    pub logits: Vec<Vec<u32>>,
    /// Its length where that is over.
    pub prompt: Option<usize>,
    /// Tokens before the last call.
    pub undo: usize,
    /// Tokens of an open prompt were taken back since the last call that brought some.
    pub shortened: bool,
}

/// Cuts calls off once `left` tokens have come. Those that are left with nothing may have ended the prompt.
fn cut(calls: &mut Vec<Call>, left: &mut usize) {
    for call in &mut *calls {
        call.tokens.truncate(*left);
        *left -= call.tokens.len();
    }
    calls.retain(|call| !call.tokens.is_empty() || !call.more);
}

impl Row {
    pub fn truncate(&mut self, to: usize) {
        if to == self.tokens.len() {
            return;
        }
        if to == 0 {
            *self = Self::default();
            return;
        }
        let mut left = to;
        for past in &mut self.past {
            match past {
                Past::Call(call) => {
                    call.tokens.truncate(left);
                    left -= call.tokens.len();
                }
                Past::Accepted(calls) => cut(calls, &mut left),
            }
        }
        self.past.retain(|past| match past {
            Past::Call(call) => !call.tokens.is_empty() || !call.more,
            Past::Accepted(calls) => !calls.is_empty(),
        });
        cut(&mut self.draft, &mut left);
        self.tokens.truncate(to);
        self.logits.truncate(to);
        self.prompt = self.prompt.map(|prompt| prompt.min(to));
        self.undo = self.undo.min(to);
        self.shortened |= self.prompt.is_none();
    }

    pub fn calls(&self) -> impl Iterator<Item = &Call> {
        let past = self.past.iter().flat_map(|past| match past {
            Past::Call(call) => std::slice::from_ref(call),
            Past::Accepted(calls) => calls,
        });
        past.chain(&self.draft)
    }
}

/// The calls of a draft joined, as far as that leaves its prompt what it is.
pub fn joined(calls: &[Call], mut length: usize, mut over: bool) -> Vec<Call> {
    let mut all: Vec<Call> = Vec::new();
    let mut join = false;
    for call in calls {
        length += call.tokens.len();
        match all.last_mut().filter(|_| join) {
            Some(last) => {
                last.tokens.extend_from_slice(&call.tokens);
                last.more = call.more;
            }
            None => all.push(call.clone()),
        }
        let ends = !over && !call.more && length > 0;
        over |= ends;
        join = !ends;
    }
    all
}
