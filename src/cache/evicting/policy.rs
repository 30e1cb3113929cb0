//! What a policy decides.

use std::fmt;

use super::{Seen, Turn};
use crate::{
    cache::{CacheError, KeysValues, Observation, Span, State, layered::Layered, rows::Rows},
    memory::MemoryReport,
};

/// What sets one such backend apart.
pub(crate) trait Policy: fmt::Debug + Clone + Send + 'static {
    /// The name of the backend in a state.
    const NAME: &'static str;
    /// Whether KV heads may hold different rows.
    const PER_HEAD: bool = false;
    /// Whether [`stays`](Self::stays) ever declines.
    const BY_POSITION: bool = false;

    /// What it was built with, in words.
    fn options(&self) -> String;

    /// Whether [`wants`](Self::wants) ever asks for something.
    fn observes(&self) -> bool {
        false
    }

    /// What attention must hand back at a layer.
    fn wants(&self, turn: &Turn) -> Observation {
        let _ = turn;
        Observation::Nothing
    }

    /// Drops rows of a layer by what its attention saw: `seen` has one number for every batch row,
    /// head, query and slot, in this order.
    fn observe(&mut self, layer: usize, rows: &mut Rows, seen: &Seen<'_>, turn: &Turn) {
        let _ = (layer, rows, seen, turn);
    }

    /// All rows of a layer, those of the step included, as attention is to read them.
    fn read(
        &mut self,
        layer: usize,
        rows: &mut Rows,
        span: &Span<'_>,
        turn: &Turn,
    ) -> Result<KeysValues, CacheError> {
        let _ = (layer, span, turn);
        rows.read()
    }

    /// Whether a batch row of `length` tokens keeps a position once its step is over; `prompt` is the
    /// length of its prompt, where that is over.
    fn stays(&self, position: usize, length: usize, prompt: Option<usize>) -> bool {
        let _ = (position, length, prompt);
        true
    }

    /// The shortest length, apart from 0, to which a batch row of `length` tokens can be taken back.
    fn oldest(&self, length: usize, prompt: Option<usize>, dropped: bool) -> usize {
        let _ = prompt;
        if dropped { length } else { 0 }
    }

    /// Forgets what the policy itself holds of the tokens that go when every batch row is taken back from
    /// its length to that in `to`.
    fn truncate(&mut self, lengths: &[usize], to: &[usize]) {
        let _ = (lengths, to);
    }

    /// Makes the batch these rows of it.
    fn select_rows(&mut self, rows: &[usize]) {
        let _ = rows;
    }

    /// Adds what the policy itself holds to a state.
    fn write(&self, state: &mut State) {
        let _ = state;
    }

    /// The policy with what it held when a state was written, and what it must find in the layers.
    fn restored(&self, state: &State, held: &Layered) -> Result<Self, CacheError> {
        let _ = (state, held);
        let mut policy = self.clone();
        policy.clear();
        Ok(policy)
    }

    /// The step is over: what the policy itself holds for an end that has come may go.
    fn settle(&mut self, turn: &Turn) {
        let _ = turn;
    }

    /// Adds the bytes of what the policy itself holds.
    fn report(&self, report: &mut MemoryReport) {
        let _ = report;
    }

    /// Forgets what the policy itself holds of all sequences.
    fn clear(&mut self) {}
}
