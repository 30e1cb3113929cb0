//! One cache on one model on run for one law.

use std::fmt;

use super::{
    contract::Contract,
    models::{Call, Model},
    recorder::{Recorder, Shown},
};
use crate::{
    cache::{CacheBackend, CacheError, CachedPositions, LayerIndex, ModelShape, TokenIds},
    model::{ForwardError, Input},
    policy::FullKv,
};

/// The bits of each batch row's logits, pads left out.
pub(super) type Logits = Vec<Vec<u32>>;

pub(super) struct TestRun<'a> {
    pub(super) law: &'static str,
    pub(super) model: &'a Model,
    pub(super) cache: Recorder,
    /// Tokens of every batch row, and the length of its prompt once that is over.
    pub(super) lengths: Vec<usize>,
    pub(super) prompts: Vec<Option<usize>>,
    steps: usize,
}

/// Everything a caller can ask of a cache between steps.
#[derive(Debug, PartialEq)]
pub(super) struct State {
    lengths: Vec<usize>,
    kept: Vec<CachedPositions>,
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

    /// The same run of the oracle.
    pub(super) fn oracle(law: &'static str, model: &'a Model) -> Self {
        let oracle = FullKv::new(&model.decoder.shape());
        Self::of(law, model, Box::new(oracle))
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

    /// Writes nothing down: for laws that look at logits and at what is kept.
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

    /// Feeds one call, which must be accepted.
    #[track_caller]
    pub(super) fn feed(&mut self, call: &Call) -> Logits {
        let input = Input::from(TokenIds::from(call.rows.clone())).more_follows(call.more_follows);
        let logits = match self.model.decoder.forward(input, &mut self.cache) {
            Ok(logits) => logits,
            Err(error) => self.broken(format_args!("a good call was refused: {error}")),
        };
        self.steps += 1;
        let lengths = call.lengths();
        self.lengths.resize(lengths.len(), 0);
        self.prompts.resize(lengths.len(), None);
        for (row, &more) in lengths.iter().enumerate() {
            self.lengths[row] += more;
            if self.prompts[row].is_none() && !call.more_follows && self.lengths[row] > 0 {
                self.prompts[row] = Some(self.lengths[row]);
            }
        }
        let [_, longest, vocab] = logits.dims();
        let values: Vec<f32> = logits.try_into_vec_as().expect("logits can be read");
        let rows = values.chunks_exact(longest * vocab).zip(&lengths);
        rows.map(|(row, &count)| row[..count * vocab].iter().map(|x| x.to_bits()).collect())
            .collect()
    }

    /// Feeds calls one after the other.
    #[track_caller]
    pub(super) fn feed_all(&mut self, calls: &[Call]) -> Vec<Logits> {
        calls.iter().map(|call| self.feed(call)).collect()
    }

    /// What a call is refused with; it must be.
    #[track_caller]
    pub(super) fn refused(&mut self, rows: Vec<Vec<u32>>) -> ForwardError {
        let tokens = TokenIds::from(rows);
        match self.model.decoder.forward(tokens, &mut self.cache) {
            Ok(_) => self.broken("a bad call was accepted"),
            Err(error) => error,
        }
    }

    /// Truncates, which must be accepted or refused as irreversible; whether it was accepted.
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

    /// What must not be refused.
    #[track_caller]
    pub(super) fn must(
        &mut self,
        what: &str,
        act: impl FnOnce(&mut Recorder) -> Result<(), CacheError>,
    ) {
        if let Err(error) = act(&mut self.cache) {
            self.broken(format_args!("{what} was refused: {error}"));
        }
    }

    /// Clears the cache.
    pub(super) fn clear(&mut self) {
        self.cache.clear();
        (self.lengths, self.prompts) = (Vec::new(), Vec::new());
    }

    pub(super) fn shown(&self) -> &[Shown] {
        self.cache.shown()
    }

    pub(super) fn layers(&self) -> usize {
        self.model.decoder.shape().layers()
    }

    pub(super) fn cached(&self, layer: usize) -> CachedPositions {
        self.cache.cached(LayerIndex::new(layer))
    }

    pub(super) fn state(&self) -> State {
        State {
            lengths: self.cache.lengths().to_vec(),
            kept: (0..=self.layers())
                .map(|layer| self.cached(layer))
                .collect(),
            total: self.cache.memory().total(),
        }
    }

    /// What a caller sees of the text, memory left out.
    pub(super) fn text_state(&self) -> (Vec<usize>, Vec<CachedPositions>) {
        let State { lengths, kept, .. } = self.state();
        (lengths, kept)
    }

    /// Compares with another run that was fed the same: logits, rows shown, rows kept.
    #[track_caller]
    pub(super) fn require_same(&self, ours: &Logits, other: &Self, theirs: &Logits, what: &str) {
        self.require(ours == theirs, format_args!("other logits than {what}"));
        for (layer, (ours, theirs)) in self.shown().iter().zip(other.shown()).enumerate() {
            self.require(
                ours.rows == theirs.rows,
                format_args!("layer {layer} shows other rows than {what}"),
            );
        }
        self.require(
            self.text_state() == other.text_state(),
            format_args!("positions or kept rows are not those of {what}"),
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
        panic!("{law}: {model}, after step {steps} (rows of {lengths:?} tokens): {what}")
    }
}

/// The list of a KV head; none where the backend answers fewer lists.
pub(super) fn list(kept: &CachedPositions, row: usize, head: usize) -> &[usize] {
    if row >= kept.sequences() {
        return &[];
    }
    let lists = kept.sequence(row);
    let list = lists.get(if lists.len() == 1 { 0 } else { head });
    list.map_or(&[], Vec::as_slice)
}
