//! Sinks whose keys follow the other entries, so that positions in the cache have no gap.

use burn::tensor::Tensor;

use crate::{
    cache::{CacheError, ModelShape, Replay, State, StateValue, check, wrong},
    positions::Positions,
    storage::LayerStore,
};

/// The keys of the first entries as they came in, by layer and sequence: `[kv_heads, sinks, head_dim]`, once they
/// had to be rotated. Each rotation starts from these, so that rounding does not add up.
#[derive(Clone)]
pub(super) struct Sinks {
    count: usize,
    keys: Vec<Vec<Option<Tensor<3>>>>,
}

impl std::fmt::Debug for Sinks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sinks")
            .field("count", &self.count)
            .finish_non_exhaustive()
    }
}

impl Sinks {
    pub(super) fn new(count: usize, layers: usize) -> Self {
        Self {
            count,
            keys: vec![Vec::new(); layers],
        }
    }

    /// Rotates the sinks of every sequence forward by the number of its evicted entries. `lengths` are the tokens of
    /// the sequences, those of the step included. Sinks that were evicted themselves stay evicted.
    pub(super) fn rotate(
        &mut self,
        layer: usize,
        store: &mut LayerStore,
        lengths: &[usize],
        replay: &dyn Replay,
    ) -> Result<(), CacheError> {
        if self.count == 0 {
            return Ok(());
        }
        let keys = &mut self.keys[layer];
        keys.resize(lengths.len(), None);
        for (sequence, keys) in keys.iter_mut().enumerate() {
            let evicted = lengths[sequence].saturating_sub(store.used(sequence));
            if evicted == 0 || !store.starts_with(sequence, self.count) {
                continue;
            }
            let keys = keys.get_or_insert_with(|| store.rows(sequence, 0..self.count).keys);
            let [from, to] =
                [0, evicted].map(|start| Positions::contiguous(&[start], &[self.count]));
            let keys = keys.clone().unsqueeze::<4>();
            let (shape, dtype) = (keys.dims(), keys.dtype());
            let rotated = replay.rotate(keys, &from, &to)?;
            check("rotated keys", &rotated, shape, dtype)?;
            store.set_first_keys(sequence, rotated.squeeze_dim(0));
        }
        Ok(())
    }

    /// Removes the sinks of sequences that become empty.
    pub(super) fn truncate(&mut self, to: &[usize]) {
        for keys in &mut self.keys {
            for (keys, _) in keys.iter_mut().zip(to).filter(|(_, to)| **to == 0) {
                *keys = None;
            }
        }
    }

    pub(super) fn select(&mut self, sequences: &[usize]) {
        for keys in &mut self.keys {
            let of = |&sequence: &usize| keys.get(sequence).cloned().flatten();
            *keys = sequences.iter().map(of).collect();
        }
    }

    pub(super) fn clear(&mut self) {
        self.keys.iter_mut().for_each(Vec::clear);
    }

    pub(super) fn bytes(&self) -> usize {
        let held = self.keys.iter().flatten().flatten();
        let bytes = |keys: &Tensor<3>| keys.dims().iter().product::<usize>() * keys.dtype().size();
        held.map(bytes).sum()
    }

    /// Adds the keys to a state.
    pub(super) fn write(&self, state: &mut State) {
        for (layer, keys) in self.keys.iter().enumerate() {
            for (sequence, keys) in keys.iter().enumerate() {
                if let Some(keys) = keys {
                    state.insert(name(layer, sequence), StateValue::Tensor(keys.clone()));
                }
            }
        }
    }

    /// The keys that a state has for these layers, and for sequences of these lengths.
    pub(super) fn restored(
        &self,
        state: &State,
        layers: &[LayerStore],
        lengths: &[usize],
        shape: &ModelShape,
    ) -> Result<Self, CacheError> {
        let kernels = &shape.kernels;
        let dims = [kernels.kv_heads, self.count, kernels.head_dim];
        let read = |layer: usize, sequence: usize| {
            let (name, store) = (name(layer, sequence), &layers[layer]);
            let evicted = store.used(sequence) < lengths[sequence];
            if self.count > 0 && evicted && !store.starts_with(sequence, self.count) {
                let problem = "entries were evicted, but the first ones are not there";
                return Err(wrong(&name, problem));
            }
            let keys = || state.tensor(&name, dims, shape.cache_dtype);
            state.contains(&name).then(keys).transpose()
        };
        let of_layer = |layer: usize| {
            let sequences = (0..lengths.len()).map(|sequence| read(layer, sequence));
            sequences.collect::<Result<Vec<_>, _>>()
        };
        let full = (0..layers.len()).map(|layer| match layers[layer].slides() {
            true => Ok(Vec::new()),
            false => of_layer(layer),
        });
        Ok(Self {
            count: self.count,
            keys: full.collect::<Result<_, _>>()?,
        })
    }
}

/// The name of a value of a state, for a layer and sequence.
fn name(layer: usize, sequence: usize) -> String {
    format!("layer.{layer}.sinks.{sequence}")
}
