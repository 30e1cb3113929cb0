//! What a step does with old entries, decided when it begins; and how much of that a byte budget allows.

use super::{
    Flow, ResidualCheckpoint,
    need::{Need, StepSize, rebuilt},
    resident::Resident,
    setup::Setup,
};
use crate::{
    cache::{CacheError, Step},
    exact::PANEL,
};

/// What the open step, or a resume, does with old entries.
#[derive(Debug, Clone, Default)]
pub(super) struct StepPlan {
    /// How many of its first tokens a replay carries from layer to layer, for each sequence.
    pub(super) carried: Vec<usize>,
    /// The first token whose entries the rebuilt layers hold afterwards, for each sequence.
    pub(super) first_held: Vec<usize>,
    /// Layers that hold every entry afterwards, though the plan does not ask for it.
    pub(super) complete: Vec<bool>,
    /// Which layers the carried tokens enter and leave.
    pub(super) flow: Vec<Flow>,
}

impl StepPlan {
    /// For a step to `after` tokens, with these layers `complete` afterwards.
    pub(super) fn new(
        setup: &Setup,
        resident: &Resident,
        after: &[usize],
        complete: Vec<bool>,
    ) -> Self {
        let (plan, dropped) = (&setup.plan, &resident.dropped);
        let first_held: Vec<usize> = after.iter().map(|&n| setup.first_hot(n)).collect();
        let drops = |layer: usize| plan.rebuilds(layer) && !complete[layer];
        // Entries that are dropped in this step are carried too if they have to be compared.
        let mut pairs = first_held.iter().zip(dropped);
        let certifies =
            setup.certified && pairs.any(|(o, d)| o > d) && (0..setup.shape.layers()).any(drops);
        let carried: Vec<usize> = match certifies {
            true => first_held
                .iter()
                .zip(dropped)
                .map(|(o, d)| *o.max(d))
                .collect(),
            false => dropped.clone(),
        };
        let missing = |layer: usize| match setup.shape.slides(layer) {
            true => resident.windows_dropped,
            false => resident.lacks(layer) || certifies && drops(layer),
        };
        let flow = match carried.iter().any(|&tokens| tokens > 0) {
            true => plan.flow(missing),
            false => vec![Flow::default(); setup.shape.layers()],
        };
        Self {
            carried,
            first_held,
            complete,
            flow,
        }
    }
}

/// What a step or a resume needs room for in addition to its entries.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Beside {
    /// Entries that sliding-window layers hold beyond their window.
    pub(super) recent: usize,
    /// Bytes of other things.
    pub(super) bytes: usize,
    /// Layers that must stay complete.
    pub(super) complete: usize,
}

impl ResidualCheckpoint {
    /// The layers that may be complete once `step` is over. Refuses a step that does not fit the byte budget.
    pub(super) fn affordable_after(&self, step: &Step) -> Result<Vec<bool>, CacheError> {
        let lengths = step.tokens().lengths().into_iter();
        let starts = step.starts().iter();
        let after: Vec<usize> = starts.zip(lengths).map(|(from, n)| from + n).collect();
        let mut anchor = step.starts().to_vec();
        if self.tracker.is_draft() {
            anchor = self.tracker.anchor();
            anchor.resize(after.len(), 0);
        }
        let recent = after
            .iter()
            .zip(&anchor)
            .map(|(after, anchor)| after - anchor);
        let beside = Beside {
            recent: recent.max().unwrap_or(0),
            ..Beside::default()
        };
        self.affordable(step.starts(), &after, beside)
    }

    /// The layers that may be complete for sequences of these lengths.
    pub(super) fn affordable_for(&self, lengths: &[usize]) -> Result<Vec<bool>, CacheError> {
        let beside = Beside {
            recent: self.beyond_windows(),
            ..Beside::default()
        };
        self.affordable(lengths, lengths, beside)
    }

    /// The layers that may be complete for sequences of `after` tokens, top layers first.
    pub(super) fn affordable(
        &self,
        before: &[usize],
        after: &[usize],
        beside: Beside,
    ) -> Result<Vec<bool>, CacheError> {
        let (shape, plan) = (&self.setup.shape, &self.setup.plan);
        let mut complete = vec![false; shape.layers()];
        let Some(budget) = self.setup.byte_budget else {
            return Ok(complete);
        };
        let resident = &self.resident;
        let differing = resident.differing();
        let size = StepSize {
            tokens: before.iter().copied().zip(after.iter().copied()).collect(),
            recent: beside.recent,
            complete_before: resident.complete.iter().filter(|&&c| c).count(),
            complete_after: 0,
            missing: resident.windows_dropped || resident.dropped.iter().any(|&n| n > 0),
            windows_missing: resident.windows_dropped,
            certified: self.setup.certified,
            differing: differing + self.uncertain(after),
        };
        let needed = |complete_after| {
            let size = StepSize {
                complete_after,
                ..size.clone()
            };
            beside.bytes + Need::of(shape, plan, &size).peak()
        };
        // Entries are certified when they are dropped for good.
        let most_layers = match self.setup.certified {
            true => 0,
            false => rebuilt(shape, plan).count(),
        };
        let least = beside.complete;
        let mut counts = (least..=most_layers).rev();
        let Some(fits) = counts.find(|&count| needed(count) <= budget) else {
            return Err(CacheError::StepBytes {
                budget,
                needed: needed(least),
                differing,
            });
        };
        for layer in rebuilt(shape, plan).rev().take(fits) {
            complete[layer] = true;
        }
        Ok(complete)
    }

    /// The most entries that a sliding-window layer holds beyond its window, to a panel: those of the last step, of a
    /// draft, and of steps that were undone.
    pub(super) fn beyond_windows(&self) -> usize {
        let windows = self.resident.layers.iter().zip(&self.setup.shape.windows);
        let beyond = windows.filter_map(|(store, window)| {
            let window = window.as_ref()?.get();
            Some(
                store
                    .capacity()
                    .saturating_sub(window.saturating_add(PANEL)),
            )
        });
        beyond.max().unwrap_or(0)
    }

    /// How many more entries, over all layers, may differ when they are certified in a step to these lengths. One chunk
    /// is already counted.
    fn uncertain(&self, after: &[usize]) -> usize {
        let setup = &self.setup;
        if !setup.certified {
            return 0;
        }
        let dropped = self.resident.dropped.iter().copied();
        let dropped = dropped.chain(std::iter::repeat(0));
        let dropping = after.iter().zip(dropped).map(|(&after, dropped)| {
            let dropping = setup.first_hot(after).saturating_sub(dropped);
            dropping.saturating_sub(setup.plan.chunk())
        });
        dropping.sum::<usize>() * rebuilt(&setup.shape, &setup.plan).count()
    }
}
