//! One cache on one model, run for one law.

use std::fmt;

use super::{
    contract::Contract,
    models::{Model, TextStep, VOCAB},
    recorder::{Reading, Recorder},
};
use crate::{
    cache::{CacheBackend, CacheError, CachedPositions, LayerIndex, ModelShape, TokenIds},
    model::{ForwardError, Input},
    policy::FullKv,
};

/// The bits of the logits of each sequence, without pads.
pub(super) type Logits = Vec<Vec<u32>>;

pub(super) struct TestRun<'a> {
    pub(super) law: &'static str,
    pub(super) model: &'a Model,
    pub(super) cache: Recorder,
    /// Processed tokens of every sequence.
    pub(super) lengths: Vec<usize>,
    /// The length of every prompt, once it is complete.
    pub(super) prompts: Vec<Option<usize>>,
    steps: usize,
}

/// Everything that a cache reports between steps.
#[derive(Debug, PartialEq)]
pub(super) struct Snapshot {
    lengths: Vec<usize>,
    cached: Vec<CachedPositions>,
    total: usize,
}

impl<'a> TestRun<'a> {
    pub(super) fn new(
        law: &'static str,
        contract: &Contract,
        model: &'a Model,
        budget: usize,
    ) -> Self {
        let shape = model.decoder.shape();
        let cache = contract.build(&shape, &model.device, budget);
        Self::of(law, model, cache)
    }

    /// The same run with the reference, [`FullKv`].
    pub(super) fn reference(law: &'static str, model: &'a Model) -> Self {
        let reference = FullKv::new(&model.decoder.shape());
        Self::of(law, model, Box::new(reference))
    }

    fn of(law: &'static str, model: &'a Model, cache: Box<dyn CacheBackend>) -> Self {
        Self {
            law,
            model,
            cache: Recorder::new(cache, model.decoder.shape()),
            lengths: Vec::new(),
            prompts: Vec::new(),
            steps: 0,
        }
    }

    /// Records no readings, for laws that compare logits and cached positions only.
    pub(super) fn unrecorded(self) -> Self {
        Self {
            cache: self.cache.unrecorded(),
            ..self
        }
    }

    /// The same run with a fork of its cache.
    pub(super) fn split(&self) -> Self {
        Self {
            cache: self.cache.split(),
            lengths: self.lengths.clone(),
            prompts: self.prompts.clone(),
            ..*self
        }
    }

    pub(super) fn shape(&self) -> ModelShape {
        self.model.decoder.shape()
    }

    /// Processes one step, which must be accepted.
    #[track_caller]
    pub(super) fn process(&mut self, step: &TextStep) -> Logits {
        let tokens = TokenIds::from(step.tokens.clone());
        let input = Input::from(tokens).more_follows(step.more_follows);
        let logits = match self.model.decoder.forward(input, &mut self.cache) {
            Ok(logits) => logits,
            Err(error) => self.broken(format_args!("a valid step was refused: {error}")),
        };
        self.steps += 1;
        let lengths = step.lengths();
        self.lengths.resize(lengths.len(), 0);
        self.prompts.resize(lengths.len(), None);
        for (sequence, &new) in lengths.iter().enumerate() {
            self.lengths[sequence] += new;
            let length = self.lengths[sequence];
            if self.prompts[sequence].is_none() && !step.more_follows && length > 0 {
                self.prompts[sequence] = Some(length);
            }
        }
        let [_, longest, vocab] = logits.dims();
        let values: Vec<f32> = logits.try_into_vec_as().expect("logits can be read");
        let sequences = values.chunks_exact(longest * vocab).zip(&lengths);
        sequences
            .map(|(logits, &count)| {
                let logits = logits[..count * vocab].iter();
                logits.map(|x| x.to_bits()).collect()
            })
            .collect()
    }

    /// Processes one step after another.
    #[track_caller]
    pub(super) fn process_all(&mut self, steps: &[TextStep]) -> Vec<Logits> {
        steps.iter().map(|step| self.process(step)).collect()
    }

    /// The error of a step that must be refused.
    #[track_caller]
    pub(super) fn refused(&mut self, tokens: Vec<Vec<u32>>) -> ForwardError {
        let tokens = TokenIds::from(tokens);
        match self.model.decoder.forward(tokens, &mut self.cache) {
            Ok(_) => self.broken("an invalid step was accepted"),
            Err(error) => error,
        }
    }

    /// Truncates, which must be accepted or refused as irreversible. Returns whether it was accepted.
    #[track_caller]
    pub(super) fn truncate(&mut self, to: usize) -> bool {
        let to: Vec<usize> = self.lengths.iter().map(|&n| to.min(n)).collect();
        match self.cache.truncate(&to) {
            Ok(()) => {
                self.lengths = to;
                true
            }
            Err(CacheError::Irreversible { .. }) => false,
            Err(error) => self.broken(format_args!("truncation to {to:?} failed: {error}")),
        }
    }

    /// Makes a call that must not be refused.
    #[track_caller]
    pub(super) fn must(
        &mut self,
        what: &str,
        call: impl FnOnce(&mut Recorder) -> Result<(), CacheError>,
    ) {
        if let Err(error) = call(&mut self.cache) {
            self.broken(format_args!("{what} was refused: {error}"));
        }
    }

    /// Clears the cache.
    pub(super) fn clear(&mut self) {
        self.cache.clear();
        (self.lengths, self.prompts) = (Vec::new(), Vec::new());
    }

    pub(super) fn readings(&self) -> &[Reading] {
        self.cache.readings()
    }

    pub(super) fn layers(&self) -> usize {
        self.model.decoder.shape().layers()
    }

    pub(super) fn cached(&self, layer: usize) -> CachedPositions {
        self.cache.cached(LayerIndex::new(layer))
    }

    pub(super) fn snapshot(&self) -> Snapshot {
        Snapshot {
            lengths: self.cache.lengths().to_vec(),
            cached: (0..=self.layers())
                .map(|layer| self.cached(layer))
                .collect(),
            total: self.cache.memory().total(),
        }
    }

    /// Lengths and cached positions, without memory.
    pub(super) fn contents(&self) -> (Vec<usize>, Vec<CachedPositions>) {
        let Snapshot {
            lengths, cached, ..
        } = self.snapshot();
        (lengths, cached)
    }

    /// Compares with another run that processed the same: logits, returned entries, lengths and cached positions.
    #[track_caller]
    pub(super) fn require_same(&self, ours: &Logits, other: &Self, theirs: &Logits, what: &str) {
        // Entries first: where they differ, logits do as well.
        for (layer, (ours, theirs)) in self.readings().iter().zip(other.readings()).enumerate() {
            if let Some(difference) = ours.difference(theirs) {
                self.broken(format_args!("layer {layer} returns {difference} in {what}"));
            }
        }
        self.require_logits(ours, theirs, what);
        self.require_contents(other, what);
    }

    /// Compares logits with those of another run.
    #[track_caller]
    pub(super) fn require_logits(&self, ours: &Logits, theirs: &Logits, what: &str) {
        let (found, expected) = (ours.len(), theirs.len());
        self.require(
            found == expected,
            format_args!("there are logits of {found} sequences, expected {expected} as in {what}"),
        );
        for (sequence, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
            let (found, expected) = (ours.len(), theirs.len());
            self.require(
                found == expected,
                format_args!(
                    "sequence {sequence} has {found} logits, expected {expected} as in {what}"
                ),
            );
            let mut pairs = ours.iter().zip(theirs);
            if let Some(at) = pairs.position(|(ours, theirs)| ours != theirs) {
                let (found, expected) = (f32::from_bits(ours[at]), f32::from_bits(theirs[at]));
                let [token, id] = [at / VOCAB as usize, at % VOCAB as usize];
                self.broken(format_args!(
                    "the logit of id {id} at token {token} of the step, sequence {sequence}, is {found:e}, expected {expected:e} as in {what}"
                ));
            }
        }
    }

    /// Compares lengths and cached positions with those of another run.
    #[track_caller]
    pub(super) fn require_contents(&self, other: &Self, what: &str) {
        let (ours, theirs) = (self.contents(), other.contents());
        self.require(
            ours == theirs,
            format_args!(
                "lengths and cached positions are {ours:?}, expected those of {what}, {theirs:?}"
            ),
        );
    }

    #[track_caller]
    pub(super) fn require(&self, holds: bool, what: impl fmt::Display) {
        if !holds {
            self.broken(what);
        }
    }

    #[track_caller]
    pub(super) fn broken(&self, what: impl fmt::Display) -> ! {
        let (law, model, steps) = (self.law, &self.model.name, self.steps);
        let lengths = &self.lengths;
        panic!("{law}: {model}, after step {steps} (sequences of {lengths:?} tokens): {what}")
    }
}

/// The list of a sequence and KV head; empty if the backend returns fewer lists.
pub(super) fn list(cached: &CachedPositions, sequence: usize, head: usize) -> &[usize] {
    if sequence >= cached.sequences() {
        return &[];
    }
    let lists = cached.sequence(sequence);
    let list = lists.get(if lists.len() == 1 { 0 } else { head });
    list.map_or(&[], Vec::as_slice)
}
