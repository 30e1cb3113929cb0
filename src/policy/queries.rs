//! Queries that are remembered: those of an open draft, and the newest of an unfinished prompt.

use super::attention::Query;
use crate::cache::{CacheError, State, StateValue, wrong};

/// Remembered queries, by layer and sequence, oldest first.
#[derive(Debug, Clone, Default)]
pub(super) struct Remembered {
    layers: Vec<Vec<Vec<Stored>>>,
}

/// What one query gave to each slot, head after head.
#[derive(Debug, Clone)]
struct Stored {
    position: usize,
    heads: usize,
    probabilities: Vec<f32>,
}

impl Stored {
    fn query(&self) -> Query<'_> {
        let slots = self.probabilities.len() / self.heads;
        Query {
            position: self.position,
            probabilities: &self.probabilities,
            stride: slots,
            slots,
        }
    }
}

impl Remembered {
    pub(super) fn new(layers: usize) -> Self {
        Self {
            layers: vec![Vec::new(); layers],
        }
    }

    /// The queries remembered of a sequence at a layer.
    pub(super) fn of(&self, layer: usize, sequence: usize) -> Vec<Query<'_>> {
        let stored = self.layers[layer].get(sequence).into_iter().flatten();
        stored.map(Stored::query).collect()
    }

    /// Whether anything is remembered at a layer.
    pub(super) fn any(&self, layer: usize) -> bool {
        self.layers[layer].iter().any(|queries| !queries.is_empty())
    }

    /// Adds queries of a sequence, for the first `slots` slots.
    pub(super) fn add(
        &mut self,
        layer: usize,
        sequence: usize,
        queries: &[Query<'_>],
        heads: usize,
        slots: usize,
    ) {
        let sequences = &mut self.layers[layer];
        if sequences.len() <= sequence {
            sequences.resize(sequence + 1, Vec::new());
        }
        let stored = queries.iter().map(|query| Stored {
            position: query.position,
            heads,
            probabilities: query.to_vec(heads, slots),
        });
        sequences[sequence].extend(stored);
    }

    /// Removes all but the newest `count` queries of a sequence at a layer.
    pub(super) fn keep_newest(&mut self, layer: usize, sequence: usize, count: usize) {
        if let Some(queries) = self.layers[layer].get_mut(sequence) {
            queries.drain(..queries.len().saturating_sub(count));
            if queries.is_empty() {
                *queries = Vec::new();
            }
        }
    }

    /// Removes the queries of the sequences for which `forget` is true.
    pub(super) fn forget(&mut self, forget: impl Fn(usize) -> bool) {
        for layer in &mut self.layers {
            for (sequence, queries) in layer.iter_mut().enumerate() {
                if forget(sequence) {
                    *queries = Vec::new();
                }
            }
        }
    }

    /// Removes the queries from position `to[sequence]` on.
    pub(super) fn truncate(&mut self, to: &[usize]) {
        for layer in &mut self.layers {
            for (queries, &to) in layer.iter_mut().zip(to) {
                queries.retain(|query| query.position < to);
            }
        }
    }

    pub(super) fn select(&mut self, sequences: &[usize]) {
        for layer in &mut self.layers {
            let of = |&sequence: &usize| layer.get(sequence).cloned().unwrap_or_default();
            *layer = sequences.iter().map(of).collect();
        }
    }

    pub(super) fn bytes(&self) -> usize {
        let stored = self.layers.iter().flatten().flatten();
        let bytes = |stored: &Stored| stored.probabilities.capacity() * size_of::<f32>();
        stored.map(bytes).sum()
    }

    /// Adds the queries of sequences of these lengths to a state: `[queries, heads, tokens]`, with zeros for tokens
    /// that are newer than the query. Nothing was evicted, so the slot of a token is its position.
    pub(super) fn write(&self, lengths: &[usize], state: &mut State) {
        for (layer, sequences) in self.layers.iter().enumerate() {
            for (sequence, queries) in sequences.iter().enumerate() {
                if queries.is_empty() {
                    continue;
                }
                let heads = queries.iter().flat_map(|stored| {
                    let query = stored.query();
                    (0..stored.heads).map(move |head| query.head(head))
                });
                let tokens = heads.flat_map(|slots| {
                    let seen = slots.iter().copied();
                    let newer = std::iter::repeat(0.0);
                    seen.chain(newer).take(lengths[sequence])
                });
                let all = StateValue::Floats(tokens.collect());
                state.insert(name(layer, sequence), all);
            }
        }
    }

    /// At most `most` queries of each sequence, its newest, as a state has them. Only those of unfinished prompts are
    /// remembered.
    pub(super) fn restored(
        layers: usize,
        heads: usize,
        lengths: &[usize],
        prompts: &[Option<usize>],
        most: usize,
        state: &State,
    ) -> Result<Self, CacheError> {
        let mut remembered = Self::new(layers);
        for layer in 0..layers {
            for (sequence, &length) in lengths.iter().enumerate() {
                let name = name(layer, sequence);
                if !state.contains(&name) {
                    continue;
                }
                let all = state.floats(&name)?;
                let width = heads.saturating_mul(length).max(1);
                let count = all.len() / width;
                if prompts[sequence].is_some()
                    || count > most.min(length)
                    || all.len() != count * width
                {
                    return Err(wrong(&name, "it does not fit the lengths"));
                }
                for (index, probabilities) in all.chunks_exact(width).enumerate() {
                    let position = length - count + index;
                    let query = Query {
                        position,
                        probabilities,
                        stride: length,
                        slots: position + 1,
                    };
                    remembered.add(layer, sequence, &[query], heads, query.slots);
                }
            }
        }
        Ok(remembered)
    }
}

/// The name of a value of a state, for a layer and sequence.
fn name(layer: usize, sequence: usize) -> String {
    format!("layer.{layer}.queries.{sequence}")
}
