//! A layer store as values of a state, and back.
//!
//! A state has the entries of each sequence in rising order of positions, `[kv_heads, entries, head_dim]`. Lists that
//! differ between KV heads end in [`Positions::EMPTY`] where one is shorter. The slot of each entry is written where it
//! does not follow from the positions, because attention sums in the order of slots.

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
            let implied = |order: &Vec<usize>| order.iter().copied().eq(0..order.len());
            if !store.lists[0].is_anchored() && !order.iter().all(implied) {
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
        store.restore_windows(layer, lengths)?;
        Ok(store)
    }

    /// Finds out from where on sliding-window layers hold every entry, and checks that it is far enough back. A layer
    /// without any entry passes: they may be dropped ones.
    fn restore_windows(&mut self, layer: usize, lengths: &[usize]) -> Result<(), CacheError> {
        let Some(window) = self.window else {
            return Ok(());
        };
        let any = self.capacity() > 0;
        for (sequence, &length) in lengths.iter().enumerate() {
            let store = &mut self.sequences[sequence];
            store.from = match store.lists[0].first() {
                Some(first) => first,
                // The next query sees itself alone.
                None if window.get() == 1 => length,
                None => 0,
            };
            let from = store.from;
            let holds = |list: &Slots| list.holds_all(from..length);
            if any && !store.lists.iter().all(holds) || self.shortest(sequence) > length {
                let problem = "an entry within the layer's window is missing";
                return Err(wrong(&name(layer, "positions", sequence), problem));
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
        let slots = match state.contains(&name("slots")) && !self.lists[0].is_anchored() {
            true => Some(state.positions(&name("slots"))?),
            false => None,
        };
        let scores = match state.contains(&name("scores")) {
            true => state.floats(&name("scores"))?,
            false => &[],
        };
        let fit = |slots: &Vec<usize>| slots.len() == positions.len();
        if !slots.as_ref().is_none_or(fit) {
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
            let first = of_list.start..of_list.start + used;
            let slots = slots.as_ref().map(|slots| &slots[first.clone()]);
            let scores = scores.get(first).unwrap_or_default();
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
