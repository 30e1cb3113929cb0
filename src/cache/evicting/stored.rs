//! A backend that drops rows as a state, and back.

use super::{Evicting, Policy, Turn};
use crate::cache::{CacheError, State, state::wrong};

impl<P: Policy> Evicting<P> {
    /// Its state, between steps and outside of drafts.
    pub(super) fn written(&self) -> State {
        let mut state = self.kind();
        self.held.write(&mut state);
        let prompts = self.turn.prompts.iter();
        state.insert_positions(
            "prompts",
            prompts.map(|prompt| prompt.unwrap_or(usize::MAX)),
        );
        self.policy.write(&mut state);
        state
    }

    /// A backend like this one with what a state holds.
    pub(super) fn restored(&self, state: &State) -> Result<Self, CacheError> {
        state.check(&self.kind())?;
        let held = self.held.restored(state)?;
        let prompts: Vec<Option<usize>> = state
            .positions("prompts")?
            .into_iter()
            .map(|prompt| (prompt != usize::MAX).then_some(prompt))
            .collect();
        let lengths = held.progress.lengths();
        let fits = |(prompt, length): (&Option<usize>, &usize)| prompt.is_none_or(|p| p <= *length);
        if prompts.len() != lengths.len() || !prompts.iter().zip(lengths).all(fits) {
            return Err(wrong("prompts", "they do not fit the lengths"));
        }
        let policy = self.policy.restored(state, &held)?;
        Ok(Self {
            held,
            policy,
            turn: Turn {
                prompts,
                ..Turn::default()
            },
            draft: None,
        })
    }

    /// A state of this kind without entries.
    fn kind(&self) -> State {
        State::new(P::NAME, &self.policy.options(), &self.held.shape)
    }
}
