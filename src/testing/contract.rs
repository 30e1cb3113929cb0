//! What a backend claims. Claims are declared, never detected.

use std::fmt;

use burn::tensor::Device;

use crate::cache::{CacheBackend, ModelShape};

/// A budget, in entries, that most texts of the suite exceed.
pub(super) const TIGHT: usize = 8;

/// A budget, in entries, that no text of the suite exceeds.
pub(super) const AMPLE: usize = 1024;

/// How a backend is built, and what it claims.
///
/// The budget is the number of entries that the backend may hold between steps in every full-attention layer:
/// 8 or 1,024. A backend without a budget ignores it.
///
/// ```
/// use kv_direct::policy::{SnapKv, SnapKvConfig};
/// use kv_direct::testing::Contract;
///
/// // Entries of a prompt are evicted down to the budget; those after the prompt stay.
/// let snap_kv = Contract::lossy(|shape, _device, budget| {
///     SnapKv::new(shape, SnapKvConfig::new(budget, 4)).expect("a budget above the window")
/// })
/// .with_most_entries(|budget, prompt, length| match prompt {
///     Some(prompt) => prompt.min(budget) + length - prompt,
///     None => length,
/// });
/// # let _ = snap_kv;
/// ```
pub struct Contract {
    make: Box<Make>,
    most_entries: Box<MostEntries>,
    pub(super) lossless: bool,
    pub(super) rebuilds: bool,
    pub(super) rotates_keys: bool,
    pub(super) drafts: bool,
    pub(super) states: bool,
    pub(super) selection: bool,
    pub(super) parks: bool,
    pub(super) reach: Reach,
    sliding_windows: bool,
}

type Make = dyn Fn(&ModelShape, &Device, usize) -> Box<dyn CacheBackend>;
type MostEntries = dyn Fn(usize, Option<usize>, usize) -> usize;

/// The truncations that must not be refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reach {
    /// To every length.
    Everywhere,
    /// To the beginning of the last step, and to every length if nothing was evicted.
    LastStep,
    /// To every length, but only if nothing was evicted.
    NothingEvicted,
    /// Only to 0 and to the present length.
    Nowhere,
}

impl Contract {
    /// A backend whose logits, keys and values have the bits of [`FullKv`](crate::FullKv), with any budget and
    /// however a text is split into steps. Its last step can be undone.
    #[must_use]
    pub fn lossless<C, F>(make: F) -> Self
    where
        C: CacheBackend + 'static,
        F: Fn(&ModelShape, &Device, usize) -> C + 'static,
    {
        Self {
            make: Box::new(move |shape, device, budget| Box::new(make(shape, device, budget))),
            most_entries: Box::new(|_, _, length| length),
            lossless: true,
            rebuilds: false,
            rotates_keys: false,
            drafts: true,
            states: true,
            selection: true,
            parks: false,
            reach: Reach::LastStep,
            sliding_windows: true,
        }
    }

    /// A backend that holds no more entries than its budget. It has the bits of [`FullKv`](crate::FullKv) as long as
    /// it evicted none.
    #[must_use]
    pub fn lossy<C, F>(make: F) -> Self
    where
        C: CacheBackend + 'static,
        F: Fn(&ModelShape, &Device, usize) -> C + 'static,
    {
        Self {
            lossless: false,
            most_entries: Box::new(|budget, _, _| budget),
            reach: Reach::NothingEvicted,
            ..Self::lossless(make)
        }
    }

    /// Sets the most entries that each KV head of a full-attention layer stores between steps. By default that is the
    /// budget, or all entries for a lossless backend.
    ///
    /// `most(budget, prompt, length)` is called for a sequence of `length` tokens. `prompt` is the length of its
    /// prompt, once the prompt is complete.
    #[must_use]
    pub fn with_most_entries(
        mut self,
        most: impl Fn(usize, Option<usize>, usize) -> usize + 'static,
    ) -> Self {
        self.most_entries = Box::new(most);
        self
    }

    /// Entries may be rebuilt instead of stored. `keys_values` in the memory report may then be less than the bytes
    /// of the entries that a next query reads.
    #[must_use]
    pub const fn with_rebuilt_entries(mut self) -> Self {
        self.rebuilds = true;
        self
    }

    /// Keys may be returned rotated to another position than the one they were stored with.
    #[must_use]
    pub const fn with_rotated_keys(mut self) -> Self {
        self.rotates_keys = true;
        self
    }

    /// No truncation is ever refused.
    #[must_use]
    pub const fn with_every_truncation(mut self) -> Self {
        self.reach = Reach::Everywhere;
        self
    }

    /// A truncation may be refused even if nothing was evicted.
    #[must_use]
    pub const fn without_truncation(mut self) -> Self {
        self.reach = Reach::Nowhere;
        self
    }

    /// The backend can be parked, which reduces its memory.
    #[must_use]
    pub const fn with_parking(mut self) -> Self {
        self.parks = true;
        self
    }

    /// The backend leaves drafts to the trait, which refuses them.
    #[must_use]
    pub const fn without_drafts(mut self) -> Self {
        self.drafts = false;
        self
    }

    /// The backend leaves states to the trait, which refuses them.
    #[must_use]
    pub const fn without_states(mut self) -> Self {
        self.states = false;
        self
    }

    /// The backend leaves the selection of sequences to the trait, which refuses it.
    #[must_use]
    pub const fn without_selection(mut self) -> Self {
        self.selection = false;
        self
    }

    /// [`without_drafts`](Self::without_drafts), [`without_states`](Self::without_states) and
    /// [`without_selection`](Self::without_selection).
    #[must_use]
    pub const fn without_provided_methods(self) -> Self {
        self.without_drafts().without_states().without_selection()
    }

    /// The backend cannot be built for a model with sliding-window layers.
    #[must_use]
    pub const fn without_sliding_windows(mut self) -> Self {
        self.sliding_windows = false;
        self
    }

    /// Whether the backend can be built for a model of this shape.
    pub(super) fn serves(&self, shape: &ModelShape) -> bool {
        self.sliding_windows || shape.windows.iter().all(Option::is_none)
    }

    pub(super) fn build(
        &self,
        shape: &ModelShape,
        device: &Device,
        budget: usize,
    ) -> Box<dyn CacheBackend> {
        (self.make)(shape, device, budget)
    }

    /// The most entries in each KV head of a full-attention layer; see
    /// [`with_most_entries`](Self::with_most_entries).
    pub(super) fn most_entries(
        &self,
        budget: usize,
        prompt: Option<usize>,
        length: usize,
    ) -> usize {
        (self.most_entries)(budget, prompt, length).min(length)
    }
}

impl fmt::Debug for Contract {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Contract")
            .field("lossless", &self.lossless)
            .field("reach", &self.reach)
            .finish_non_exhaustive()
    }
}
