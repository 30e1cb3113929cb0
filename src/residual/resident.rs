//! What a [`ResidualCheckpoint`](super::ResidualCheckpoint) holds between steps.

use std::sync::Arc;

use burn::tensor::Tensor;

use super::{Retain, retained::Residuals, setup::Setup};
use crate::{
    cache::{Projection, TokenIds},
    memory::MemoryReport,
    positions::Positions,
    storage::{LayerStore, StepTracker},
};

/// What is held between steps.
///
/// Invariants between steps, for every sequence:
/// * A layer that the plan rebuilds holds exactly the entries from `dropped` on, and those that differed when they were
///   certified; a `complete` one holds all. It is the same `dropped` in all layers.
/// * A full-attention layer whose keys and values the plan retains holds all entries.
/// * A sliding-window layer holds its window and the last step, unless `windows_dropped`.
/// * `tokens` has all ids if the plan keeps ids; `residuals` has those of all tokens where the plan retains them.
#[derive(Debug, Clone)]
pub(super) struct Resident {
    pub(super) setup: Arc<Setup>,
    pub(super) layers: Vec<LayerStore>,
    /// Layers that hold every entry for now, though the plan does not ask for it.
    pub(super) complete: Vec<bool>,
    /// How many of its first entries the rebuilt layers do not hold, for each sequence.
    pub(super) dropped: Vec<usize>,
    /// Everything that can be rebuilt was dropped, sliding windows included. The next step rebuilds it.
    pub(super) windows_dropped: bool,
    /// Ids of all tokens, those of the open step last.
    pub(super) tokens: TokenIds,
    /// Residuals of all tokens, by layer.
    pub(super) residuals: Vec<Residuals>,
}

impl Resident {
    pub(super) fn new(setup: &Arc<Setup>) -> Self {
        let (shape, plan) = (&setup.shape, &setup.plan);
        let layers = (0..shape.layers()).map(|layer| match plan.rebuilds(layer) {
            true => setup.store(),
            false => LayerStore::new(shape.windows[layer]),
        });
        Self {
            layers: layers.collect(),
            complete: vec![false; shape.layers()],
            dropped: Vec::new(),
            windows_dropped: false,
            tokens: TokenIds::default(),
            residuals: vec![Residuals::new(plan.chunk()); shape.layers()],
            setup: Arc::clone(setup),
        }
    }

    /// Whether old entries have to be rebuilt at a layer.
    pub(super) fn lacks(&self, layer: usize) -> bool {
        let dropped = self.dropped.iter().any(|&tokens| tokens > 0);
        dropped && self.setup.plan.rebuilds(layer) && !self.complete[layer]
    }

    /// Whether all layers that the plan rebuilds are `complete`. Then no full-attention layer lacks entries.
    pub(super) fn is_complete(&self) -> bool {
        let plan = &self.setup.plan;
        (0..self.layers.len()).all(|layer| !plan.rebuilds(layer) || self.complete[layer])
    }

    /// Sliding-window layers free what no later query sees. Returns the most bytes held meanwhile.
    pub(super) fn slide(&mut self, tracker: &StepTracker) -> usize {
        let mut most = 0;
        for layer in 0..self.layers.len() {
            let moved = self.layers[layer].slide(&tracker.anchor());
            if moved > 0 {
                most = most.max(moved + self.memory(tracker.lengths()).total());
            }
        }
        most
    }

    /// Layers that may no longer be `complete` drop their old entries. Returns the most bytes held meanwhile.
    pub(super) fn make_room(&mut self, complete: &[bool], lengths: &[usize]) -> usize {
        self.dropped.resize(lengths.len(), 0);
        let dropping = |&layer: &usize| self.complete[layer] && !complete[layer];
        let dropping: Vec<usize> = (0..self.layers.len()).filter(dropping).collect();
        if self.is_complete() && !dropping.is_empty() {
            let hot = self.setup.plan.hot();
            self.dropped = lengths.iter().map(|n| n.saturating_sub(hot)).collect();
        }
        let mut most = 0;
        for &layer in &dropping {
            let mut store = self.setup.store();
            let held = self.memory(lengths).total();
            let hot = |sequence: usize, position| position >= self.dropped[sequence];
            self.layers[layer].copy_into(&mut store, hot);
            most = most.max(held + store.held());
            self.layers[layer] = store;
            self.complete[layer] = false;
        }
        most
    }

    /// Lets the buffers of rebuilt layers grow to the hot entries, and of `complete` ones without limit.
    pub(super) fn limit(&mut self, complete: &[bool]) {
        let limit = self.setup.limit();
        for (layer, store) in self.layers.iter_mut().enumerate() {
            if self.setup.plan.rebuilds(layer) {
                store.limit_to((!complete[layer]).then_some(limit));
            }
        }
    }

    /// Adds the ids of a step, if the plan keeps ids.
    pub(super) fn add_tokens(&mut self, tokens: &TokenIds) {
        if self.setup.plan.retains_ids() {
            self.tokens.extend(tokens);
        }
    }

    /// Adds the residual of a step, if the plan retains it at this layer.
    pub(super) fn add_residual(
        &mut self,
        layer: usize,
        residual: &Tensor<3>,
        positions: &Positions,
    ) {
        if self.setup.plan.retain(layer) == Retain::Residual {
            self.residuals[layer].append(residual, positions);
        }
    }

    /// Adds entries to a layer that holds all of them. Returns the bytes held in addition while it grew.
    pub(super) fn add_entries(
        &mut self,
        layer: usize,
        new: Option<(&Projection, &Positions)>,
    ) -> usize {
        let store = &mut self.layers[layer];
        new.map_or(0, |(new, positions)| store.append(new, positions))
    }

    /// A step has ended with these layers complete; the others hold the entries from `first_held` on.
    pub(super) fn finish(&mut self, complete: Vec<bool>, first_held: Vec<usize>) {
        self.complete = complete;
        self.dropped = match self.is_complete() {
            true => vec![0; first_held.len()],
            false => first_held,
        };
        self.windows_dropped = false;
    }

    /// Shortens every sequence from its length to that in `to`. Where a sliding window has freed entries that are
    /// needed there, everything that can be rebuilt is dropped.
    pub(super) fn shorten(&mut self, lengths: &[usize], to: &[usize]) {
        if LayerStore::can_truncate(&self.layers, lengths, to, |_, _| 0).is_err() {
            self.drop_all(lengths);
        }
        let layers = self.layers.iter_mut();
        layers.for_each(|store| store.truncate(lengths, to));
        self.dropped.resize(to.len(), 0);
        let dropped = self.dropped.iter_mut().zip(to);
        dropped.for_each(|(dropped, &to)| *dropped = to.min(*dropped));
        self.tokens.truncate(to);
        self.truncate_residuals(to);
    }

    /// Drops everything that the plan does not retain, sliding windows included.
    pub(super) fn drop_all(&mut self, lengths: &[usize]) {
        for (layer, store) in self.layers.iter_mut().enumerate() {
            if self.setup.plan.rebuilds(layer) || store.slides() {
                *store = store.emptied();
                self.complete[layer] = false;
            }
        }
        self.dropped = lengths.to_vec();
        self.windows_dropped = lengths.iter().any(|&length| length > 0);
    }

    /// Frees buffers of which less than half is needed, outside of drafts. With a byte budget frees everything that is
    /// not needed, always. Returns the most bytes held meanwhile.
    pub(super) fn settle(&mut self, is_draft: bool, lengths: &[usize]) -> usize {
        let has_budget = self.setup.byte_budget.is_some();
        if has_budget {
            self.tokens.shrink_slack();
        }
        let mut most = 0;
        for layer in 0..self.layers.len() {
            let held = self.memory(lengths).total();
            let moved = match (has_budget, is_draft) {
                (true, _) => self.layers[layer].shrink(),
                (false, true) => 0,
                (false, false) => self.layers[layer].settle(),
            };
            if moved > 0 {
                most = most.max(held + moved);
            }
        }
        most
    }

    /// Changes the batch to these of its sequences, which then have these lengths.
    pub(super) fn select(&mut self, sequences: &[usize], lengths: &[usize]) {
        let layers = self.layers.iter_mut();
        layers.for_each(|store| store.select(sequences));
        let residuals = self.residuals.iter_mut();
        residuals.for_each(|residuals| residuals.select(sequences));
        if self.setup.plan.retains_ids() {
            let ids = |&i: &usize| self.tokens.sequence(i).to_vec();
            self.tokens = sequences.iter().map(ids).collect();
        }
        self.dropped = sequences.iter().map(|&i| self.dropped[i]).collect();
        self.windows_dropped &= lengths.iter().any(|&length| length > 0);
        self.truncate_residuals(lengths);
    }

    fn truncate_residuals(&mut self, lengths: &[usize]) {
        let residuals = self.residuals.iter_mut();
        residuals.for_each(|residuals| residuals.truncate(lengths));
    }

    /// Bytes held for sequences of these lengths.
    pub(super) fn memory(&self, lengths: &[usize]) -> MemoryReport {
        let (shape, plan) = (&self.setup.shape, &self.setup.plan);
        let mut report = LayerStore::report(&self.layers);
        let processed: usize = lengths.iter().sum();
        if plan.retains_ids() {
            report.tokens = processed * size_of::<u32>();
            report.reserved += self.tokens.bytes() - report.tokens;
        }
        let layers = (0..self.layers.len()).filter(|&l| plan.retain(l) == Retain::Residual);
        report.residuals = processed * layers.count() * shape.hidden * shape.dtype.size();
        let held: usize = self.residuals.iter().map(Residuals::bytes).sum();
        report.reserved += held - report.residuals;
        report
    }

    /// Entries, of all layers, that stay because they differed when they were rebuilt.
    pub(super) fn differing(&self) -> usize {
        if !self.setup.certified {
            return 0;
        }
        let rebuilt = (0..self.layers.len()).filter(|&layer| self.setup.plan.rebuilds(layer));
        let old = |layer: usize| {
            let dropped = self.dropped.iter().enumerate();
            dropped.map(move |(i, &end)| self.layers[layer].positions_below(i, end).len())
        };
        rebuilt.flat_map(old).sum()
    }
}
