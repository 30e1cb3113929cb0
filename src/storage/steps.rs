//! Where a cache stands: processed tokens, the open step, the open draft.

use crate::cache::{CacheError, LayerIndex, ModelShape, Observation, Observed, Span, Step};

/// Checks that steps, layers, observations and drafts come in order, and counts processed tokens.
///
/// Every backend owns one, so that all refuse the same calls with the same errors. A method that returns an error
/// has changed nothing, except within a step: there the step has failed, and everything but a new tracker returns
/// [`Poisoned`](CacheError::Poisoned).
///
/// ```
/// use burn::tensor::DType;
/// use kv_direct::cache::{ModelShape, Step};
/// use kv_direct::{exact::KernelShapes, storage::StepTracker};
///
/// let shape = ModelShape::new(2, 64, DType::F32, KernelShapes::new(4, 2, 16));
/// let mut tracker = StepTracker::new(&shape, vec![]);
/// tracker.begin(&Step::new(vec![vec![7, 8]].into(), &[0])?)?;
/// assert_eq!((tracker.lengths(), tracker.lengths_after()), (&[0][..], vec![2]));
/// let refused = tracker.commit().unwrap_err();
/// assert_eq!(refused.to_string(), "commit after 0 of 2 layers");
/// # Ok::<(), kv_direct::cache::CacheError>(())
/// ```
#[derive(Debug, Clone)]
pub struct StepTracker {
    shape: ModelShape,
    /// Processed tokens of every sequence; empty before the first step.
    pub(super) lengths: Vec<usize>,
    open: Option<OpenStep>,
    /// What `lengths` were when the last step began: what undoing it goes back to.
    pub(super) last: Vec<usize>,
    /// Whether the open step has failed.
    failed: bool,
    /// Processed tokens when the open draft began; sequences that came later had none.
    pub(super) draft: Option<Vec<usize>>,
}

/// The step that has begun and is not committed.
#[derive(Debug, Clone)]
struct OpenStep {
    step: Step,
    /// Layers called so far.
    called: usize,
    /// What attention still has to report of the last one.
    awaited: Observation,
}

impl StepTracker {
    /// For a cache of a model of this shape that has processed these many tokens of every sequence; none for an empty
    /// one.
    #[must_use]
    pub fn new(shape: &ModelShape, lengths: Vec<usize>) -> Self {
        Self {
            shape: shape.clone(),
            last: lengths.clone(),
            lengths,
            open: None,
            failed: false,
            draft: None,
        }
    }

    /// The model's shape.
    pub(crate) const fn shape(&self) -> &ModelShape {
        &self.shape
    }

    /// Processed tokens of every sequence.
    #[must_use]
    pub fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    /// Processed tokens of every sequence once the open step is committed.
    #[must_use]
    pub fn lengths_after(&self) -> Vec<usize> {
        let new = self.new_tokens();
        let new = new.into_iter().chain(std::iter::repeat(0));
        let lengths = self.lengths.iter().zip(new);
        lengths.map(|(length, new)| length + new).collect()
    }

    /// Tokens that the open step brings to every sequence.
    pub(crate) fn new_tokens(&self) -> Vec<usize> {
        let open = self.open.as_ref();
        open.map_or_else(Vec::new, |open| open.step.tokens().lengths())
    }

    /// Checks whether a step may begin.
    pub(crate) fn can_begin(&self, step: &Step) -> Result<(), CacheError> {
        self.check_idle()?;
        let (expected, found) = (self.lengths.len(), step.starts().len());
        if expected > 0 && expected != found {
            return Err(CacheError::Sequences { expected, found });
        }
        for (sequence, &found) in step.starts().iter().enumerate() {
            let expected = self.lengths.get(sequence).copied().unwrap_or(0);
            if found != expected {
                return Err(CacheError::Gap {
                    sequence,
                    expected,
                    found,
                });
            }
        }
        Ok(())
    }

    /// Opens a step.
    ///
    /// # Errors
    /// [`Poisoned`](CacheError::Poisoned), [`Sequences`](CacheError::Sequences), [`Gap`](CacheError::Gap).
    pub fn begin(&mut self, step: &Step) -> Result<(), CacheError> {
        self.can_begin(step)?;
        self.lengths.resize(step.starts().len(), 0);
        if self.draft.is_none() {
            self.last.clone_from(&self.lengths);
        }
        self.open = Some(OpenStep {
            step: step.clone(),
            called: 0,
            awaited: Observation::Nothing,
        });
        Ok(())
    }

    /// Enters the layer that is due, after checking the span against step and model. `wanted` is what attention
    /// must report before the next layer.
    ///
    /// # Errors
    /// [`Poisoned`](CacheError::Poisoned), [`LayerOrder`](CacheError::LayerOrder),
    /// [`NotObserved`](CacheError::NotObserved) for the layer before, and what is wrong with the span. The step has
    /// then failed.
    pub fn enter(
        &mut self,
        layer: LayerIndex,
        span: &Span<'_>,
        wanted: Observation,
    ) -> Result<(), CacheError> {
        let entered = self.try_enter(layer, span, wanted);
        self.failed |= entered.is_err() && self.open.is_some();
        entered
    }

    fn try_enter(
        &mut self,
        layer: LayerIndex,
        span: &Span<'_>,
        wanted: Observation,
    ) -> Result<(), CacheError> {
        self.check_sound()?;
        let layers = self.shape.layers();
        let due = self.open.as_ref().map(|open| open.called);
        let due = due.filter(|&due| due < layers);
        let Some(open) = self.open.as_mut().filter(|_| due == Some(layer.index())) else {
            return Err(CacheError::LayerOrder {
                expected: due,
                found: layer.index(),
            });
        };
        open.check_observed()?;
        span.check(&open.step, &self.shape)?;
        open.called += 1;
        open.awaited = wanted;
        Ok(())
    }

    /// Checks a report of attention: for the layer just entered, of the kind that was wanted, once, and in the shape
    /// of its `slots` slots.
    ///
    /// # Errors
    /// [`Poisoned`](CacheError::Poisoned), [`LayerOrder`](CacheError::LayerOrder),
    /// [`Observation`](CacheError::Observation), [`Shape`](CacheError::Shape). The step has then failed.
    pub fn observe(
        &mut self,
        layer: LayerIndex,
        observed: &Observed,
        slots: usize,
    ) -> Result<(), CacheError> {
        let checked = self.try_observe(layer, observed, slots);
        self.failed |= checked.is_err() && self.open.is_some();
        checked
    }

    fn try_observe(
        &mut self,
        layer: LayerIndex,
        observed: &Observed,
        slots: usize,
    ) -> Result<(), CacheError> {
        self.check_sound()?;
        let (batch, heads) = (self.lengths.len(), self.shape.kernels.heads);
        let longest = self.new_tokens().into_iter().max().unwrap_or(0);
        let last = self
            .open
            .as_ref()
            .and_then(|open| open.called.checked_sub(1));
        let Some(open) = self.open.as_mut().filter(|_| last == Some(layer.index())) else {
            return Err(CacheError::LayerOrder {
                expected: last,
                found: layer.index(),
            });
        };
        let expected = std::mem::replace(&mut open.awaited, Observation::Nothing);
        let (expected_dims, found_dims) = match (expected, observed) {
            (Observation::ColumnSums, Observed::ColumnSums(sums)) => {
                (vec![batch, heads, slots], sums.dims().to_vec())
            }
            (Observation::LastQueries(count), Observed::LastQueries(queries)) => (
                vec![batch, heads, count.min(longest), slots],
                queries.dims().to_vec(),
            ),
            _ => {
                return Err(CacheError::Observation {
                    layer: layer.index(),
                    expected,
                    found: observed.kind(),
                });
            }
        };
        if expected_dims != found_dims {
            return Err(CacheError::Shape {
                what: "observed probabilities",
                expected: expected_dims,
                found: found_dims,
            });
        }
        Ok(())
    }

    /// Marks the open step as failed.
    pub const fn fail(&mut self) {
        self.failed = self.open.is_some();
    }

    /// Closes the step: its tokens are processed.
    ///
    /// # Errors
    /// [`Poisoned`](CacheError::Poisoned), [`Uncommittable`](CacheError::Uncommittable),
    /// [`NotObserved`](CacheError::NotObserved), after which the step has failed.
    pub fn commit(&mut self) -> Result<(), CacheError> {
        self.check_sound()?;
        let (layers, after) = (self.shape.layers(), self.lengths_after());
        let called = self.open.as_ref().map_or(0, |open| open.called);
        let Some(open) = self.open.as_ref().filter(|_| called == layers) else {
            return Err(CacheError::Uncommittable { called, layers });
        };
        if let Err(error) = open.check_observed() {
            self.failed = true;
            return Err(error);
        }
        (self.lengths, self.open) = (after, None);
        Ok(())
    }

    const fn check_sound(&self) -> Result<(), CacheError> {
        if self.failed {
            return Err(CacheError::Poisoned);
        }
        Ok(())
    }

    /// Checks that no step is open.
    ///
    /// # Errors
    /// [`Poisoned`](CacheError::Poisoned).
    pub const fn check_idle(&self) -> Result<(), CacheError> {
        if self.open.is_some() {
            return Err(CacheError::Poisoned);
        }
        Ok(())
    }
}

impl OpenStep {
    /// Checks that the last layer was observed, if it had to be.
    fn check_observed(&self) -> Result<(), CacheError> {
        match self.awaited {
            Observation::Nothing => Ok(()),
            expected => Err(CacheError::NotObserved {
                layer: self.called.saturating_sub(1),
                expected,
            }),
        }
    }
}
