//! A cache with a byte budget beside a `FullKv`: both receive the same calls.

use kv_direct::{
    cache::{CacheBackend, CacheError, Draft, KeysValues, LayerIndex, Span, State, Step},
    forward_backend,
    model::{Decoder, ForwardError},
    policy::FullKv,
    residual::ResidualCheckpoint,
};

use crate::support::{caches::seen, feed::bits};

/// Records, after every call of the trait, the most bytes that the cache reports.
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

    fn select_sequences(&mut self, sequences: &[usize]) -> Result<(), CacheError> {
        self.note(|cache| cache.select_sequences(sequences))
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

/// The two caches, and the tokens that both processed.
#[derive(Debug)]
pub struct Twin<'a> {
    pub decoder: &'a Decoder,
    pub found: Noted,
    full: FullKv,
    pub text: Vec<Vec<u32>>,
    /// Lengths when the open draft began.
    pub draft: Option<Vec<usize>>,
    /// Lengths before the last step outside of a draft.
    last: Vec<usize>,
}

impl<'a> Twin<'a> {
    pub fn new(decoder: &'a Decoder, cache: ResidualCheckpoint, sequences: usize) -> Self {
        Self {
            decoder,
            found: Noted::new(cache),
            full: FullKv::new(&decoder.shape()),
            text: vec![vec![]; sequences],
            draft: None,
            last: vec![0; sequences],
        }
    }

    pub fn lengths(&self) -> Vec<usize> {
        self.text.iter().map(Vec::len).collect()
    }

    pub fn longest(&self) -> usize {
        self.lengths().into_iter().max().unwrap_or(0)
    }

    /// Tokens that sliding windows would hold beyond their size, were these fed now.
    pub fn recent(&self, batch: &[Vec<u32>]) -> usize {
        let from = |sequence: usize| match &self.draft {
            Some(draft) => draft[sequence].min(self.last[sequence]),
            None => self.text[sequence].len(),
        };
        let batch = batch.iter().enumerate();
        let recent =
            batch.map(|(sequence, ids)| self.text[sequence].len() + ids.len() - from(sequence));
        recent.max().unwrap_or(0)
    }

    /// Feeds both and compares bits. Where the step does not fit, returns the bytes it needs, after checking
    /// that nothing changed.
    pub fn feed(&mut self, batch: &[Vec<u32>]) -> Result<(), usize> {
        let layers = self.decoder.shape().layers();
        let before = seen(&self.found, layers);
        let logits = match self.decoder.forward(batch.to_vec(), &mut self.found) {
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
        let expected = self.decoder.forward(batch.to_vec(), &mut self.full);
        let expected = expected.expect("FullKv accepts every step");
        for (sequence, ids) in batch.iter().enumerate().filter(|(_, ids)| !ids.is_empty()) {
            let of = |all: &burn::tensor::Tensor<3>| {
                bits(&all.clone().slice([sequence..sequence + 1, 0..ids.len()]))
            };
            assert!(
                of(&logits) == of(&expected),
                "sequence {sequence} has other bits"
            );
        }
        if self.draft.is_none() {
            self.last = self.lengths();
        }
        let sequences = self.text.iter_mut().zip(batch);
        sequences.for_each(|(text, ids)| text.extend(ids));
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
            again.expect("FullKv accepts every step");
        }
    }

    pub fn begin_draft(&mut self) {
        self.draft = Some(self.lengths());
        for cache in [&mut self.found as &mut dyn CacheBackend, &mut self.full] {
            cache.begin_draft().expect("no draft is open");
        }
    }

    /// Ends the draft: accepts or discards it.
    pub fn end(&mut self, accept: bool) {
        let Some(draft) = self.draft.take() else {
            return;
        };
        for cache in [&mut self.found as &mut dyn CacheBackend, &mut self.full] {
            let ended = if accept {
                cache.end_draft(Draft::Accept)
            } else {
                cache.end_draft(Draft::Discard)
            };
            ended.expect("a draft is open");
        }
        if !accept {
            for (text, to) in self.text.iter_mut().zip(draft) {
                text.truncate(to);
            }
        }
    }

    /// Selects these sequences in both. Where they do not fit, returns the bytes they need.
    pub fn select(&mut self, sequences: &[usize]) -> Result<(), usize> {
        let layers = self.decoder.shape().layers();
        let before = seen(&self.found, layers);
        match self.found.select_sequences(sequences) {
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
            .select_sequences(sequences)
            .expect("sequences that are there");
        self.text = sequences
            .iter()
            .map(|&sequence| self.text[sequence].clone())
            .collect();
        self.last = sequences
            .iter()
            .map(|&sequence| self.last[sequence])
            .collect();
        Ok(())
    }
}
