//! A layer store as values of a state, and back.

use super::{layer::LayerStore, slots::Slots};
use crate::{
    cache::{CacheError, ModelShape, State, StateValue, wrong},
    exact::{KV_BLOCK, zeros},
};

impl LayerStore {
    /// Adds this layer to a state: its slots up to the last one in use, in their order.
    pub(crate) fn write(&self, layer: usize, state: &mut State) {
        let ends = self.slots.iter().map(Slots::end);
        let (Some((keys, values)), Some(end @ 1..)) = (&self.buffers, ends.max()) else {
            return;
        };
        let name = |part: &str| format!("layer.{layer}.{part}");
        state.insert(
            name("keys"),
            StateValue::Tensor(keys.clone().slice_dim(3, 0..end)),
        );
        state.insert(
            name("values"),
            StateValue::Tensor(values.clone().slice_dim(2, 0..end)),
        );
        let held = self.slots.iter().flat_map(|slots| &slots.as_ref()[..end]);
        state.insert_positions(&name("slots"), held.copied());
        if self.slides() {
            let bases = self
                .slots
                .iter()
                .map(|slots| slots.base().unwrap_or(usize::MAX));
            state.insert_positions(&name("bases"), bases);
            state.insert_positions(&name("from"), self.from.iter().copied());
        }
        if self.slots.iter().any(|slots| !slots.scores().is_empty()) {
            let score =
                |slots: &Slots, slot: usize| slots.scores().get(slot).copied().unwrap_or(0.0);
            let scores = self
                .slots
                .iter()
                .flat_map(|slots| (0..end).map(move |slot| score(slots, slot)));
            state.insert(name("scores"), StateValue::Floats(scores.collect()));
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
        let name = |part: &str| format!("layer.{layer}.{part}");
        if !state.contains(&name("keys")) {
            store.resize(lengths.len());
            return Ok(store);
        }
        let lists = store.lists() * lengths.len();
        let held = state.positions(&name("slots"))?;
        let end = held.len().checked_div(lists).unwrap_or(0);
        if end == 0 || held.len() != lists * end {
            return Err(wrong(
                &name("slots"),
                "the lists do not have the same number of slots",
            ));
        }
        let (batch, heads, width) = (
            lengths.len(),
            shape.kernels.kv_heads,
            shape.kernels.head_dim,
        );
        let keys = state.tensor(&name("keys"), [batch, heads, width, end], shape.dtype)?;
        let values = state.tensor(&name("values"), [batch, heads, end, width], shape.dtype)?;
        store.restore_slots(layer, lengths, &held, state)?;
        store.check_windows(layer, lengths)?;
        let whole = end.next_multiple_of(KV_BLOCK);
        let capacity = store.limit.map_or(whole, |limit| whole.min(limit)).max(end);
        let options = (&keys.device(), keys.dtype());
        let at = [0..batch, 0..heads, 0..width, 0..end];
        let keys = zeros([batch, heads, width, capacity], options).slice_assign(at, keys);
        let at = [0..batch, 0..heads, 0..end, 0..width];
        let values = zeros([batch, heads, capacity, width], options).slice_assign(at, values);
        store.buffers = Some((keys, values));
        store
            .slots
            .iter_mut()
            .for_each(|slots| slots.grow(capacity));
        Ok(store)
    }

    /// Takes the slots and their scores from a state, for sequences of these lengths. `held` has the positions in all
    /// lists, one list after the other.
    fn restore_slots(
        &mut self,
        layer: usize,
        lengths: &[usize],
        held: &[usize],
        state: &State,
    ) -> Result<(), CacheError> {
        let name = |part: &str| format!("layer.{layer}.{part}");
        let lists = self.lists() * lengths.len();
        let bases = match self.window {
            None => vec![None; lists],
            Some(_) => {
                self.from = state.positions(&name("from"))?;
                if self.from.len() != lengths.len() {
                    return Err(wrong(
                        &name("from"),
                        "it has not one number for every sequence",
                    ));
                }
                let bases = state.positions(&name("bases"))?;
                bases
                    .into_iter()
                    .map(|base| (base != usize::MAX).then_some(base))
                    .collect()
            }
        };
        if bases.len() != lists {
            return Err(wrong(
                &name("bases"),
                "it has not one number for every sequence",
            ));
        }
        let scores = match state.contains(&name("scores")) {
            true => state.floats(&name("scores"))?,
            false => &[],
        };
        if !scores.is_empty() && scores.len() != held.len() {
            return Err(wrong(&name("scores"), "there is not one for every slot"));
        }
        let end = held.len() / lists;
        let slots = held.chunks_exact(end).zip(bases).enumerate();
        let slots = slots.map(|(list, (held, base))| {
            let scores = scores.get(list * end..(list + 1) * end).unwrap_or_default();
            let length = lengths[list / self.lists()];
            Slots::restored(held, scores, self.slides().then_some(base), length)
                .map_err(|problem| wrong(&name("slots"), problem))
        });
        self.slots = slots.collect::<Result<_, _>>()?;
        Ok(())
    }

    /// Checks that a sliding-window layer holds every entry within its window.
    fn check_windows(&self, layer: usize, lengths: &[usize]) -> Result<(), CacheError> {
        for (sequence, &length) in lengths.iter().enumerate().filter(|_| self.slides()) {
            let visible = self.from[sequence]..length;
            if self.from[sequence] > length
                || self.shortest(sequence) > length
                || !self.slots[sequence].holds_all(visible)
            {
                return Err(wrong(
                    &format!("layer.{layer}.slots"),
                    "an entry within the layer's window is missing",
                ));
            }
        }
        Ok(())
    }

    /// Whether every sequence with tokens holds an entry. A sliding-window layer of window 1 need not;
    /// [`restored`](Self::restored) has checked the others.
    pub(crate) fn holds_some(&self, lengths: &[usize]) -> bool {
        let lists = self.lists();
        let mut slots = self.slots.iter().enumerate();
        let held = |(list, slots): (usize, &Slots)| lengths[list / lists] == 0 || slots.used() > 0;
        match self.window {
            Some(window) => {
                let shows = |&length: &usize| length > 0 && window.get() > 1;
                self.capacity() > 0 || !lengths.iter().any(shows)
            }
            None => slots.all(held),
        }
    }
}
