//! How many rows a policy may keep.

use std::fmt;

use crate::cache::CacheError;

/// Rows that a policy holds between steps in a layer: a number, or a share of the prompt.
///
/// ```
/// use kv_direct::cache::Budget;
///
/// assert_eq!(Budget::from(64), Budget::rows(64));
/// let quarter = Budget::of_prompt(0.25)?;
/// assert!(Budget::of_prompt(1.5).is_err());
/// # let _ = quarter;
/// # Ok::<(), kv_direct::cache::CacheError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Budget(Amount);

#[derive(Debug, Clone, Copy, PartialEq)]
enum Amount {
    Rows(usize),
    OfPrompt(f64),
}

impl Budget {
    /// This many rows.
    #[must_use]
    pub const fn rows(rows: usize) -> Self {
        Self(Amount::Rows(rows))
    }

    /// This share of the prompt's tokens, rounded down, one row at least. As long as more chunks of the
    /// prompt follow nothing is dropped.
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

    /// Rows for a batch row whose prompt has this length; none while that is not known and matters.
    pub(crate) fn of(self, prompt: Option<usize>) -> Option<usize> {
        match self.0 {
            Amount::Rows(rows) => Some(rows),
            Amount::OfPrompt(ratio) => {
                prompt.map(|length| ((length as f64 * ratio) as usize).max(1))
            }
        }
    }

    /// Checks that `fixed` rows and one more fit, where the budget is a number.
    pub(crate) fn holds(self, fixed: usize) -> Result<Self, CacheError> {
        match self.0 {
            Amount::Rows(rows) if rows < fixed.max(1) => Err(CacheError::Budget {
                found: rows,
                smallest: fixed.max(1),
            }),
            _ => Ok(self),
        }
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Amount::Rows(rows) => write!(f, "{rows}"),
            Amount::OfPrompt(ratio) => write!(f, "{ratio} of the prompt"),
        }
    }
}

impl From<usize> for Budget {
    fn from(rows: usize) -> Self {
        Self::rows(rows)
    }
}
