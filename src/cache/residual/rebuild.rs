//! What a [`ResidualCheckpoint`] answers at a layer, old rows rebuilt and carried on.

use super::{Old, ResidualCheckpoint, fill::Filling, plan::Flow, prefix::Prefix};
use crate::{
    cache::{CacheError, KeysValues, Projection, Replay, rows::Rows},
    positions::{Positions, visible},
};

/// Rows and the positions they have.
type Placed<'a> = Option<(&'a Projection, &'a Positions)>;

impl ResidualCheckpoint {
    /// All rows of a layer, the `new` ones among them, if there are any; old rows on their way through the layers are
    /// taken on.
    pub(super) fn answer(
        &mut self,
        layer: usize,
        new: Placed<'_>,
        replay: &dyn Replay,
    ) -> Result<Option<KeysValues>, CacheError> {
        let drops = !self.turn.whole[layer] && self.turn.oldest.iter().any(|&rows| rows > 0);
        if self.shape.slides(layer) {
            self.slide(layer, new, replay)
        } else if self.plan.rebuilds(layer) && (drops || self.lacks(layer)) {
            self.rebuild(layer, new, replay).map(Some)
        } else {
            self.keep(layer, new, replay).map(Some)
        }
    }

    /// The old rows as they enter `layer`; none where they do not.
    fn prefix(&mut self, layer: usize, replay: &dyn Replay) -> Result<Prefix, CacheError> {
        let (carried, chunk) = (&self.turn.carried, self.plan.chunk());
        if !self.turn.flow[layer].enters {
            return Ok(Prefix::default());
        }
        match self.plan.old(layer) {
            Old::Residual => Ok(self.residuals[layer].prefix(carried)),
            _ if layer == 0 => Prefix::embed(&self.tokens, carried, chunk, replay),
            _ => Ok(std::mem::take(&mut self.replaying)),
        }
    }

    /// All rows of a layer that holds them.
    fn keep(
        &mut self,
        layer: usize,
        new: Placed<'_>,
        replay: &dyn Replay,
    ) -> Result<KeysValues, CacheError> {
        let prefix = self.prefix(layer, replay)?;
        let rows = &mut self.layers[layer];
        let moved = new.map_or(0, |(new, positions)| rows.append(new, positions));
        let beside = rows.padded();
        let keys_values = rows.read()?;
        self.count(moved + beside + prefix.bytes());
        if self.turn.flow[layer].leaves {
            self.carry_on(prefix, &keys_values, beside, replay)?;
        }
        Ok(keys_values)
    }

    /// All rows of a layer with a window; none where it shows nothing but what is new, and nothing is.
    fn slide(
        &mut self,
        layer: usize,
        new: Placed<'_>,
        replay: &dyn Replay,
    ) -> Result<Option<KeysValues>, CacheError> {
        let Flow { enters, leaves: on } = self.turn.flow[layer];
        if enters {
            let mut prefix = self.prefix(layer, replay)?;
            let mut store = std::mem::take(&mut self.layers[layer]);
            let stored = self.emptied.then_some(&mut store);
            let passed = self.pass(layer, &mut prefix, replay, on, stored);
            self.layers[layer] = store;
            self.count(passed?);
            if on {
                self.replaying = prefix;
            }
        }
        let store = &mut self.layers[layer];
        let moved = new.map_or(0, |(new, positions)| store.append(new, positions));
        let keys_values = match store.capacity() {
            0 => None,
            _ => Some(store.read()?),
        };
        self.count(moved + self.replaying.bytes());
        Ok(keys_values)
    }

    /// Takes the carried rows through a layer with a window; those that it shows go into `store` where there is
    /// one. Answers the most bytes held meanwhile.
    pub(super) fn pass(
        &self,
        layer: usize,
        prefix: &mut Prefix,
        replay: &dyn Replay,
        on: bool,
        mut store: Option<&mut Rows>,
    ) -> Result<usize, CacheError> {
        let (window, anchor) = (self.shape.windows[layer], self.progress.anchor());
        let carried = &self.turn.carried;
        // What came since then stays whatever the window shows.
        let needed = |row: usize, key| key >= anchor[row] || visible(anchor[row], key, window);
        let (mut reach, mut grown) = (Rows::new(window), 0);
        let held = prefix.pass(carried, replay, on, &mut reach, |rows, positions| {
            if let Some(store) = &mut store {
                grown = store.append(rows, &positions.filter(needed)).max(grown);
            }
        })?;
        let (batch, chunk) = (carried.len(), self.plan.chunk());
        let block = match on {
            true => self.shape.block_scratch(batch, chunk, reach.capacity()),
            false => 0,
        };
        let temporaries = self.shape.projection_scratch(batch, chunk).max(block);
        let (used, free) = reach.bytes();
        // Rows are moved before a block runs, not while it does.
        Ok(prefix.bytes() + held.max(used + free + temporaries.max(grown)))
    }

    /// All rows of a layer without a window that lacks old ones or lets some go: rebuilt, exact, new. Then the
    /// layer's store holds the newest rows, and the replay stands before the next layer.
    fn rebuild(
        &mut self,
        layer: usize,
        new: Placed<'_>,
        replay: &dyn Replay,
    ) -> Result<KeysValues, CacheError> {
        let prefix = self.prefix(layer, replay)?;
        let after = self.progress.lengths_after();
        let none = vec![0; after.len()];
        let filling = Filling {
            prefix: &prefix,
            dropped: &self.dropped,
            oldest: match self.turn.whole[layer] {
                true => &none,
                false => &self.turn.oldest,
            },
            after: &after,
            new,
            certified: self.certified.then_some(&mut self.blocks),
        };
        let filled = filling.fill(&mut self.layers[layer], &mut self.answer_rows, replay)?;
        // What the plan keeps is counted there.
        let carried = match self.plan.old(layer) {
            Old::Residual => 0,
            _ => prefix.bytes(),
        };
        let projection = self
            .shape
            .projection_scratch(after.len(), self.plan.chunk());
        let temporaries = filled.copied + projection;
        self.count(carried + filled.beside + temporaries);
        if self.turn.flow[layer].leaves {
            self.carry_on(prefix, &filled.keys_values, filled.beside, replay)?;
        }
        Ok(filled.keys_values)
    }

    /// Takes carried rows through a block, so that they enter the next layer; `beside` is what is held beside
    /// them.
    fn carry_on(
        &mut self,
        mut prefix: Prefix,
        keys_values: &KeysValues,
        beside: usize,
        replay: &dyn Replay,
    ) -> Result<(), CacheError> {
        let slots = keys_values.positions().width();
        let (batch, chunk) = (self.turn.carried.len(), self.plan.chunk());
        prefix.advance(keys_values, replay)?;
        self.count(prefix.bytes() + beside + self.shape.block_scratch(batch, chunk, slots));
        self.replaying = prefix;
        Ok(())
    }

    /// Takes note of what is held on top of the rest now, beside the buffers that are shared by all layers.
    fn count(&mut self, bytes: usize) {
        let (used, free) = self.answer_rows.bytes();
        self.scratch_peak = self.scratch_peak.max(bytes + used + free);
    }
}
