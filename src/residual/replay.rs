//! A replay under way: what a layer reads while old entries are rebuilt and carried on.

use std::sync::Arc;

use super::{Flow, ResidualCheckpoint, Retain, fill::Filling, prefix::Prefix};
use crate::{
    cache::{CacheError, CheckedReplay, KeysValues, Projection, Replay},
    exact::whole,
    positions::{Positions, visible},
    storage::LayerStore,
};

/// Old entries on their way through the layers.
///
/// Invariant: between two layers, `prefix` has the residual of the carried tokens as it enters the next layer, or is
/// empty if no replay is under way there.
#[derive(Debug, Clone)]
pub(super) struct Rebuilding {
    prefix: Prefix,
    /// The entries of the layer that is due that its store does not have, or all: one store for all layers.
    older: LayerStore,
}

impl Default for Rebuilding {
    fn default() -> Self {
        Self {
            prefix: Prefix::default(),
            older: LayerStore::by_position(),
        }
    }
}

/// New entries and their positions.
type New<'a> = Option<(&'a Projection, &'a Positions)>;

impl ResidualCheckpoint {
    /// Everything that attention reads at a layer, the `new` entries included; carries old tokens on to the next layer.
    pub(super) fn read(
        &mut self,
        layer: usize,
        new: New<'_>,
        replay: &dyn Replay,
    ) -> Result<Option<KeysValues>, CacheError> {
        let setup = Arc::clone(&self.setup);
        let replay = &CheckedReplay {
            replay,
            shape: &setup.shape,
        };
        // A layer that drops entries puts them into the shared buffers: its store keeps the hot ones only.
        let drops =
            !self.step.complete[layer] && self.step.first_held.iter().any(|&first| first > 0);
        if self.setup.shape.slides(layer) {
            self.read_window(layer, new, replay)
        } else if self.setup.plan.rebuilds(layer) && (drops || self.resident.lacks(layer)) {
            self.rebuild(layer, new, replay).map(Some)
        } else {
            self.read_stored(layer, new, replay).map(Some)
        }
    }

    /// The old tokens as they enter `layer`; none if they do not.
    fn prefix(&mut self, layer: usize, replay: &dyn Replay) -> Result<Prefix, CacheError> {
        let (carried, plan) = (&self.step.carried, &self.setup.plan);
        let cut = self.setup.cut();
        if !self.step.flow[layer].enters {
            return Ok(Prefix::default());
        }
        match plan.retain(layer) {
            Retain::Residual => Ok(self.resident.residuals[layer].prefix(carried, cut.padded)),
            _ if layer == 0 => Prefix::embed(&self.resident.tokens, carried, cut, replay),
            _ => Ok(std::mem::take(&mut self.rebuilding.prefix)),
        }
    }

    /// Everything from a full-attention layer that holds all entries.
    fn read_stored(
        &mut self,
        layer: usize,
        new: New<'_>,
        replay: &dyn Replay,
    ) -> Result<KeysValues, CacheError> {
        let prefix = self.prefix(layer, replay)?;
        let moved = self.resident.add_entries(layer, new);
        let keys_values = self.resident.layers[layer].read()?;
        self.count(moved + prefix.bytes());
        if self.step.flow[layer].leaves {
            self.carry_on(prefix, &keys_values, replay)?;
        }
        Ok(keys_values)
    }

    /// Everything from a sliding-window layer. `None` while the layer has stored nothing.
    fn read_window(
        &mut self,
        layer: usize,
        new: New<'_>,
        replay: &dyn Replay,
    ) -> Result<Option<KeysValues>, CacheError> {
        let Flow { enters, leaves } = self.step.flow[layer];
        if enters {
            let mut prefix = self.prefix(layer, replay)?;
            let mut store = std::mem::take(&mut self.resident.layers[layer]);
            let refilled = self.resident.windows_dropped.then_some(&mut store);
            let passed = self.pass_window(layer, &mut prefix, replay, leaves, refilled);
            self.resident.layers[layer] = store;
            self.count(passed?);
            if leaves {
                self.rebuilding.prefix = prefix;
            }
        }
        let moved = self.resident.add_entries(layer, new);
        let store = &self.resident.layers[layer];
        let keys_values = match store.capacity() {
            0 => None,
            _ => Some(store.read()?),
        };
        self.count(moved + self.rebuilding.prefix.bytes());
        Ok(keys_values)
    }

    /// Carries the old tokens through a sliding-window layer. If there is a `store`, it receives the entries within the
    /// window. Returns the most bytes held meanwhile.
    fn pass_window(
        &self,
        layer: usize,
        prefix: &mut Prefix,
        replay: &dyn Replay,
        leaves: bool,
        mut store: Option<&mut LayerStore>,
    ) -> Result<usize, CacheError> {
        let shape = &self.setup.shape;
        let (window, anchor) = (shape.windows[layer], self.tracker.anchor());
        let carried = &self.step.carried;
        // What came after the anchor stays, whatever the window.
        let needed = |i: usize, key| key >= anchor[i] || visible(anchor[i], key, window);
        let (mut reach, mut grown) = (LayerStore::new(window), 0);
        let held = prefix.pass(carried, replay, leaves, &mut reach, |entries, positions| {
            if let Some(store) = &mut store {
                grown = store.append(entries, &positions.filter(needed)).max(grown);
            }
        })?;
        let (batch, chunk) = (carried.len(), self.setup.plan.chunk());
        let block = match leaves {
            true => shape.block_scratch(batch, chunk, reach.capacity()),
            false => 0,
        };
        let temporaries = shape.projection_scratch(chunk).max(block);
        // Entries are moved before a block runs, not while it does.
        Ok(prefix.bytes() + held.max(reach.held() + temporaries.max(grown)))
    }

    /// Everything from a full-attention layer that lacks old entries or drops some: rebuilt, stored and new. Afterwards
    /// the layer's store holds the hot entries.
    fn rebuild(
        &mut self,
        layer: usize,
        new: New<'_>,
        replay: &dyn Replay,
    ) -> Result<KeysValues, CacheError> {
        let prefix = self.prefix(layer, replay)?;
        let after = self.tracker.lengths_after();
        let none = vec![0; after.len()];
        let filling = Filling {
            prefix: &prefix,
            dropped: &self.resident.dropped,
            first_held: match self.step.complete[layer] {
                true => &none,
                false => &self.step.first_held,
            },
            after: &after,
            new,
            certified: self.setup.certified.then_some(&mut self.blocks),
        };
        let store = &mut self.resident.layers[layer];
        let filled = filling.fill(store, &mut self.rebuilding.older, replay)?;
        // A retained residual is already counted in `Resident::memory`.
        let carried = match self.setup.plan.retain(layer) {
            Retain::Residual => 0,
            _ => prefix.bytes(),
        };
        let chunk = self.setup.plan.chunk();
        let projection = self.setup.shape.projection_scratch(chunk);
        self.count(carried + filled.copied + projection);
        if self.step.flow[layer].leaves {
            self.carry_on(prefix, &filled.keys_values, replay)?;
        }
        Ok(filled.keys_values)
    }

    /// Carries old tokens through a block, so that they enter the next layer.
    fn carry_on(
        &mut self,
        mut prefix: Prefix,
        keys_values: &KeysValues,
        replay: &dyn Replay,
    ) -> Result<(), CacheError> {
        let longest = self.tracker.lengths_after().into_iter().max();
        let slots = whole(longest.unwrap_or(0));
        let (batch, chunk) = (self.step.carried.len(), self.setup.plan.chunk());
        prefix.advance(keys_values, self.setup.certified, replay)?;
        let block = self.setup.shape.block_scratch(batch, chunk, slots);
        self.count(prefix.bytes() + block);
        self.rebuilding.prefix = prefix;
        Ok(())
    }

    /// Counts what is held now, beside what is held between steps and the buffers that all layers share.
    fn count(&mut self, bytes: usize) {
        let held = bytes + self.rebuilding.older.held();
        self.peak.beside = self.peak.beside.max(held);
    }
}
