//! A cache with a budget of bytes, and a `FullKv` to which the same is done.

use kv_direct::{
    cache::{CacheBackend, CacheError, Draft, KeysValues, LayerIndex, Span, State, Step},
    forward_backend,
    model::{Decoder, ForwardError},
    policy::FullKv,
    residual::ResidualCheckpoint,
};

use crate::support::{bits, seen};

/// Notes after every call of the trait the most bytes that a cache told.
#[derive(Debug)]
pub struct Noted {
    pub inner: ResidualCheckpoint,
    pub most: usize,
}

impl Noted {
    pub fn new(inner: ResidualCheckpoint) -> Self {
        Self { inner, most: 0 }
    }

    fn note<R>(&mut self, call: impl FnOnce(&mut ResidualCheckpoint) -> R) -> R {
        let result = call(&mut self.inner);
        let memory = self.inner.memory();
        self.most = self.most.max(memory.total() + memory.scratch_peak);
        result
    }
}

impl CacheBackend for Noted {
    forward_backend!(self => self.inner; queries state fork);

    fn begin(&mut self, step: &Step) -> Result<(), CacheError> {
        self.note(|cache| cache.begin(step))
    }

    fn keys_values(&mut self, layer: LayerIndex, span: Span<'_>) -> Result<KeysValues, CacheError> {
        self.note(|cache| cache.keys_values(layer, span))
    }

    fn commit(&mut self) -> Result<(), CacheError> {
        self.note(CacheBackend::commit)
    }

    fn truncate(&mut self, to: &[usize]) -> Result<(), CacheError> {
        self.note(|cache| cache.truncate(to))
    }

    fn begin_draft(&mut self) -> Result<(), CacheError> {
        self.note(CacheBackend::begin_draft)
    }

    fn end_draft(&mut self, draft: Draft) -> Result<(), CacheError> {
        self.note(|cache| cache.end_draft(draft))
    }

    fn select_sequences(&mut self, rows: &[usize]) -> Result<(), CacheError> {
        self.note(|cache| cache.select_sequences(rows))
    }

    fn park(&mut self) -> Result<(), CacheError> {
        self.note(CacheBackend::park)
    }

    fn set_state(&mut self, state: &State) -> Result<(), CacheError> {
        self.note(|cache| cache.set_state(state))
    }

    fn clear(&mut self) {
        self.note(CacheBackend::clear);
    }
}

/// The two, and what both have read.
#[derive(Debug)]
pub struct Twin<'a> {
    pub decoder: &'a Decoder,
    pub found: Noted,
    full: FullKv,
    pub text: Vec<Vec<u32>>,
    /// Lengths when the open draft began.
    pub draft: Option<Vec<usize>>,
    /// Lengths before the last call outside of a draft.
    last: Vec<usize>,
}

impl<'a> Twin<'a> {
    pub fn new(decoder: &'a Decoder, cache: ResidualCheckpoint, rows: usize) -> Self {
        Self {
            decoder,
            found: Noted::new(cache),
            full: FullKv::new(&decoder.shape()),
            text: vec![vec![]; rows],
            draft: None,
            last: vec![0; rows],
        }
    }

    pub fn lengths(&self) -> Vec<usize> {
        self.text.iter().map(Vec::len).collect()
    }

    pub fn longest(&self) -> usize {
        self.lengths().into_iter().max().unwrap_or(0)
    }

    /// Tokens that windows hold beyond what they show, were these fed now.
    pub fn recent(&self, calls: &[Vec<u32>]) -> usize {
        let from = |row: usize| match &self.draft {
            Some(draft) => draft[row].min(self.last[row]),
            None => self.text[row].len(),
        };
        let calls = calls.iter().enumerate();
        let recent = calls.map(|(row, call)| self.text[row].len() + call.len() - from(row));
        recent.max().unwrap_or(0)
    }

    /// Feeds both; bits are compared. Where the step does not fit, what it would have needed, after checking
    /// that nothing changed.
    pub fn feed(&mut self, calls: &[Vec<u32>]) -> Result<(), usize> {
        let layers = self.decoder.shape().layers();
        let before = seen(&self.found, layers);
        let logits = match self.decoder.forward(calls.to_vec(), &mut self.found) {
            Ok(logits) => logits,
            Err(ForwardError::Cache(CacheError::StepBytes { needed, .. })) => {
                assert_eq!(
                    seen(&self.found, layers),
                    before,
                    "a refusal changes nothing"
                );
                return Err(needed);
            }
            Err(error) => panic!("{error}"),
        };
        let expected = self.decoder.forward(calls.to_vec(), &mut self.full);
        let expected = expected.expect("FullKv takes every step");
        for (row, call) in calls
            .iter()
            .enumerate()
            .filter(|(_, call)| !call.is_empty())
        {
            let of = |all: &burn::tensor::Tensor<3>| {
                bits(&all.clone().slice([row..row + 1, 0..call.len()]))
            };
            assert!(of(&logits) == of(&expected), "row {row} has other bits");
        }
        if self.draft.is_none() {
            self.last = self.lengths();
        }
        let rows = self.text.iter_mut().zip(calls);
        rows.for_each(|(text, call)| text.extend(call));
        Ok(())
    }

    pub fn truncate(&mut self, to: &[usize]) {
        let cut = self.found.truncate(to);
        cut.expect("every length can be reached");
        for (text, &to) in self.text.iter_mut().zip(to) {
            text.truncate(to);
        }
        for (last, &to) in self.last.iter_mut().zip(to) {
            *last = to.min(*last);
        }
        if self.longest() == 0 {
            self.draft = None;
        }
        if self.full.truncate(to).is_err() {
            self.full.clear();
            let again = self.decoder.forward(self.text.clone(), &mut self.full);
            again.expect("FullKv takes every step");
        }
    }

    pub fn begin_draft(&mut self) {
        self.draft = Some(self.lengths());
        for cache in [&mut self.found as &mut dyn CacheBackend, &mut self.full] {
            cache.begin_draft().expect("no draft is open");
        }
    }

    /// Ends the draft, and keeps what came in it or does not.
    pub fn end(&mut self, keep: bool) {
        let Some(draft) = self.draft.take() else {
            return;
        };
        for cache in [&mut self.found as &mut dyn CacheBackend, &mut self.full] {
            let ended = if keep {
                cache.end_draft(Draft::Accept)
            } else {
                cache.end_draft(Draft::Discard)
            };
            ended.expect("a draft is open");
        }
        if !keep {
            for (text, to) in self.text.iter_mut().zip(draft) {
                text.truncate(to);
            }
        }
    }

    /// Both become these rows of them, unless those do not fit: then it is answered what they would have needed.
    pub fn select(&mut self, rows: &[usize]) -> Result<(), usize> {
        let layers = self.decoder.shape().layers();
        let before = seen(&self.found, layers);
        match self.found.select_sequences(rows) {
            Ok(()) => {}
            Err(CacheError::StepBytes { needed, .. }) => {
                assert_eq!(
                    seen(&self.found, layers),
                    before,
                    "a refusal changes nothing"
                );
                return Err(needed);
            }
            Err(error) => panic!("{error}"),
        }
        self.full
            .select_sequences(rows)
            .expect("rows that are there");
        self.text = rows.iter().map(|&row| self.text[row].clone()).collect();
        self.last = rows.iter().map(|&row| self.last[row]).collect();
        Ok(())
    }
}
