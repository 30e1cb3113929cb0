//! A [`ResidualCheckpoint`] as a state, and back.

use super::{Plan, ResidualCheckpoint, Retain, resident::Resident};
use crate::{
    cache::{CacheError, State, StateValue, wrong},
    storage::StepTracker,
};

impl ResidualCheckpoint {
    /// Its state, between steps and outside of drafts.
    pub(super) fn written(&self) -> State {
        let mut state = self.kind();
        let (resident, lengths) = (&self.resident, self.tracker.lengths());
        state.insert_positions("lengths", lengths.iter().copied());
        for (layer, store) in resident.layers.iter().enumerate() {
            store.write(layer, &mut state);
            if self.setup.plan.retain(layer) == Retain::Residual {
                resident.residuals[layer].write(layer, lengths, &mut state);
            }
        }
        let parked = vec![u64::from(resident.windows_dropped)];
        state.insert("parked", StateValue::Integers(parked));
        if self.setup.plan.retains_ids() {
            let ids = resident.tokens.iter().flatten().copied();
            state.insert("ids", StateValue::Ids(ids.collect()));
        }
        state
    }

    /// Adds the sequences of `other` to a state of this cache. Without sliding windows, parked sequences and others stand
    /// side by side.
    pub(super) fn join_written(&self, state: &mut State, other: &State) -> Result<(), CacheError> {
        let shape = &self.setup.shape;
        if (0..shape.layers()).any(|layer| shape.slides(layer)) {
            return state.join(other);
        }
        let mut other = other.clone();
        for state in [&mut *state, &mut other] {
            state.insert("parked", StateValue::Integers(vec![0]));
        }
        state.join(&other)
    }

    /// A state of this kind without entries.
    fn kind(&self) -> State {
        let plan = &self.setup.plan;
        let hot = match plan.hot() {
            usize::MAX => "all".into(),
            hot => hot.to_string(),
        };
        let mut options = vec![("hot", hot), ("retain", retained(plan))];
        if let Some(bytes) = self.setup.byte_budget {
            options.push(("byte_budget", bytes.to_string()));
        }
        let options = options.into_iter();
        let options = options.map(|(name, value)| (name.to_owned(), value));
        State::new("residual", options, &self.setup.shape)
    }

    /// A cache like this one with the content of a state.
    pub(super) fn restored(&self, state: &State) -> Result<Self, CacheError> {
        state.check(&self.kind())?;
        let lengths = state.lengths()?;
        let mut cache = Self::empty(&self.setup);
        cache.resident.restore(state, &lengths)?;
        cache.tracker = StepTracker::new(&self.setup.shape, lengths);
        Ok(cache)
    }
}

/// What each layer retains, as an option. The chunk is none: no bit depends on it.
fn retained(plan: &Plan) -> String {
    let word = |layer| match plan.retain(layer) {
        Retain::KeysValues => "keys_values",
        Retain::Residual => "residual",
        Retain::Nothing => "nothing",
    };
    let words: Vec<&str> = (0..plan.layers()).map(word).collect();
    words.join(",")
}

impl Resident {
    /// Takes over the content of a state, for sequences of these lengths.
    fn restore(&mut self, state: &State, lengths: &[usize]) -> Result<(), CacheError> {
        self.windows_dropped = match state.integers("parked")? {
            [0] => false,
            [1] => lengths.iter().any(|&length| length > 0),
            _ => return Err(wrong("parked", "it is neither 0 nor 1")),
        };
        if self.setup.plan.retains_ids() {
            let mut ids = state.ids("ids")?;
            if lengths.iter().sum::<usize>() != ids.len() {
                return Err(wrong("ids", "there is not one for every token"));
            }
            let sequences = lengths.iter().map(|&length| {
                let (sequence, rest) = ids.split_at(length);
                ids = rest;
                sequence.to_vec()
            });
            self.tokens = sequences.collect();
        }
        for layer in 0..self.layers.len() {
            self.restore_layer(layer, state, lengths)?;
        }
        self.restore_dropped(lengths)
    }

    fn restore_layer(
        &mut self,
        layer: usize,
        state: &State,
        lengths: &[usize],
    ) -> Result<(), CacheError> {
        let (shape, plan) = (&self.setup.shape, &self.setup.plan);
        let slots = || format!("layer.{layer}.positions");
        let store = self.layers[layer].restored(layer, lengths, shape, state)?;
        let retained = !shape.slides(layer) && !plan.rebuilds(layer);
        if self.windows_dropped && !retained && store.capacity() > 0 {
            return Err(wrong("parked", "entries are held"));
        }
        let least = |i: usize| if retained { lengths[i] } else { 0 };
        if shape.slides(layer) {
            if !self.windows_dropped && !store.holds_some(lengths) {
                return Err(wrong(
                    &slots(),
                    "the entries of a sliding window are missing",
                ));
            }
        } else if !store.holds_newest(lengths, least) {
            return Err(wrong(&slots(), "the entries held are not the newest"));
        }
        self.layers[layer] = store;
        if plan.retain(layer) == Retain::Residual {
            let residuals = self.residuals[layer].restored(layer, lengths, shape, state)?;
            self.residuals[layer] = residuals;
        }
        Ok(())
    }

    /// Finds out which entries the rebuilt layers lack: the same in all that are not complete.
    fn restore_dropped(&mut self, lengths: &[usize]) -> Result<(), CacheError> {
        let mut dropped: Option<Vec<usize>> = None;
        for layer in (0..self.layers.len()).filter(|&layer| self.setup.plan.rebuilds(layer)) {
            let store = &self.layers[layer];
            let lengths = lengths.iter().enumerate();
            let missing: Vec<usize> = lengths.map(|(i, n)| n - store.used(i)).collect();
            if self.setup.byte_budget.is_some() && missing.iter().all(|&n| n == 0) {
                self.complete[layer] = true;
            } else if *dropped.get_or_insert_with(|| missing.clone()) != missing {
                return Err(wrong(
                    "positions",
                    "the layers do not hold the same entries",
                ));
            }
        }
        self.dropped = match self.windows_dropped {
            true => lengths.to_vec(),
            false => dropped.unwrap_or_else(|| vec![0; lengths.len()]),
        };
        Ok(())
    }
}
