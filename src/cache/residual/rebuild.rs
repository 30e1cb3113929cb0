//! What a step of a [`ResidualCheckpoint`] answers at a layer, old rows rebuilt and carried on.

use super::{
    Floor, ResidualCheckpoint,
    prefix::{CHUNK, Prefix, projection_bytes},
};
use crate::{
    cache::{CacheError, KeysValues, Span, rows::Rows},
    exact::PIECE,
    positions::visible,
};

impl ResidualCheckpoint {
    /// Whether the open step carries old rows through `layer`, and whether it carries them on to the next.
    fn replays(&self, layer: usize) -> (bool, bool) {
        let last = if self.emptied {
            self.shape.layers().checked_sub(1)
        } else {
            self.shape.windows.iter().rposition(Option::is_none)
        };
        let any = self.floor == Floor::Tokens && self.old.iter().any(|&rows| rows > 0);
        let last = last.filter(|_| any);
        (
            last.is_some_and(|last| layer <= last),
            last.is_some_and(|last| layer < last),
        )
    }

    /// The old rows as they enter `layer`.
    fn prefix(&mut self, layer: usize, span: &Span<'_>) -> Result<Prefix, CacheError> {
        match self.floor {
            Floor::Tokens if layer == 0 => Prefix::embed(&self.tokens, &self.old, span.replay),
            Floor::Tokens => Ok(std::mem::take(&mut self.replaying)),
            Floor::Residuals => Ok(self.residuals[layer].prefix(&self.old)),
        }
    }

    /// All rows of a layer with a window; on the way a replay passes through it.
    pub(super) fn slide(
        &mut self,
        layer: usize,
        span: &Span<'_>,
    ) -> Result<KeysValues, CacheError> {
        let mut replayed = 0;
        if let (true, on) = self.replays(layer) {
            let mut prefix = self.prefix(layer, span)?;
            let (window, store) = (self.shape.windows[layer], &mut self.layers[layer]);
            let needed = |row: usize, key| visible(self.progress.length(row), key, window);
            let mut reach = store.emptied();
            let held = prefix.pass(&self.old, span.replay, on, &mut reach, |rows, positions| {
                if self.emptied {
                    store.append(rows, &positions.filter(needed));
                }
            })?;
            let batch = self.old.len();
            let block = span.replay.scratch(batch, CHUNK, reach.capacity());
            let temporaries = projection_bytes(batch, &self.shape).max(block);
            replayed = prefix.bytes() + held + temporaries;
            if on {
                self.replaying = prefix;
            }
        }
        let store = &mut self.layers[layer];
        let moved = store.append(span.projection, span.positions);
        self.scratch_peak = self.scratch_peak.max(moved.max(replayed));
        store.read()
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
        let slots = after
            .iter()
            .copied()
            .max()
            .unwrap_or(0)
            .next_multiple_of(PIECE);
        let mut all = Rows::with_slots(slots, span.projection);
        let oldest: Vec<usize> = after.iter().map(|n| n.saturating_sub(self.hot)).collect();
        let stays = |row: usize, position: usize| position >= oldest[row];
        let store = &mut self.layers[layer];
        let (copied, _) = store.bytes();
        let held = store.ordered();
        // After a truncation the store is short of rows, and rebuilt ones fill it up again: all of it
        // is then stored anew in rising order, because a store that holds every row is read as it is.
        let refill = self
            .old
            .iter()
            .zip(&oldest)
            .any(|(old, oldest)| old > oldest);
        if refill {
            *store = store.emptied();
        }
        store.retain(stays);
        prefix.project(span.replay, |rows, positions| {
            all.append(rows, positions);
            store.append(rows, &positions.filter(stays));
        })?;
        if let Some((rows, positions)) = held {
            all.append(&rows, &positions);
            if refill {
                store.append(&rows, &positions.filter(stays));
            }
        }
        all.append(span.projection, span.positions);
        store.append(span.projection, &span.positions.filter(stays));

        let batch = after.len();
        let (used, free) = all.bytes();
        let keys_values = all.read()?;
        drop(all);
        let mut temporaries = copied + projection_bytes(batch, &self.shape);
        let mut carried = 0;
        if self.floor == Floor::Tokens {
            carried = prefix.bytes();
            if let (_, true) = self.replays(layer) {
                temporaries = temporaries.max(span.replay.scratch(batch, CHUNK, slots));
                prefix.advance(&keys_values, span.replay)?;
                self.replaying = prefix;
            }
        }
        self.scratch_peak = self.scratch_peak.max(used + free + carried + temporaries);
        Ok(keys_values)
    }
}
