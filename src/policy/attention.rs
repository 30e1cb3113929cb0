//! What attention reported of one sequence.

use std::ops::Range;

/// What attention reported of one sequence at one layer: for each query that was reported, the probability that each
/// query head gave to each slot.
///
/// With [`ColumnSums`](crate::cache::Observation::ColumnSums) there is one query, which stands for all of the step.
/// After an accepted draft there is one for each of its tokens, whatever was asked for. There is none if nothing was
/// asked for. Indices of slots are those of [`Entries::positions`](super::Entries::positions); slots beyond the end of
/// a list received nothing.
#[derive(Debug, Clone)]
pub struct Attention<'a> {
    queries: Vec<Query<'a>>,
    /// The query heads this is about.
    heads: Range<usize>,
}

/// What one query gave: head `h` is `probabilities[h * stride ..][.. slots]`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Query<'a> {
    pub(super) position: usize,
    pub(super) probabilities: &'a [f32],
    pub(super) stride: usize,
    pub(super) slots: usize,
}

impl<'a> Query<'a> {
    pub(super) fn head(self, head: usize) -> &'a [f32] {
        &self.probabilities[head * self.stride..][..self.slots]
    }

    /// The probabilities of all heads, one after the other, for the first `slots` slots.
    pub(super) fn to_vec(self, heads: usize, slots: usize) -> Vec<f32> {
        let slots = slots.min(self.slots);
        let mut all = Vec::with_capacity(heads * slots);
        (0..heads).for_each(|head| all.extend_from_slice(&self.head(head)[..slots]));
        all
    }
}

impl<'a> Attention<'a> {
    pub(super) const fn new(queries: Vec<Query<'a>>, heads: Range<usize>) -> Self {
        Self { queries, heads }
    }

    /// The positions of the queries, oldest first.
    pub fn queries(&self) -> impl DoubleEndedIterator<Item = usize> + ExactSizeIterator {
        self.queries.iter().map(|query| query.position)
    }

    /// The query heads this is about: those that share a KV head where KV heads may hold different entries, else all.
    #[must_use]
    pub fn heads(&self) -> Range<usize> {
        self.heads.clone()
    }

    /// The probabilities that one query of one head gave, slot by slot.
    ///
    /// # Panics
    /// If there is no such query or head.
    #[must_use]
    pub fn probabilities(&self, query: usize, head: usize) -> &[f32] {
        self.queries[query].head(head)
    }

    /// The probabilities that several queries of one head gave, summed slot by slot.
    ///
    /// # Panics
    /// If there are no such queries, or no such head.
    #[must_use]
    pub fn sums(&self, queries: Range<usize>, head: usize) -> Vec<f32> {
        let mut sums = Vec::new();
        for query in &self.queries[queries] {
            let probabilities = query.head(head);
            sums.resize(sums.len().max(probabilities.len()), 0.0);
            let both = sums.iter_mut().zip(probabilities);
            both.for_each(|(sum, more)| *sum += more);
        }
        sums
    }
}
