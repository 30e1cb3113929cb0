//! Where entries are stored. For authors of backends.
//!
//! * [`StepTracker`] checks the order of calls, and counts processed tokens and drafts.
//! * [`LayerStore`] holds the keys and values of one layer in slots.
//! * [`LayerStores`] combines the two: a store for every layer, one tracker, and the bytes of all.
//!
//! A backend that stores keys and values needs little else: `examples/custom_backend.rs` is one in 100 lines.
//! Sliding-window layers look after themselves here, so a backend decides about full-attention layers only.

mod contents;
mod gather;
mod layer;
mod layers;
mod saved;
mod sliding;
mod slots;
mod steps;
mod undo;

pub(crate) use self::{gather::index, slots::Slots};
pub use self::{layer::LayerStore, layers::LayerStores, steps::StepTracker};
