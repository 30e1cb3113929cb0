//! What remains of a sequence: its tokens, and the steps they came in.

/// What a step brought to a sequence: nothing, where it only ended its prompt.
#[derive(Debug, Clone)]
pub struct Step {
    pub tokens: Vec<u32>,
    pub more: bool,
}

#[derive(Debug, Clone)]
pub enum Past {
    Step(Step),
    Accepted(Vec<Step>),
}

/// What remains of a sequence.
#[derive(Debug, Clone, Default)]
pub struct Sequence {
    pub past: Vec<Past>,
    /// Steps of the open draft.
    pub draft: Vec<Step>,
    pub tokens: Vec<u32>,
    /// By token.
    pub logits: Vec<Vec<u32>>,
    /// Length of the prompt, once it is over.
    pub prompt: Option<usize>,
    /// Tokens before the last step.
    pub undo: usize,
    /// Whether tokens of an open prompt were truncated since the last step that brought some.
    pub shortened: bool,
}

/// Shortens steps to `left` tokens in total. A step that is left without tokens may have ended the prompt.
fn cut(steps: &mut Vec<Step>, left: &mut usize) {
    for step in &mut *steps {
        step.tokens.truncate(*left);
        *left -= step.tokens.len();
    }
    steps.retain(|step| !step.tokens.is_empty() || !step.more);
}

impl Sequence {
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
                Past::Step(step) => {
                    step.tokens.truncate(left);
                    left -= step.tokens.len();
                }
                Past::Accepted(steps) => cut(steps, &mut left),
            }
        }
        self.past.retain(|past| match past {
            Past::Step(step) => !step.tokens.is_empty() || !step.more,
            Past::Accepted(steps) => !steps.is_empty(),
        });
        cut(&mut self.draft, &mut left);
        self.tokens.truncate(to);
        self.logits.truncate(to);
        self.prompt = self.prompt.map(|prompt| prompt.min(to));
        self.undo = self.undo.min(to);
        self.shortened |= self.prompt.is_none();
    }

    pub fn steps(&self) -> impl Iterator<Item = &Step> {
        let past = self.past.iter().flat_map(|past| match past {
            Past::Step(step) => std::slice::from_ref(step),
            Past::Accepted(steps) => steps,
        });
        past.chain(&self.draft)
    }
}

/// The steps of a draft joined, as far as the length of the prompt stays the same.
pub fn joined(steps: &[Step], mut length: usize, mut over: bool) -> Vec<Step> {
    let mut all: Vec<Step> = Vec::new();
    let mut join = false;
    for step in steps {
        length += step.tokens.len();
        match all.last_mut().filter(|_| join) {
            Some(last) => {
                last.tokens.extend_from_slice(&step.tokens);
                last.more = step.more;
            }
            None => all.push(step.clone()),
        }
        let ends = !over && !step.more && length > 0;
        over |= ends;
        join = !ends;
    }
    all
}
