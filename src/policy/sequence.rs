//! One sequence, as a policy sees it.

/// One sequence, as a policy sees it.
///
/// After a draft was accepted, "the step" is the whole draft.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Sequence {
    /// Tokens before the step.
    pub before: usize,
    /// Tokens after the step.
    pub length: usize,
    /// Tokens of the prompt; `None` while more chunks of it follow
    /// ([`Step::with_more_follows`](crate::cache::Step::with_more_follows)).
    pub prompt: Option<usize>,
    /// Whether the prompt ends with this step. True in one step only, possibly one that brings this sequence no token.
    pub ends_prompt: bool,
}

impl Sequence {
    /// What is known of the prompt after a truncation to `length` tokens. A prompt that lost tokens is over.
    pub(super) fn shortened(self, length: usize) -> Self {
        Self {
            length,
            prompt: self.prompt.filter(|_| length > 0).map(|p| length.min(p)),
            ..Self::default()
        }
    }

    /// Between steps.
    pub(super) fn at(length: usize, prompt: Option<usize>) -> Self {
        Self {
            before: length,
            length,
            prompt,
            ends_prompt: false,
        }
    }
}
