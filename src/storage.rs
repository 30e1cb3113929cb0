//! Where entries are stored. For authors of backends.
//!
//! * [`LayerStores`] stores keys and values in slots, layer by layer. It is a complete
//!   [`CacheBackend`](crate::cache::CacheBackend) that evicts nothing. A backend around it adds rules of its own:
//!   `examples/custom_backend.rs` is one in 70 lines.
//! * [`StepTracker`] checks the order of calls, and counts processed tokens and drafts. It is for a backend that stores
//!   something else than keys and values.
//!
//! This module evicts in sliding-window layers itself. A backend decides about full-attention layers only.

mod buffers;
mod contents;
mod gather;
mod layer;
mod layers;
mod saved;
mod sequence;
mod sliding;
mod slots;
mod steps;
mod undo;

pub(crate) use self::{
    layer::{LayerStore, newest_slots},
    slots::Slots,
};
pub use self::{layers::LayerStores, steps::StepTracker};
