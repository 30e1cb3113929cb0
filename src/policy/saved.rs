//! A backend that evicts as a state, and back.

use super::{Evicting, Policy, queries::Remembered};
use crate::cache::{CacheError, State, wrong};

impl<P: Policy> Evicting<P> {
    /// Its state, between steps and outside of drafts.
    pub(super) fn written(&self) -> State {
        let mut state = self.kind();
        self.stores.write(&mut state);
        let prompts = self
            .sequences
            .iter()
            .map(|s| s.prompt.unwrap_or(usize::MAX));
        state.insert_positions("prompts", prompts);
        let lengths = self.stores.tracker().lengths();
        self.remembered.write(lengths, &mut state);
        self.sinks.write(&mut state);
        state
    }

    /// A backend like this one with the content of a state.
    pub(super) fn restored(&self, state: &State) -> Result<Self, CacheError> {
        state.check(&self.kind())?;
        let stores = self.stores.restored(state)?;
        let (shape, lengths) = (self.stores.shape(), stores.tracker().lengths().to_vec());
        if !P::EVICTS {
            stores.check_complete()?;
        }
        let prompts: Vec<Option<usize>> = state
            .positions("prompts")?
            .into_iter()
            .map(|prompt| (prompt != usize::MAX).then_some(prompt))
            .collect();
        let fits = |(prompt, length): (&Option<usize>, &usize)| prompt.is_none_or(|p| p <= *length);
        if prompts.len() != lengths.len() || !prompts.iter().zip(&lengths).all(fits) {
            return Err(wrong("prompts", "they do not fit the lengths"));
        }
        let most = self.policy.remembers();
        if most > 0 {
            let full = || stores.layers.iter().filter(|store| !store.slides());
            let whole = |i: usize| full().all(|store| store.starts_with(i, lengths[i]));
            let mut unfinished = (0..lengths.len()).filter(|&i| prompts[i].is_none());
            if unfinished.any(|i| lengths[i] > 0 && !whole(i)) {
                let problem = "one is unfinished, but entries of it are missing";
                return Err(wrong("prompts", problem));
            }
        }
        let (layers, heads) = (shape.layers(), shape.kernels.heads);
        let remembered = Remembered::restored(layers, heads, &lengths, &prompts, most, state)?;
        let sinks = self
            .sinks
            .restored(state, &stores.layers, &lengths, shape)?;
        let mut cache = Self {
            stores,
            policy: self.policy.clone(),
            sequences: Vec::new(),
            remembered,
            sinks,
            draft: None,
        };
        cache.sequences = cache.at_rest(&prompts);
        Ok(cache)
    }

    /// A state of this kind without entries.
    fn kind(&self) -> State {
        let options = self.policy.options().into_iter();
        let options = options.map(|(name, value)| (name.to_owned(), value));
        State::new(P::NAME, options, self.stores.shape())
    }
}
