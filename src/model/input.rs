//! The input of a decoder, and what it refuses.

use std::ops::Range;

use crate::cache::{CacheError, TokenIds};

/// The input of a decoder in one step.
#[derive(Debug, Clone)]
pub struct Input {
    pub(super) tokens: TokenIds,
    pub(super) last_only: bool,
    pub(super) more_follows: bool,
}

impl Input {
    /// Computes the logits of each sequence's last token only.
    #[must_use]
    pub const fn last_only(mut self) -> Self {
        self.last_only = true;
        self
    }

    /// Says whether more chunks of the same prompt follow; false by default.
    #[must_use]
    pub const fn more_follows(mut self, more_follows: bool) -> Self {
        self.more_follows = more_follows;
        self
    }
}

impl<T: Into<TokenIds>> From<T> for Input {
    fn from(tokens: T) -> Self {
        Self {
            tokens: tokens.into(),
            last_only: false,
            more_follows: false,
        }
    }
}

/// Why a decoder refused a step. Nothing has changed, unless a layer of the cache failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ForwardError {
    /// A token the vocabulary does not have.
    #[error("token {index} of sequence {sequence} has id {token}, the vocabulary ends at {vocab}")]
    Vocabulary {
        /// The sequence.
        sequence: usize,
        /// The token's index among the sequence's tokens of the step.
        index: usize,
        /// Its id.
        token: u32,
        /// Size of the vocabulary.
        vocab: usize,
    },
    /// The step needs more positions than the model has.
    #[error("position {position} is needed, the model has {max_positions}")]
    ContextFull {
        /// The last position that the step needs.
        position: usize,
        /// Positions of the model.
        max_positions: usize,
    },
    /// The decoder does not have these layers.
    #[error("layers {found:?} of a model of {layers}")]
    Layers {
        /// The requested layers.
        found: Range<usize>,
        /// Layers of the model.
        layers: usize,
    },
    /// A residual of another shape than the step's.
    #[error("the residual has shape {found:?}, the step asks for {expected:?}")]
    Residual {
        /// `[1, tokens, hidden]` of step and model.
        expected: [usize; 3],
        /// The shape found.
        found: [usize; 3],
    },
    /// The cache refused the step, or failed in it.
    #[error(transparent)]
    Cache(#[from] CacheError),
}
