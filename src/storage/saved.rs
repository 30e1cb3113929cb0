//! A layer store as values of a state, and back.
//!
//! A state has the entries of each sequence in rising order of positions, `[kv_heads, entries, head_dim]`. Lists that
//! differ between KV heads end in [`Positions::EMPTY`] where one is shorter. Where slots do not follow positions the slot
//! of each entry is written too, because the bits of attention depend on it.

use super::{
    buffers::{Buffers, Rows},
    layer::LayerStore,
    sequence::SequenceStore,
    slots::Slots,
};
use crate::{
    cache::{CacheError, ModelShape, State, StateValue, wrong},
    positions::Positions,
};

impl LayerStore {
    /// Adds this layer to a state.
    pub(crate) fn write(&self, layer: usize, state: &mut State) {
        for (sequence, store) in self.sequences.iter().enumerate() {
            let name = |part: &str| name(layer, part, sequence);
            let Some((rows, order)) = Self::rising(store) else {
                continue;
            };
            let entries = rows.values.dims()[1];
            state.insert(name("keys"), StateValue::Tensor(rows.keys));
            state.insert(name("values"), StateValue::Tensor(rows.values));
            let each = |of: fn(&Slots, usize) -> usize| {
                let lists = store.lists.iter().zip(&order);
                let padded = lists.flat_map(move |(list, order)| {
                    let written = order.iter().map(move |&slot| of(list, slot));
                    written
                        .chain(std::iter::repeat(Positions::EMPTY))
                        .take(entries)
                });
                padded.collect::<Vec<_>>()
            };
            let positions = each(|list, slot| list.as_ref()[slot]);
            state.insert_positions(&name("positions"), positions);
            if !store.lists[0].is_anchored() {
                state.insert_positions(&name("slots"), each(|_, slot| slot));
            }
            if store.lists.iter().any(|list| !list.scores().is_empty()) {
                let lists = store.lists.iter().zip(&order);
                let scores = lists.flat_map(|(list, order)| {
                    let score = |&slot| list.scores().get(slot).copied().unwrap_or(0.0);
                    let scores = order.iter().map(score);
                    scores.chain(std::iter::repeat(0.0)).take(entries)
                });
                state.insert(name("scores"), StateValue::Floats(scores.collect()));
            }
        }
        if self.slides() {
            let from = self.sequences.iter().map(|store| store.from);
            state.insert_positions(&format!("layer.{layer}.from"), from);
        }
    }

    /// A store of this kind with what a state says of a layer, for sequences of these lengths.
    pub(crate) fn restored(
        &self,
        layer: usize,
        lengths: &[usize],
        shape: &ModelShape,
        state: &State,
    ) -> Result<Self, CacheError> {
        let mut store = self.emptied();
        store.resize(lengths.len());
        let growth = store.growth();
        for (sequence, &length) in lengths.iter().enumerate() {
            if !state.contains(&name(layer, "keys", sequence)) {
                continue;
            }
            let of_sequence = &mut store.sequences[sequence];
            let rows = of_sequence.restore_lists(layer, sequence, length, shape, state)?;
            let end = of_sequence.lists.iter().map(Slots::end).max();
            of_sequence.restore_entries(&rows, growth.slots(end.unwrap_or(0)));
        }
        store.restore_windows(layer, lengths, state)?;
        Ok(store)
    }

    /// Takes from where on sliding-window layers hold every entry, and checks that they do.
    fn restore_windows(
        &mut self,
        layer: usize,
        lengths: &[usize],
        state: &State,
    ) -> Result<(), CacheError> {
        let name = format!("layer.{layer}.from");
        if !self.slides() || !state.contains(&name) && self.capacity() == 0 {
            return Ok(());
        }
        let from = state.positions(&name)?;
        // Before the first step there may be no number yet.
        if from.len() != lengths.len() && !(from.is_empty() && self.capacity() == 0) {
            return Err(wrong(&name, "it has not one number for every sequence"));
        }
        let sequences = self.sequences.iter_mut().zip(from);
        sequences.for_each(|(store, from)| store.from = from);
        for (sequence, &length) in lengths.iter().enumerate() {
            let store = &self.sequences[sequence];
            let holds = |list: &Slots| list.holds_all(store.from..length);
            if store.from > length
                || self.shortest(sequence) > length
                || self.capacity() > 0 && !store.lists.iter().all(holds)
            {
                return Err(wrong(
                    &name,
                    "an entry within the layer's window is missing",
                ));
            }
        }
        Ok(())
    }

    /// Whether every sequence with tokens holds an entry. A sliding-window layer of window 1 need not;
    /// [`restored`](Self::restored) has checked the others.
    pub(crate) fn holds_some(&self, lengths: &[usize]) -> bool {
        let lists = self.sequences.iter().zip(lengths);
        match self.window {
            Some(window) => {
                let shows = |&length: &usize| length > 0 && window.get() > 1;
                self.capacity() > 0 || !lengths.iter().any(shows)
            }
            None => lists
                .flat_map(|(store, length)| store.lists.iter().map(move |list| (list, length)))
                .all(|(list, length)| *length == 0 || list.used() > 0),
        }
    }
}

impl SequenceStore {
    /// Takes positions, slots and scores from a state. Returns the entries, in rising order of positions.
    fn restore_lists(
        &mut self,
        layer: usize,
        sequence: usize,
        length: usize,
        shape: &ModelShape,
        state: &State,
    ) -> Result<Rows, CacheError> {
        let name = |part: &str| name(layer, part, sequence);
        let positions = state.positions(&name("positions"))?;
        let entries = positions.len() / self.lists.len();
        if entries == 0 || positions.len() != self.lists.len() * entries {
            return Err(wrong(
                &name("positions"),
                "the lists do not have the same number of entries",
            ));
        }
        let kernels = &shape.kernels;
        let dims = [kernels.kv_heads, entries, kernels.head_dim];
        let rows = Rows {
            keys: state.tensor(&name("keys"), dims, shape.cache_dtype)?,
            values: state.tensor(&name("values"), dims, shape.cache_dtype)?,
        };
        let slots = match self.lists[0].is_anchored() {
            true => Vec::new(),
            false => state.positions(&name("slots"))?,
        };
        let scores = match state.contains(&name("scores")) {
            true => state.floats(&name("scores"))?,
            false => &[],
        };
        if !slots.is_empty() && slots.len() != positions.len() {
            return Err(wrong(&name("slots"), "there is not one for every entry"));
        }
        if !scores.is_empty() && scores.len() != positions.len() {
            return Err(wrong(&name("scores"), "there is not one for every entry"));
        }
        for (index, list) in self.lists.iter_mut().enumerate() {
            let of_list = index * entries..(index + 1) * entries;
            let positions = &positions[of_list.clone()];
            let used = positions.iter().position(|&p| p == Positions::EMPTY);
            let used = used.unwrap_or(entries);
            if positions[used..].iter().any(|&p| p != Positions::EMPTY) {
                return Err(wrong(&name("positions"), "an entry follows the last one"));
            }
            let slots = slots.get(of_list.clone()).unwrap_or_default();
            let scores = scores.get(of_list).unwrap_or_default();
            let (slots, scores) = (
                slots.get(..used).unwrap_or_default(),
                scores.get(..used).unwrap_or_default(),
            );
            *list = list
                .restored(&positions[..used], slots, scores, length)
                .map_err(|problem| wrong(&name("positions"), problem))?;
        }
        if self.used() < entries {
            return Err(wrong(&name("positions"), "an entry has none"));
        }
        Ok(rows)
    }

    /// Puts the entries of all lists into their slots, in buffers of `capacity` slots.
    fn restore_entries(&mut self, rows: &Rows, capacity: usize) {
        let kv_heads = rows.values.dims()[0];
        let mut buffers = Buffers::new(capacity, rows);
        let heads_of_list = kv_heads / self.lists.len();
        for (index, list) in self.lists.iter_mut().enumerate() {
            let heads = index * heads_of_list..(index + 1) * heads_of_list;
            let mut from = 0;
            for run in list.runs(|_| true) {
                let rows = rows.slice(heads.clone(), from..from + run.len());
                from += run.len();
                buffers.write(heads.start, run.start, rows);
            }
            list.grow(capacity);
        }
        self.buffers = Some(buffers);
    }
}

/// The name of a value of a state, for a layer and sequence.
fn name(layer: usize, part: &str, sequence: usize) -> String {
    format!("layer.{layer}.{part}.{sequence}")
}
