//! A [`ResidualCheckpoint`] as a state, and back.

use super::{Old, ResidualCheckpoint, prefix::Residuals};
use crate::cache::{CacheError, Entry, State, progress::Progress, state::wrong};

impl ResidualCheckpoint {
    /// Its state, between steps and outside of drafts.
    pub(super) fn written(&self) -> State {
        let mut state = self.kind();
        state.insert_positions("lengths", self.progress.lengths().iter().copied());
        for (layer, rows) in self.layers.iter().enumerate() {
            rows.write(layer, &mut state);
            self.residuals[layer].write(layer, &mut state);
        }
        state.insert("emptied", Entry::Integers(vec![u64::from(self.emptied)]));
        if self.plan.keeps_ids() {
            let ids = self.tokens.iter().flatten().copied();
            state.insert("ids", Entry::Ids(ids.collect()));
        }
        state
    }

    /// A state of this kind without entries.
    fn kind(&self) -> State {
        let rows = match self.hot {
            usize::MAX => "all rows".into(),
            hot => format!("{hot} rows"),
        };
        State::new(
            "residual",
            &format!("{rows} above {}", self.plan),
            &self.shape,
        )
    }

    /// A cache like this one with what a state holds.
    pub(super) fn restored(&self, state: &State) -> Result<Self, CacheError> {
        state.check(&self.kind())?;
        let mut cache = Self::empty(&self.shape, &self.device, self.hot, self.plan.clone());
        let lengths = state.lengths()?;
        cache.emptied = match state.integers("emptied")? {
            [0] => false,
            [1] => true,
            _ => return Err(wrong("emptied", "it is neither 0 nor 1")),
        };
        if self.plan.keeps_ids() {
            let mut ids = state.ids("ids")?;
            if lengths.iter().sum::<usize>() != ids.len() {
                return Err(wrong("ids", "there is not one for every token"));
            }
            let rows = lengths.iter().map(|&length| {
                let (row, rest) = ids.split_at(length);
                ids = rest;
                row.to_vec()
            });
            cache.tokens = rows.collect();
        }
        for layer in 0..self.shape.layers() {
            let slots = || format!("layer.{layer}.slots");
            let rows = self.layers[layer].restored(layer, &lengths, &self.shape, state)?;
            let kept = !self.shape.slides(layer) && !self.plan.rebuilds(layer);
            if cache.emptied && !kept && rows.capacity() > 0 {
                return Err(wrong("emptied", "rows are held"));
            }
            if self.shape.slides(layer) {
                if !cache.emptied && !rows.are_some(&lengths) {
                    return Err(wrong(
                        &slots(),
                        "the rows of a layer with a window are missing",
                    ));
                }
            } else if !rows.are_newest(&lengths, |row| if kept { lengths[row] } else { 0 }) {
                return Err(wrong(&slots(), "the rows held are not the newest"));
            }
            cache.layers[layer] = rows;
            if self.plan.old(layer) == Old::Residual {
                cache.residuals[layer] = Residuals::restored(layer, &lengths, &self.shape, state)?;
            }
        }
        let limited = (0..self.shape.layers()).filter(|&layer| self.plan.rebuilds(layer));
        let held = |layer: usize| {
            let rows = &cache.layers[layer];
            (0..lengths.len())
                .map(|row| rows.used(row))
                .collect::<Vec<_>>()
        };
        let mut held = limited.map(held);
        if let Some(first) = held.next()
            && held.any(|other| other != first)
        {
            return Err(wrong("slots", "the layers do not hold the same rows"));
        }
        drop(held);
        cache.progress = Progress::at(lengths);
        Ok(cache)
    }
}
