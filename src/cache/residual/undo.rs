//! What is let go of outside of steps: by truncation, by the end of a draft, by parking.

use super::ResidualCheckpoint;
use crate::cache::{CacheBackend, rows::Rows};

impl ResidualCheckpoint {
    /// Takes every batch row back to its length in `to`, which makes sense.
    pub(super) fn take_back(&mut self, to: &[usize]) {
        if Rows::reachable(&self.layers, self.progress.lengths(), to, |_, _| 0).is_err() {
            self.let_go();
        }
        for rows in &mut self.layers {
            rows.cut(self.progress.lengths(), to);
        }
        self.progress.truncate(to);
        self.dropped.resize(to.len(), 0);
        let dropped = self.dropped.iter_mut().zip(to);
        dropped.for_each(|(dropped, &to)| *dropped = to.min(*dropped));
        self.tokens.truncate(to);
        let longest = to.iter().copied().max().unwrap_or(0);
        self.residuals
            .iter_mut()
            .for_each(|residuals| residuals.truncate(longest));
        self.settle();
    }

    /// Gives back what half of the buffers no longer need, outside of drafts; with a budget all that is not needed,
    /// always: a budget is about what is needed, not about what was.
    pub(super) fn settle(&mut self) {
        (self.scratch_peak, self.sliding_peak) = (0, 0);
        if self.budget.is_some() {
            self.tokens.shrink_to_pieces();
        }
        for layer in 0..self.layers.len() {
            let held = self.memory().total();
            let moved = match (self.budget, self.progress.is_draft()) {
                (Some(_), _) => self.layers[layer].shrink(),
                (None, true) => 0,
                (None, false) => self.layers[layer].settle(),
            };
            if moved > 0 {
                self.sliding_peak = self.sliding_peak.max(held + moved);
            }
        }
    }

    /// Lets go of all rows that the plan does not keep, those of windows too: they can be rebuilt.
    pub(super) fn let_go(&mut self) {
        for (layer, rows) in self.layers.iter_mut().enumerate() {
            if self.plan.rebuilds(layer) || rows.slides() {
                *rows = rows.emptied();
                self.whole[layer] = false;
            }
        }
        self.dropped = self.progress.lengths().to_vec();
        self.emptied = self.progress.lengths().iter().any(|&length| length > 0);
    }
}
