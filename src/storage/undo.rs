//! Drafts, truncation and the choice of sequences: what changes a cache between steps.

use super::StepTracker;
use crate::cache::CacheError;

impl StepTracker {
    /// Checks that neither a step nor a draft is open.
    pub(crate) fn check_no_draft(&self) -> Result<(), CacheError> {
        self.check_idle()?;
        if self.draft.is_some() {
            return Err(CacheError::DraftOpen);
        }
        Ok(())
    }

    /// Opens a draft at the present lengths.
    ///
    /// # Errors
    /// [`Poisoned`](CacheError::Poisoned), [`DraftOpen`](CacheError::DraftOpen).
    pub fn begin_draft(&mut self) -> Result<(), CacheError> {
        self.check_no_draft()?;
        self.draft = Some(self.lengths.clone());
        Ok(())
    }

    /// Closes the draft, and returns the length of every sequence when it began, or nothing if there was no sequence
    /// yet. Its tokens stay until they are [truncated](Self::truncate).
    ///
    /// # Errors
    /// [`Poisoned`](CacheError::Poisoned), [`NoDraft`](CacheError::NoDraft).
    pub fn end_draft(&mut self) -> Result<Option<Vec<usize>>, CacheError> {
        self.check_idle()?;
        let start = self.draft.take().ok_or(CacheError::NoDraft)?;
        Ok((!start.is_empty()).then_some(start))
    }

    /// Whether a draft is open.
    pub(crate) const fn is_draft(&self) -> bool {
        self.draft.is_some()
    }

    /// Tokens of every sequence outside the draft: those before it, or all.
    pub(crate) fn outside_draft(&self) -> Vec<usize> {
        let mut lengths = self.draft.clone().unwrap_or_else(|| self.lengths.clone());
        lengths.resize(self.lengths.len(), 0);
        lengths
    }

    /// The shortest length of every sequence that a later truncation may return to: what the queries behind it see
    /// must stay. Within a draft that includes the step before it.
    pub(crate) fn anchor(&self) -> Vec<usize> {
        if self.draft.is_none() {
            return self.lengths.clone();
        }
        let last = self.last.iter().copied().chain(std::iter::repeat(0));
        let lengths = self.outside_draft().into_iter().zip(last);
        lengths.map(|(length, last)| length.min(last)).collect()
    }

    /// Checks a truncation. Within a draft it reaches back to the draft's start, or to nothing.
    ///
    /// # Errors
    /// [`Poisoned`](CacheError::Poisoned), [`Sequences`](CacheError::Sequences),
    /// [`TruncateBeyond`](CacheError::TruncateBeyond), [`Irreversible`](CacheError::Irreversible).
    pub fn can_truncate(&self, to: &[usize]) -> Result<(), CacheError> {
        self.check_idle()?;
        let (expected, found) = (self.lengths.len(), to.len());
        if expected != found {
            return Err(CacheError::Sequences { expected, found });
        }
        let mut lengths = to.iter().zip(&self.lengths);
        if let Some((&to, &longest)) = lengths.find(|(to, length)| to > length) {
            return Err(CacheError::TruncateBeyond { to, longest });
        }
        if self.draft.is_some() && to.iter().any(|&to| to > 0) {
            let mut lengths = to.iter().zip(self.outside_draft()).enumerate();
            if let Some((sequence, (&to, shortest))) = lengths.find(|(_, (to, start))| *to < start)
            {
                return Err(CacheError::Irreversible {
                    sequence,
                    to,
                    shortest,
                });
            }
        }
        Ok(())
    }

    /// Shortens every sequence to its length in `to`, after [`can_truncate`](Self::can_truncate).
    pub fn truncate(&mut self, to: &[usize]) {
        self.lengths = to.to_vec();
        self.last.resize(to.len(), 0);
        let last = self.last.iter_mut().zip(to);
        last.for_each(|(last, &to)| *last = to.min(*last));
    }

    /// Checks a choice of sequences.
    pub(crate) fn can_select(&self, sequences: &[usize]) -> Result<(), CacheError> {
        self.check_no_draft()?;
        let held = self.lengths.len();
        match sequences.iter().find(|&&sequence| sequence >= held) {
            None => Ok(()),
            Some(&sequence) => Err(CacheError::NoSequence {
                sequence,
                sequences: held,
            }),
        }
    }

    /// Changes the batch to these of its sequences.
    ///
    /// # Errors
    /// [`Poisoned`](CacheError::Poisoned), [`DraftOpen`](CacheError::DraftOpen),
    /// [`NoSequence`](CacheError::NoSequence).
    pub fn select(&mut self, sequences: &[usize]) -> Result<(), CacheError> {
        self.can_select(sequences)?;
        let of = |lengths: &[usize]| sequences.iter().map(|&i| lengths[i]).collect();
        self.last.resize(self.lengths.len(), 0);
        (self.lengths, self.last) = (of(&self.lengths), of(&self.last));
        Ok(())
    }
}
