//! What a step brings: token ids and their positions.

use crate::{
    cache::{CacheError, TokenIds},
    positions::Positions,
};

/// One forward call of the decoder, announced to the cache before its first layer.
///
/// Sequences may bring different numbers of tokens. There are no pads: in tensors of a step, the tokens of all
/// sequences stand one after another, as in [`Positions`].
///
/// ```
/// use kv_direct::cache::Step;
///
/// let step = Step::new(vec![vec![11, 12]].into(), &[5])?;
/// assert_eq!(step.positions().slots(0, 0), [5, 6]);
/// # Ok::<(), kv_direct::cache::CacheError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Step {
    tokens: TokenIds,
    starts: Vec<usize>,
    positions: Positions,
    more_follows: bool,
}

impl Step {
    /// A step in which sequence `i` of `tokens` starts at position `starts[i]`.
    ///
    /// # Errors
    /// [`EmptyStep`](CacheError::EmptyStep) if no sequence has a token,
    /// [`Starts`](CacheError::Starts) if `starts` has another number of sequences.
    pub fn new(tokens: TokenIds, starts: &[usize]) -> Result<Self, CacheError> {
        let sequences = tokens.sequences();
        if tokens.longest() == 0 {
            return Err(CacheError::EmptyStep { sequences });
        }
        if sequences != starts.len() {
            return Err(CacheError::Starts {
                sequences,
                starts: starts.len(),
            });
        }
        let positions = Positions::contiguous(starts, &tokens.lengths());
        Ok(Self {
            tokens,
            starts: starts.to_vec(),
            positions,
            more_follows: false,
        })
    }

    /// Says whether more chunks of the same prompt follow; false by default.
    #[must_use]
    pub const fn with_more_follows(mut self, more_follows: bool) -> Self {
        self.more_follows = more_follows;
        self
    }

    /// The token ids.
    #[must_use]
    pub const fn tokens(&self) -> &TokenIds {
        &self.tokens
    }

    /// The position at which each sequence starts.
    #[must_use]
    pub fn starts(&self) -> &[usize] {
        &self.starts
    }

    /// The position of every token.
    #[must_use]
    pub const fn positions(&self) -> &Positions {
        &self.positions
    }

    /// Whether more chunks of the same prompt follow.
    #[must_use]
    pub const fn more_follows(&self) -> bool {
        self.more_follows
    }
}
