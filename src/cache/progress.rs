//! Where a cache stands: tokens taken in, and how far the current step has come. Every backend
//! keeps one, so that all refuse the same things in the same words.

use crate::cache::{CacheError, LayerIndex, ModelShape, Span, Step};

#[derive(Debug, Clone, Default)]
pub(crate) struct Progress {
    /// Tokens taken in, by batch row; empty before the first step.
    lengths: Vec<usize>,
    /// The step that has begun and is not committed, with the number of layers that had their turn.
    open: Option<(Step, usize)>,
    /// Whether a layer of the open step failed.
    failed: bool,
}

impl Progress {
    /// Opens a step, or says why not.
    pub(crate) fn begin(&mut self, step: &Step) -> Result<(), CacheError> {
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
        self.lengths.resize(step.starts().len(), 0);
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

    /// Checks that a truncation makes sense; [`truncate`](Self::truncate) then carries it out.
    pub(crate) fn can_truncate(&self, to: usize) -> Result<(), CacheError> {
        self.settled()?;
        let longest = self.lengths.iter().copied().max().unwrap_or(0);
        if to > longest {
            Err(CacheError::TruncateBeyond { to, longest })
        } else {
            Ok(())
        }
    }

    pub(crate) fn truncate(&mut self, to: usize) {
        for length in &mut self.lengths {
            *length = to.min(*length);
        }
    }

    /// Tokens taken in, by batch row.
    pub(crate) fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    pub(crate) fn length(&self, row: usize) -> usize {
        self.lengths.get(row).copied().unwrap_or(0)
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
