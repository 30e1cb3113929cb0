//! How many entries a policy keeps.

use std::fmt;

use super::Sequence;
use crate::cache::CacheError;

/// Entries that a policy keeps of a sequence between steps, in each full-attention layer: a number, or a share of the
/// prompt.
///
/// ```
/// use kv_direct::policy::TokenBudget;
///
/// assert_eq!(TokenBudget::from(64), TokenBudget::tokens(64));
/// assert_eq!(TokenBudget::of_prompt(0.25)?.to_string(), "0.25 of the prompt");
/// assert!(TokenBudget::of_prompt(1.5).is_err());
/// # Ok::<(), kv_direct::cache::CacheError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenBudget(Amount);

#[derive(Debug, Clone, Copy, PartialEq)]
enum Amount {
    Tokens(usize),
    OfPrompt(f64),
}

impl TokenBudget {
    /// This many tokens.
    #[must_use]
    pub const fn tokens(tokens: usize) -> Self {
        Self(Amount::Tokens(tokens))
    }

    /// This share of the prompt's tokens, rounded down, but at least one. Nothing is evicted while more chunks of the
    /// prompt follow.
    ///
    /// # Errors
    /// [`Ratio`](CacheError::Ratio) unless `ratio` is above 0 and at most 1.
    pub fn of_prompt(ratio: f64) -> Result<Self, CacheError> {
        if ratio > 0.0 && ratio <= 1.0 {
            Ok(Self(Amount::OfPrompt(ratio)))
        } else {
            Err(CacheError::Ratio { found: ratio })
        }
    }

    /// The tokens for a sequence; `None` if they depend on a prompt that is not complete.
    #[must_use]
    pub fn of(self, sequence: &Sequence) -> Option<usize> {
        match self.0 {
            Amount::Tokens(tokens) => Some(tokens),
            Amount::OfPrompt(ratio) => {
                let share = |prompt: usize| ((prompt as f64 * ratio) as usize).max(1);
                sequence.prompt.map(share)
            }
        }
    }

    /// The text for an [option](super::Policy::options), which never changes: the tokens, as `64`, or the share of the
    /// prompt, as `prompt*0.25`.
    #[must_use]
    pub fn as_option(self) -> String {
        match self.0 {
            Amount::Tokens(tokens) => tokens.to_string(),
            Amount::OfPrompt(ratio) => format!("prompt*{ratio}"),
        }
    }

    /// The tokens, where they are a number.
    pub(super) const fn number(self) -> Option<usize> {
        match self.0 {
            Amount::Tokens(tokens) => Some(tokens),
            Amount::OfPrompt(_) => None,
        }
    }

    /// Checks that a number is not below `smallest`, nor 0.
    pub(super) fn at_least(self, smallest: usize) -> Result<Self, CacheError> {
        let smallest = smallest.max(1);
        match self.number() {
            Some(found) if found < smallest => Err(CacheError::Budget { found, smallest }),
            _ => Ok(self),
        }
    }
}

impl fmt::Display for TokenBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Amount::Tokens(tokens) => write!(f, "{tokens}"),
            Amount::OfPrompt(ratio) => write!(f, "{ratio} of the prompt"),
        }
    }
}

impl From<usize> for TokenBudget {
    fn from(tokens: usize) -> Self {
        Self::tokens(tokens)
    }
}
