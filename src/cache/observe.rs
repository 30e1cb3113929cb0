//! What attention reports to a cache.

use std::fmt;

use burn::tensor::Tensor;

/// What a backend wants attention to report at a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Observation {
    /// Nothing.
    Nothing,
    /// For every query head, the probability that each slot received, summed over the step's queries.
    ColumnSums,
    /// For every query head, the probabilities of the newest queries of each sequence: this many, or all of
    /// the step if there are fewer.
    LastQueries(usize),
}

impl fmt::Display for Observation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nothing => f.write_str("nothing"),
            Self::ColumnSums => f.write_str("column sums"),
            Self::LastQueries(usize::MAX) => f.write_str("the probabilities of all queries"),
            Self::LastQueries(count) => write!(f, "the probabilities of the last {count} queries"),
        }
    }
}

/// What attention reports, as an [`Observation`] asked.
#[derive(Debug)]
#[non_exhaustive]
pub enum Observed {
    /// `[batch, heads, slots]` in f32, slots as returned by
    /// [`keys_values`](crate::cache::CacheBackend::keys_values).
    ColumnSums(Tensor<3>),
    /// `[batch, heads, queries, slots]` in f32. The newest query of each sequence comes last; a sequence with
    /// fewer queries begins with zeros.
    LastQueries(Tensor<4>),
}

impl Observed {
    /// The observation that asks for this report.
    pub(crate) fn kind(&self) -> Observation {
        match self {
            Self::ColumnSums(_) => Observation::ColumnSums,
            Self::LastQueries(queries) => Observation::LastQueries(queries.dims()[2]),
        }
    }
}
