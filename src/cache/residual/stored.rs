//! A [`ResidualCheckpoint`] as a state, and back.

use super::{Old, ResidualCheckpoint};
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
        let rows = match self.plan.hot() {
            usize::MAX => "all rows".into(),
            hot => format!("{hot} rows"),
        };
        let mut options = format!("{rows} above {}", self.plan);
        if self.plan.has_residuals() {
            options += &format!("; chunks of {}", self.plan.chunk());
        }
        if let Some(budget) = self.budget {
            options += &format!("; {budget} bytes");
        }
        State::new("residual", &options, &self.shape)
    }

    /// A cache like this one with what a state holds.
    pub(super) fn restored(&self, state: &State) -> Result<Self, CacheError> {
        state.check(&self.kind())?;
        let mut cache = Self::empty(
            &self.shape,
            &self.device,
            self.plan.clone(),
            self.budget,
            self.certified,
        );
        let lengths = state.lengths()?;
        cache.emptied = match state.integers("emptied")? {
            [0] => false,
            [1] => true,
            _ => return Err(wrong("emptied", "it is neither 0 nor 1")),
        };
        cache.emptied &= lengths.iter().any(|&length| length > 0);
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
            let rows = cache.layers[layer].restored(layer, &lengths, &self.shape, state)?;
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
                let residuals = &self.residuals[layer];
                cache.residuals[layer] = residuals.restored(layer, &lengths, &self.shape, state)?;
            }
        }
        cache.dropped = vec![0; lengths.len()];
        let mut lacking: Option<Vec<usize>> = None;
        for layer in (0..self.shape.layers()).filter(|&layer| self.plan.rebuilds(layer)) {
            let rows = lengths.iter().enumerate();
            let missing: Vec<usize> = rows
                .map(|(row, length)| length - cache.layers[layer].used(row))
                .collect();
            if self.budget.is_some() && missing.iter().all(|&rows| rows == 0) {
                cache.whole[layer] = true;
            } else if *lacking.get_or_insert_with(|| missing.clone()) != missing {
                return Err(wrong("slots", "the layers do not hold the same rows"));
            }
        }
        cache.dropped = lacking.unwrap_or(cache.dropped);
        if cache.emptied {
            cache.dropped.clone_from(&lengths);
        }
        cache.progress = Progress::at(lengths);
        Ok(cache)
    }
}
