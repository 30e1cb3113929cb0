//! The backend that a policy makes: storage, steps, drafts and batches around its decisions.

use super::{Policy, Sequence, decisions::by_sequence, queries::Remembered, reindex::Sinks};
use crate::{
    cache::{
        CacheBackend, CacheError, CachedPositions, Draft, KeysValues, LayerIndex, ModelShape,
        Observation, Observed, Span, State, Step,
    },
    memory::MemoryReport,
    storage::LayerStores,
};

/// A backend that stores keys and values, and evicts what its [`Policy`] says.
///
/// The policy decides about full-attention layers. It is called after attention, layer by layer, if attention reports
/// something, else at `commit`. For a draft it is called at `Accept`. A sliding-window layer keeps its window and the
/// entries of the last step.
///
/// # Cost
/// The entries, in panels of 32 slots that also hold those of the step. In addition 8 bytes a slot, and 4 for a score;
/// with `PER_HEAD` for each KV head. An observation is read back to the host in every full-attention layer.
///
/// ```
/// use burn::tensor::DType;
/// use kv_direct::cache::{CacheBackend, ModelShape};
/// use kv_direct::exact::KernelShapes;
/// use kv_direct::policy::{Attention, Entries, Evicting, Policy, Sequence};
///
/// /// Keeps the first tokens.
/// #[derive(Debug, Clone)]
/// struct First(usize);
///
/// impl Policy for First {
///     const NAME: &'static str = "first";
///
///     fn options(&self) -> Vec<(&'static str, String)> {
///         vec![("count", self.0.to_string())]
///     }
///
///     fn evict(&self, entries: &mut Entries<'_>, _: &Attention<'_>, _: &Sequence) {
///         entries.evict_where(|position| position >= self.0);
///     }
/// }
///
/// let shape = ModelShape::new(2, 64, DType::F32, KernelShapes::new(4, 2, 16));
/// let mut cache = Evicting::new(&shape, First(16));
/// cache.begin_draft()?;
/// # Ok::<(), kv_direct::cache::CacheError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Evicting<P> {
    pub(super) stores: LayerStores,
    pub(super) policy: P,
    /// Of the open step, or after the last one. Within a draft, `before` is the length at its start.
    pub(super) sequences: Vec<Sequence>,
    pub(super) remembered: Remembered,
    pub(super) sinks: Sinks,
    /// The prompts of all sequences when the open draft began.
    pub(super) draft: Option<Vec<Option<usize>>>,
}

impl<P: Policy> Evicting<P> {
    /// An empty cache for a model of this shape.
    #[must_use]
    pub fn new(shape: &ModelShape, policy: P) -> Self {
        Self {
            stores: LayerStores::with_heads(shape, P::PER_HEAD),
            sequences: Vec::new(),
            remembered: Remembered::new(shape.layers()),
            sinks: Sinks::new(policy.rotated_sinks().unwrap_or(0), shape.layers()),
            draft: None,
            policy,
        }
    }
}

impl<P: Policy> CacheBackend for Evicting<P> {
    fn begin(&mut self, step: &Step) -> Result<(), CacheError> {
        self.stores.begin(step)?;
        let tracker = self.stores.tracker();
        let lengths = tracker
            .outside_draft()
            .into_iter()
            .zip(tracker.lengths_after());
        let known = self.prompts();
        let sequences = lengths.enumerate().map(|(index, (before, length))| {
            let known = known.get(index).copied().flatten();
            let ends = known.is_none() && !step.more_follows() && length > 0;
            let prompt = if ends { Some(length) } else { known };
            let ends_prompt = match &self.draft {
                None => ends,
                Some(prompts) => Self::ended_since(prompts, index, prompt),
            };
            Sequence {
                before,
                length,
                prompt,
                ends_prompt,
            }
        });
        self.sequences = sequences.collect();
        Ok(())
    }

    fn keys_values(&mut self, layer: LayerIndex, span: Span<'_>) -> Result<KeysValues, CacheError> {
        let wanted = self.wants(layer);
        self.stores.store(layer, &span, wanted)?;
        if !self.stores.shape().slides(layer.index()) {
            self.score_and_rotate(layer.index(), &span)
                .inspect_err(|_| self.stores.tracker.fail())?;
        }
        self.stores.layers[layer.index()].read()
    }

    fn wants(&self, layer: LayerIndex) -> Observation {
        match self.stores.shape().slides(layer.index()) {
            true => Observation::Nothing,
            false => self.wanted_now(),
        }
    }

    fn observe(&mut self, layer: LayerIndex, observed: Observed) -> Result<(), CacheError> {
        self.stores.check_report(layer, &observed)?;
        let slots = self.stores.layers[layer.index()].capacities();
        let (queries, values) = match observed {
            Observed::ColumnSums(sums) => (None, sums.try_into_vec_as()),
            Observed::LastQueries(reported) => {
                (Some(reported.dims()[2]), reported.try_into_vec_as())
            }
        };
        let values: Vec<f32> = values
            .inspect_err(|_| self.stores.tracker.fail())
            .map_err(|error| CacheError::Backend(Box::new(error)))?;
        let new = by_sequence(
            &values,
            self.stores.shape().kernels.heads,
            queries,
            &slots,
            &self.stores.tracker().new_tokens(),
            &self.sequences,
        );
        let layer = layer.index();
        if self.draft.is_some() {
            let heads = self.stores.shape().kernels.heads;
            for (sequence, queries) in new.iter().enumerate() {
                let slots = slots[sequence];
                self.remembered.add(layer, sequence, queries, heads, slots);
            }
            let beside = self.remembered.bytes() + 2 * size_of_val(&values[..]);
            self.stores.hold(beside);
        } else {
            // The report on the device and on the host, and what a policy copies of it.
            let policy = self.remembered.bytes() + self.sinks.bytes();
            self.evict(layer, &new, policy + 3 * size_of_val(&values[..]));
            if queries.is_some() {
                self.remember(layer, &new);
            }
        }
        Ok(())
    }

    fn commit(&mut self) -> Result<(), CacheError> {
        self.stores.commit()?;
        if self.draft.is_none() {
            self.evict_unobserved();
        }
        Ok(())
    }

    fn lengths(&self) -> &[usize] {
        self.stores.tracker().lengths()
    }

    fn reach(&self) -> Vec<usize> {
        let mut reach = self.lengths().to_vec();
        if self.policy.rotated_sinks().is_some() {
            // Layers that the open step has not reached hold the entries before it.
            for (sequence, reach) in reach.iter_mut().enumerate() {
                let layers = self.stores.layers.iter();
                let held = layers.map(|layer| layer.used(sequence)).min();
                *reach = held.unwrap_or(*reach).min(*reach);
            }
        }
        reach
    }

    fn cached(&self, layer: LayerIndex) -> CachedPositions {
        self.stores.cached(layer)
    }

    fn memory(&self) -> MemoryReport {
        let mut report = self.stores.memory();
        report.scores += self.remembered.bytes();
        report.reserved += self.sinks.bytes();
        report
    }

    fn truncate(&mut self, to: &[usize]) -> Result<(), CacheError> {
        let shortest = |index: usize, length: usize| {
            let evicted = self.stores.has_evicted(index);
            let prompt = self.sequences.get(index).and_then(|s| s.prompt);
            self.policy.shortest(&Sequence::at(length, prompt), evicted)
        };
        self.stores.can_truncate(to, shortest)?;
        if to.iter().all(|&to| to == 0) {
            self.clear();
            return Ok(());
        }
        let lengths = self.lengths().to_vec();
        let mut sequences = self.at_rest(&self.prompts());
        for (index, sequence) in sequences.iter_mut().enumerate() {
            *sequence = sequence.shortened(to[index]);
        }
        match &self.draft {
            None => self.remembered.forget(|i| to.get(i) < lengths.get(i)),
            Some(prompts) => {
                // A sequence that has lost the whole draft has the prompt it had before.
                let start = self.stores.tracker().outside_draft();
                for (index, sequence) in sequences.iter_mut().enumerate() {
                    if to[index] == start[index] && to[index] < lengths[index] {
                        sequence.prompt = prompts.get(index).copied().flatten();
                    }
                }
                self.remembered.truncate(to);
            }
        }
        self.sequences = sequences;
        self.sinks.truncate(to);
        self.stores.shorten(to);
        Ok(())
    }

    fn begin_draft(&mut self) -> Result<(), CacheError> {
        self.stores.begin_draft()?;
        self.draft = Some(self.prompts());
        Ok(())
    }

    fn end_draft(&mut self, draft: Draft) -> Result<(), CacheError> {
        let before = self.stores.tracker().outside_draft();
        let start = self.stores.tracker.end_draft()?;
        let prompts = self.draft.take().unwrap_or_default();
        match (draft, start) {
            (Draft::Discard, None) => self.clear(),
            (Draft::Discard, Some(start)) => {
                self.remembered.truncate(&start);
                self.stores.shorten(&start);
                self.sequences = self.at_rest(&prompts);
            }
            (Draft::Accept, _) => {
                self.accept(&before, &prompts);
                self.stores.settle();
            }
        }
        Ok(())
    }

    fn select_sequences(&mut self, sequences: &[usize]) -> Result<(), CacheError> {
        self.stores.tracker().can_select(sequences)?;
        if sequences.is_empty() {
            self.clear();
        } else if !sequences.iter().copied().eq(0..self.lengths().len()) {
            let prompts = self.prompts();
            let prompt = |&index: &usize| prompts.get(index).copied().flatten();
            let prompts: Vec<_> = sequences.iter().map(prompt).collect();
            self.remembered.select(sequences);
            self.sinks.select(sequences);
            self.stores.select_sequences(sequences)?;
            self.sequences = self.at_rest(&prompts);
        }
        Ok(())
    }

    fn state(&self) -> Result<State, CacheError> {
        self.stores.tracker().check_no_draft()?;
        Ok(self.written())
    }

    fn set_state(&mut self, state: &State) -> Result<(), CacheError> {
        *self = self.restored(state)?;
        Ok(())
    }

    fn clear(&mut self) {
        self.stores.clear();
        self.sequences.clear();
        self.remembered = Remembered::new(self.stores.layers.len());
        self.sinks.clear();
        self.draft = None;
    }

    fn fork(&self) -> Box<dyn CacheBackend> {
        Box::new(self.clone())
    }
}
