//! States of several sequences: one batch behind another.

use std::collections::btree_map::Entry;

use super::{CacheError, State, StateValue, wrong};

/// Values with a number for every sequence.
const BY_SEQUENCE: [&str; 2] = ["lengths", "prompts"];

impl State {
    /// Adds the sequences of `other` behind those of this state.
    ///
    /// A value whose name ends in a dot and a number belongs to the sequence of this number. `lengths` and `prompts`
    /// have a number for every sequence, and `ids` all ids one after another. Any other value must be the same in both.
    /// The states of this crate's backends have this form.
    ///
    /// # Errors
    /// [`Foreign`](CacheError::Foreign) if the two are of different kinds, and [`State`](CacheError::State) for a value
    /// that differs. Nothing has changed then.
    ///
    /// ```
    /// use burn::tensor::DType;
    /// use kv_direct::cache::{ModelShape, State, StateValue};
    /// use kv_direct::exact::KernelShapes;
    ///
    /// let shape = ModelShape::new(2, 64, DType::F32, KernelShapes::new(4, 2, 16));
    /// let state = |length, score| {
    ///     let mut state = State::new("newest", [], &shape);
    ///     state.insert("lengths", StateValue::Integers(vec![length]));
    ///     state.insert("scores.0", StateValue::Floats(vec![score]));
    ///     state
    /// };
    /// let mut one = state(3, 0.5);
    /// one.join(&state(7, 0.25))?;
    /// assert_eq!(one.integers("lengths")?, [3, 7]);
    /// assert_eq!(one.floats("scores.1")?, [0.25]);
    /// # Ok::<(), kv_direct::cache::CacheError>(())
    /// ```
    pub fn join(&mut self, other: &Self) -> Result<(), CacheError> {
        other.check(self)?;
        let held = self.lengths()?.len();
        let mut joined = self.clone();
        if held == 0 {
            joined.values.clone_from(&other.values);
        } else if !other.lengths()?.is_empty() {
            for (name, value) in &other.values {
                joined.add(name, value, held)?;
            }
        }
        *self = joined;
        Ok(())
    }

    /// Adds a value of a state whose sequences come behind the `held` ones.
    fn add(&mut self, name: &str, value: &StateValue, held: usize) -> Result<(), CacheError> {
        let numbered = name.rsplit_once('.').and_then(|(prefix, number)| {
            let number: usize = number.parse().ok()?;
            Some(format!("{prefix}.{}", number.checked_add(held)?))
        });
        if let Some(name) = numbered {
            self.values.insert(name, value.clone());
            return Ok(());
        }
        let mut entry = match self.values.entry(name.to_owned()) {
            Entry::Occupied(entry) => entry,
            Entry::Vacant(_) => return Err(wrong(name, "one of two joined states lacks it")),
        };
        match (entry.get_mut(), value) {
            (StateValue::Integers(all), StateValue::Integers(more))
                if BY_SEQUENCE.contains(&name) =>
            {
                all.extend(more);
            }
            (StateValue::Ids(all), StateValue::Ids(more)) if name == "ids" => all.extend(more),
            (StateValue::Integers(one), StateValue::Integers(other)) if one == other => {}
            (StateValue::Ids(one), StateValue::Ids(other)) if one == other => {}
            _ => return Err(wrong(name, "it differs in two joined states")),
        }
        Ok(())
    }
}
