//! Where a cache stands: tokens taken in, how far the current step has come, and the open checkpoint.
//! Every backend keeps one, so that all refuse the same things in the same words.

use crate::cache::{CacheError, LayerIndex, ModelShape, Span, Step};

#[derive(Debug, Clone, Default)]
pub(crate) struct Progress {
    /// Tokens taken in, by batch row; empty before the first step.
    lengths: Vec<usize>,
    /// The step that has begun and is not committed, with the number of layers that had their turn.
    open: Option<(Step, usize)>,
    /// What `lengths` were when the last step began: what undoing it goes back to.
    last: Vec<usize>,
    /// Whether a layer of the open step failed.
    failed: bool,
    /// Tokens taken in when the open checkpoint was set; rows that came later had none.
    draft: Option<Vec<usize>>,
}

impl Progress {
    /// Says why a step cannot begin, if it cannot.
    pub(crate) fn can_begin(&self, step: &Step) -> Result<(), CacheError> {
        self.settled()?;
        if !self.lengths.is_empty() && self.lengths.len() != step.starts().len() {
            return Err(CacheError::Rows {
                expected: self.lengths.len(),
                found: step.starts().len(),
            });
        }
        for (row, &found) in step.starts().iter().enumerate() {
            let expected = self.length(row);
            if found != expected {
                return Err(CacheError::Gap {
                    row,
                    expected,
                    found,
                });
            }
        }
        Ok(())
    }

    /// Opens a step, or says why not.
    pub(crate) fn begin(&mut self, step: &Step) -> Result<(), CacheError> {
        self.can_begin(step)?;
        self.lengths.resize(step.starts().len(), 0);
        if self.draft.is_none() {
            self.last.clone_from(&self.lengths);
        }
        self.open = Some((step.clone(), 0));
        Ok(())
    }

    /// Lets the layer that is due take its turn, after checking the span against step and model. A
    /// refusal within a step is a failure of the step.
    pub(crate) fn layer(
        &mut self,
        layer: LayerIndex,
        span: &Span<'_>,
        shape: &ModelShape,
    ) -> Result<(), CacheError> {
        if self.failed {
            return Err(CacheError::Poisoned);
        }
        let due = self
            .open
            .as_ref()
            .map(|(_, called)| *called)
            .filter(|&due| due < shape.layers());
        let Some((step, called)) = self.open.as_mut().filter(|_| due == Some(layer.index())) else {
            self.failed = self.open.is_some();
            return Err(CacheError::LayerOrder {
                expected: due,
                found: layer.index(),
            });
        };
        let checked = span.check(step, shape);
        self.failed = checked.is_err();
        *called += 1;
        checked
    }

    /// Checks that attention may be observed: that of the layer whose turn it just was.
    pub(crate) fn observing(&mut self, layer: LayerIndex) -> Result<(), CacheError> {
        if self.failed {
            return Err(CacheError::Poisoned);
        }
        let last = self
            .open
            .as_ref()
            .and_then(|(_, called)| called.checked_sub(1));
        if last == Some(layer.index()) {
            return Ok(());
        }
        self.failed = self.open.is_some();
        Err(CacheError::LayerOrder {
            expected: last,
            found: layer.index(),
        })
    }

    /// The layer whose turn it was failed, and with it the step.
    pub(crate) const fn fail(&mut self) {
        self.failed = true;
    }

    /// Closes the step: its tokens count from now on.
    pub(crate) fn commit(&mut self, shape: &ModelShape) -> Result<(), CacheError> {
        if self.failed {
            return Err(CacheError::Poisoned);
        }
        let layers = shape.layers();
        match self.open.take() {
            Some((step, called)) if called == layers => {
                for (length, more) in self.lengths.iter_mut().zip(step.tokens().lengths()) {
                    *length += more;
                }
                Ok(())
            }
            open => {
                let called = open.as_ref().map_or(0, |(_, called)| *called);
                self.open = open;
                Err(CacheError::Uncommittable { called, layers })
            }
        }
    }

    /// Refuses while a step is open: begun and not committed, it failed midway.
    pub(crate) const fn settled(&self) -> Result<(), CacheError> {
        if self.open.is_some() {
            Err(CacheError::Poisoned)
        } else {
            Ok(())
        }
    }

    /// Opens a draft at the present lengths.
    pub(crate) fn checkpoint(&mut self) -> Result<(), CacheError> {
        self.undrafted()?;
        self.draft = Some(self.lengths.clone());
        Ok(())
    }

    /// Refuses while a draft or a step is open.
    pub(crate) fn undrafted(&self) -> Result<(), CacheError> {
        self.settled()?;
        if self.draft.is_some() {
            Err(CacheError::CheckpointOpen)
        } else {
            Ok(())
        }
    }

    /// Refuses unless a draft is open and no step is; answers where each batch row stood when it began.
    pub(crate) fn drafted(&self) -> Result<Vec<usize>, CacheError> {
        self.settled()?;
        if self.draft.is_none() {
            return Err(CacheError::NoCheckpoint);
        }
        Ok(self.verified())
    }

    pub(crate) const fn is_draft(&self) -> bool {
        self.draft.is_some()
    }

    /// Whether there was a batch when the draft began.
    pub(crate) fn has_batch_before_draft(&self) -> bool {
        self.draft
            .as_ref()
            .is_some_and(|lengths| !lengths.is_empty())
    }

    pub(crate) fn end_draft(&mut self) {
        self.draft = None;
    }

    /// Tokens of every batch row that nothing may take back: those before the draft, or all.
    pub(crate) fn verified(&self) -> Vec<usize> {
        let mut verified = self.draft.clone().unwrap_or_else(|| self.lengths.clone());
        verified.resize(self.lengths.len(), 0);
        verified
    }

    /// Tokens of every batch row to which one can go back from here on: what the queries behind them see is
    /// not to be let go of. Within a draft that includes the call before it.
    pub(crate) fn anchor(&self) -> Vec<usize> {
        if self.draft.is_none() {
            return self.lengths.clone();
        }
        let last = self.last.iter().copied().chain(std::iter::repeat(0));
        self.verified()
            .into_iter()
            .zip(last)
            .map(|(verified, last)| verified.min(last))
            .collect()
    }

    /// Checks that a truncation makes sense; [`truncate`](Self::truncate) then carries it out. Within a
    /// draft it goes back to where that began, and to nothing.
    pub(crate) fn can_truncate(&self, to: &[usize]) -> Result<(), CacheError> {
        self.settled()?;
        if to.len() != self.lengths.len() {
            return Err(CacheError::Rows {
                expected: self.lengths.len(),
                found: to.len(),
            });
        }
        let mut rows = to.iter().zip(&self.lengths);
        if let Some((&to, &longest)) = rows.find(|(to, length)| to > length) {
            return Err(CacheError::TruncateBeyond { to, longest });
        }
        if self.draft.is_some() && to.iter().any(|&to| to > 0) {
            let verified = self.verified();
            let mut rows = to.iter().zip(verified).enumerate();
            if let Some((row, (&to, oldest))) = rows.find(|(_, (to, oldest))| *to < oldest) {
                return Err(CacheError::Irreversible { row, to, oldest });
            }
        }
        Ok(())
    }

    /// Takes every batch row back to its length in `to`.
    pub(crate) fn truncate(&mut self, to: &[usize]) {
        self.lengths = to.to_vec();
        self.last.resize(to.len(), 0);
        self.last
            .iter_mut()
            .zip(to)
            .for_each(|(last, &to)| *last = to.min(*last));
    }

    /// Checks a choice of batch rows; [`select_rows`](Self::select_rows) then carries it out.
    pub(crate) fn can_select_rows(&self, rows: &[usize]) -> Result<(), CacheError> {
        self.undrafted()?;
        let held = self.lengths.len();
        match rows.iter().find(|&&row| row >= held) {
            Some(&row) => Err(CacheError::NoRow { row, rows: held }),
            None => Ok(()),
        }
    }

    pub(crate) fn select_rows(&mut self, rows: &[usize]) {
        let of = |lengths: &[usize]| rows.iter().map(|&row| lengths[row]).collect();
        self.last.resize(self.lengths.len(), 0);
        (self.lengths, self.last) = (of(&self.lengths), of(&self.last));
    }

    /// Where a cache stands that took in these tokens by batch row.
    pub(crate) fn at(lengths: Vec<usize>) -> Self {
        Self {
            last: lengths.clone(),
            lengths,
            ..Self::default()
        }
    }

    /// Tokens taken in, by batch row.
    pub(crate) fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    pub(crate) fn length(&self, row: usize) -> usize {
        self.lengths.get(row).copied().unwrap_or(0)
    }

    /// Tokens that the open step brings to every row.
    pub(crate) fn adding(&self) -> Vec<usize> {
        let open = self.open.as_ref();
        open.map_or_else(Vec::new, |(step, _)| step.tokens().lengths())
    }

    /// Tokens of the row to which the open step brings most.
    pub(crate) fn widest(&self) -> usize {
        self.adding().into_iter().max().unwrap_or(0)
    }

    /// Tokens by row once the open step is committed.
    pub(crate) fn lengths_after(&self) -> Vec<usize> {
        let more = self.open.as_ref().map(|(step, _)| step.tokens().lengths());
        self.lengths
            .iter()
            .enumerate()
            .map(|(row, length)| length + more.as_ref().map_or(0, |m| m[row]))
            .collect()
    }
}
