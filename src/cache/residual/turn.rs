//! What a step does with old rows, decided when it begins.

use super::{
    ResidualCheckpoint,
    need::{Need, Standing, rebuilt},
    plan::Flow,
};
use crate::{
    cache::{CacheBackend, CacheError, Step, rows::Rows},
    exact::PIECE,
};

/// The old rows of the open step.
#[derive(Debug, Clone, Default)]
pub(super) struct Turn {
    /// Rows a replay carries from layer to layer, by batch row.
    pub(super) carried: Vec<usize>,
    /// By batch row, the first row that layers which do not hold every one hold afterwards.
    pub(super) oldest: Vec<usize>,
    /// Layers that hold every row afterwards, though the plan does not ask for it.
    pub(super) whole: Vec<bool>,
    /// Which layers the carried rows enter and leave.
    pub(super) flow: Vec<Flow>,
}

/// What a step or a resume has to leave room for beside the rows of the lengths it is about.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Beside {
    /// Rows that windows hold beyond what they show.
    pub(super) recent: usize,
    /// Bytes of other things.
    pub(super) bytes: usize,
    /// Layers that must go on holding every row.
    pub(super) whole: usize,
}

impl ResidualCheckpoint {
    /// Which layers may hold every row while `after` tokens are held.
    pub(super) fn affordable(
        &self,
        before: &[usize],
        after: &[usize],
        beside: Beside,
    ) -> Result<Vec<bool>, CacheError> {
        let mut whole = vec![false; self.layers.len()];
        let Some(budget) = self.budget else {
            return Ok(whole);
        };
        let most = |of: &[usize]| of.iter().copied().max().unwrap_or(0);
        let differing = self.differing();
        let standing = Standing {
            rows: after.len(),
            before: most(before),
            after: most(after),
            recent: beside.recent,
            held: self.whole.iter().filter(|&&whole| whole).count(),
            whole: 0,
            missing: self.emptied || self.dropped.iter().any(|&rows| rows > 0),
            windows: self.emptied,
            certified: self.certified,
            differing: differing + self.uncertain(after),
        };
        let needed = |whole| {
            let standing = Standing { whole, ..standing };
            beside.bytes + Need::of(&self.shape, &self.plan, standing).peak()
        };
        let layers = rebuilt(&self.shape, &self.plan);
        // A certificate is given when rows leave for good.
        let most_layers = if self.certified { 0 } else { layers.count() };
        let least = beside.whole;
        let Some(fits) = (least..=most_layers)
            .rev()
            .find(|&whole| needed(whole) <= budget)
        else {
            return Err(CacheError::StepBytes {
                budget,
                needed: needed(least),
                differing,
            });
        };
        for layer in rebuilt(&self.shape, &self.plan).rev().take(fits) {
            whole[layer] = true;
        }
        Ok(whole)
    }

    /// Rows that windows hold beyond what they show, at most, to a piece: those of the last call and of a draft, and
    /// those of calls that were undone.
    pub(super) fn beyond_windows(&self) -> usize {
        let windows = self.layers.iter().zip(&self.shape.windows);
        let beyond = windows.filter_map(|(rows, window)| {
            Some(rows.capacity().saturating_sub((*window)?.get() + PIECE))
        });
        beyond.max().unwrap_or(0)
    }

    /// Layers that may hold every row once `step` is over; refuses one that does not fit the budget.
    pub(super) fn affords(&self, step: &Step) -> Result<Vec<bool>, CacheError> {
        let lengths = step.tokens().lengths().into_iter();
        let after: Vec<usize> = step
            .starts()
            .iter()
            .zip(lengths)
            .map(|(from, n)| from + n)
            .collect();
        let mut anchor = step.starts().to_vec();
        if self.progress.is_draft() {
            anchor = self.progress.anchor();
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

    /// Decides what the step that has just begun does; layers that can no longer hold every row let go of the
    /// old ones now, so that their room is free while the step runs.
    pub(super) fn take_turn(&mut self, whole: Vec<bool>) {
        let lengths = self.progress.lengths().to_vec();
        self.dropped.resize(lengths.len(), 0);
        self.make_room(&whole);
        self.limit_layers(&whole);

        let after = self.progress.lengths_after();
        let oldest: Vec<usize> = after.iter().map(|&length| self.oldest(length)).collect();
        let leave = |layer: usize| self.plan.rebuilds(layer) && !whole[layer];
        let more = oldest
            .iter()
            .zip(&self.dropped)
            .any(|(oldest, dropped)| oldest > dropped);
        let certifies = self.certified && more && (0..self.layers.len()).any(leave);
        let carried = self.dropped.iter().zip(&oldest);
        let carried: Vec<usize> = carried
            .map(|(&dropped, &oldest)| {
                if certifies {
                    dropped.max(oldest)
                } else {
                    dropped
                }
            })
            .collect();
        let missing = |layer: usize| match self.shape.slides(layer) {
            true => self.emptied,
            false => self.lacks(layer) || certifies && leave(layer),
        };
        let flow = match carried.iter().any(|&rows| rows > 0) {
            true => self.plan.flow(missing),
            false => vec![Flow::default(); self.layers.len()],
        };
        self.turn = Turn {
            carried,
            oldest,
            whole,
            flow,
        };
    }

    /// Layers that can no longer hold every row let go of the old ones.
    pub(super) fn make_room(&mut self, whole: &[bool]) {
        let hot = self.plan.hot();
        let leaving = |layer: &usize| self.whole[*layer] && !whole[*layer];
        let leaving: Vec<usize> = (0..self.layers.len()).filter(leaving).collect();
        if self.all_held() && !leaving.is_empty() {
            self.dropped = self
                .progress
                .lengths()
                .iter()
                .map(|length| length.saturating_sub(hot))
                .collect();
        }
        for &layer in &leaving {
            let mut rows = Rows::limited(None, self.plan.limit(self.certified));
            let held = self.memory().total();
            self.layers[layer].copy_into(&mut rows, |row, position| position >= self.dropped[row]);
            let (used, free) = rows.bytes();
            self.sliding_peak = self.sliding_peak.max(held + used + free);
            self.layers[layer] = rows;
            self.whole[layer] = false;
        }
    }

    /// Lets buffers grow as far as it takes to hold every row, or the hot ones.
    pub(super) fn limit_layers(&mut self, whole: &[bool]) {
        for layer in rebuilt(&self.shape, &self.plan) {
            let limit = self.plan.limit(self.certified);
            self.layers[layer].limit_to((!whole[layer]).then_some(limit));
        }
    }

    /// The step is over.
    pub(super) fn end_turn(&mut self) {
        let Turn { oldest, whole, .. } = std::mem::take(&mut self.turn);
        self.whole = whole;
        self.dropped = match self.all_held() {
            true => vec![0; oldest.len()],
            false => oldest,
        };
        self.emptied = false;
    }

    /// The first hot row of so many; where rows are certified they leave in whole chunks.
    const fn oldest(&self, length: usize) -> usize {
        let chunk = if self.certified { self.plan.chunk() } else { 1 };
        length.saturating_sub(self.plan.hot()) / chunk * chunk
    }

    /// Whether old rows have to be rebuilt at a layer.
    pub(super) fn lacks(&self, layer: usize) -> bool {
        self.plan.rebuilds(layer) && !self.whole[layer] && self.dropped.iter().any(|&rows| rows > 0)
    }

    /// Whether every layer that shows all keys holds every row, whatever their number.
    fn all_held(&self) -> bool {
        (0..self.layers.len()).all(|layer| !self.plan.rebuilds(layer) || self.whole[layer])
    }

    /// Rows, of all layers, that a step to these lengths may have to keep because they differ, beyond those of one
    /// block, for which there is room.
    fn uncertain(&self, after: &[usize]) -> usize {
        if !self.certified {
            return 0;
        }
        let dropped = self.dropped.iter().copied().chain(std::iter::repeat(0));
        let leaving = after.iter().zip(dropped).map(|(&after, dropped)| {
            let leaving = self.oldest(after).saturating_sub(dropped);
            leaving.saturating_sub(self.plan.chunk())
        });
        leaving.sum::<usize>() * rebuilt(&self.shape, &self.plan).count()
    }

    /// Rows kept because they differed when they were rebuilt, of all layers.
    fn differing(&self) -> usize {
        if !self.certified {
            return 0;
        }
        let held = |layer: usize| {
            let old = |row: &usize| {
                self.layers[layer]
                    .positions_below(*row, self.dropped[*row])
                    .len()
            };
            (0..self.dropped.len()).map(|row| old(&row)).sum::<usize>()
        };
        rebuilt(&self.shape, &self.plan).map(held).sum()
    }
}
