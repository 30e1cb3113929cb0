//! What a [`ResidualCheckpoint`] answers at a layer, old rows rebuilt and carried on.

use super::{
    Old, ResidualCheckpoint,
    plan::Flow,
    prefix::{CHUNK, Prefix, projection_bytes},
};
use crate::{
    cache::{CacheError, KeysValues, Projection, Replay, Span, rows::Rows},
    exact::PIECE,
    positions::{Positions, visible},
};

/// Rows and the positions they have.
type Placed<'a> = Option<(&'a Projection, &'a Positions)>;

impl ResidualCheckpoint {
    /// The old rows as they enter `layer`.
    fn prefix(&mut self, layer: usize, span: &Span<'_>) -> Result<Prefix, CacheError> {
        match self.plan.old(layer) {
            Old::Residual => Ok(self.residuals[layer].prefix(&self.old)),
            _ if layer == 0 => Prefix::embed(&self.tokens, &self.old, span.replay),
            _ => Ok(std::mem::take(&mut self.replaying)),
        }
    }

    /// All rows of a layer whose keys and values are kept; on the way a replay passes through it.
    pub(super) fn keep(&mut self, layer: usize, span: &Span<'_>) -> Result<KeysValues, CacheError> {
        let moved = self.layers[layer].append(span.projection, span.positions);
        self.scratch_peak = self.scratch_peak.max(moved);
        let keys_values = self.layers[layer].read()?;
        if self.flow[layer].enters {
            let mut prefix = self.prefix(layer, span)?;
            let slots = keys_values.positions().width();
            let block = span.replay.scratch(self.old.len(), CHUNK, slots);
            prefix.advance(&keys_values, span.replay)?;
            self.scratch_peak = self.scratch_peak.max(prefix.bytes() + block);
            self.replaying = prefix;
        }
        Ok(keys_values)
    }

    /// All rows of a layer with a window; on the way a replay passes through it.
    pub(super) fn slide(
        &mut self,
        layer: usize,
        span: &Span<'_>,
    ) -> Result<KeysValues, CacheError> {
        let mut replayed = 0;
        let Flow { enters, leaves: on } = self.flow[layer];
        if enters {
            let mut prefix = self.prefix(layer, span)?;
            let mut store = std::mem::take(&mut self.layers[layer]);
            let old = std::mem::take(&mut self.old);
            let stored = self.emptied.then_some(&mut store);
            let passed = self.pass(layer, &mut prefix, &old, span.replay, on, stored);
            (self.layers[layer], self.old) = (store, old);
            replayed = passed?;
            if on {
                self.replaying = prefix;
            }
        }
        let store = &mut self.layers[layer];
        let moved = store.append(span.projection, span.positions);
        self.scratch_peak = self.scratch_peak.max(moved.max(replayed));
        store.read()
    }

    /// Takes the first `old[row]` rows through a layer with a window; those that it shows go into `store`
    /// where there is one. Answers the most bytes held meanwhile.
    pub(super) fn pass(
        &self,
        layer: usize,
        prefix: &mut Prefix,
        old: &[usize],
        replay: &dyn Replay,
        on: bool,
        mut store: Option<&mut Rows>,
    ) -> Result<usize, CacheError> {
        let (window, anchor) = (self.shape.windows[layer], self.progress.anchor());
        // What came since then stays whatever the window shows.
        let needed = |row: usize, key| key >= anchor[row] || visible(anchor[row], key, window);
        let mut reach = Rows::new(window);
        let held = prefix.pass(old, replay, on, &mut reach, |rows, positions| {
            if let Some(store) = &mut store {
                store.append(rows, &positions.filter(needed));
            }
        })?;
        let block = replay.scratch(old.len(), CHUNK, reach.capacity());
        let temporaries = projection_bytes(old.len(), &self.shape).max(block);
        Ok(prefix.bytes() + held + temporaries)
    }

    /// All rows of a layer without a window for a step that needs old ones or drops some: rebuilt,
    /// exact, new. Then the layer's store holds the newest rows, and the replay stands before the next
    /// layer.
    pub(super) fn rebuild(
        &mut self,
        layer: usize,
        span: &Span<'_>,
        after: &[usize],
    ) -> Result<KeysValues, CacheError> {
        let mut prefix = self.prefix(layer, span)?;
        let new = Some((span.projection, span.positions));
        let store = &mut self.layers[layer];
        let (keys_values, filled) =
            fill(store, &prefix, &self.old, self.hot, after, new, span.replay)?;
        let batch = after.len();
        let mut temporaries = filled.copied + projection_bytes(batch, &self.shape);
        let mut carried = 0;
        // What is kept is counted where it is kept.
        if self.flow[layer].leaves || self.plan.old(layer) != Old::Residual {
            carried = prefix.bytes();
        }
        if self.flow[layer].leaves {
            let slots = keys_values.positions().width();
            temporaries = temporaries.max(span.replay.scratch(batch, CHUNK, slots));
            prefix.advance(&keys_values, span.replay)?;
            self.replaying = prefix;
        }
        self.scratch_peak = self.scratch_peak.max(filled.beside + carried + temporaries);
        Ok(keys_values)
    }
}

/// What filling a store held beside it.
pub(super) struct Filled {
    /// Bytes of rows that were copied to be moved.
    copied: usize,
    /// Bytes of the answer, where that is not the store itself.
    pub(super) beside: usize,
}

/// All rows of a layer of which every batch row has `after[row]`: the first `old[row]` rebuilt from
/// `prefix`, those of `store`, and the `new` ones. `store` then holds the newest `hot`.
pub(super) fn fill(
    store: &mut Rows,
    prefix: &Prefix,
    old: &[usize],
    hot: usize,
    after: &[usize],
    new: Placed<'_>,
    replay: &dyn Replay,
) -> Result<(KeysValues, Filled), CacheError> {
    let slots = after.iter().copied().max().unwrap_or(0);
    let slots = slots.next_multiple_of(PIECE);
    let oldest: Vec<usize> = after.iter().map(|n| n.saturating_sub(hot)).collect();
    let stays = |row: usize, position: usize| position >= oldest[row];
    let (copied, _) = store.bytes();
    let held = store.ordered();
    // After a truncation the store is short of rows, and rebuilt ones fill it up again: all of it
    // is then stored anew in rising order, because a store that holds every row is read as it is.
    let refill = old.iter().zip(&oldest).any(|(old, oldest)| old > oldest);
    if refill {
        *store = store.emptied();
    }
    store.retain(stays);
    // Where nothing is dropped the store is all there is to read.
    let mut all = oldest.iter().any(|&oldest| oldest > 0).then(Rows::default);
    prefix.project(replay, |rows, positions| {
        match &mut all {
            Some(all) => {
                all.reserve(slots, rows);
                all.append(rows, positions);
            }
            None => store.reserve(slots, rows),
        }
        store.append(rows, &positions.filter(stays));
    })?;
    let held = held.as_ref().map(|(rows, positions)| (rows, positions));
    for (is_new, (rows, positions)) in [(false, held), (true, new)]
        .into_iter()
        .filter_map(|(is_new, rows)| Some((is_new, rows?)))
    {
        if let Some(all) = &mut all {
            all.reserve(slots, rows);
            all.append(rows, positions);
        }
        if is_new || refill {
            store.append(rows, &positions.filter(stays));
        }
    }
    let (keys_values, beside) = match &all {
        Some(all) => {
            let (used, free) = all.bytes();
            (all.read()?, used + free)
        }
        None => (store.read()?, store.padded()),
    };
    Ok((keys_values, Filled { copied, beside }))
}
