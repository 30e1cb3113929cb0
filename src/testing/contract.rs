//! What a backend claims: declared, never found out.

use std::fmt;

use burn::tensor::Device;

use crate::cache::{CacheBackend, ModelShape};

/// A budget that binds in most texts of the suite, in rows.
pub const TIGHT: usize = 8;

/// A budget that never binds, in rows: no text of the suite is longer.
pub const AMPLE: usize = 1024;

/// How a backend is built, and what it claims.
///
/// The budget is what the backend is to hold between steps in every layer that shows all keys, in rows:
/// [`TIGHT`] or [`AMPLE`]. A backend without one ignores it.
///
/// ```
/// use kv_direct::cache::{SnapKv, SnapKvConfig};
/// use kv_direct::testing::Contract;
///
/// // A prompt is cut to the budget; what comes after it stays.
/// let snap_kv = Contract::lossy(|shape, _device, budget| {
///     SnapKv::new(shape, SnapKvConfig::new(budget, 4)).expect("a budget above the window")
/// })
/// .with_rows(|budget, prompt, length| match prompt {
///     Some(prompt) => prompt.min(budget) + length - prompt,
///     None => length,
/// });
/// # let _ = snap_kv;
/// ```
pub struct Contract {
    make: Box<Make>,
    rows: Box<Rows>,
    pub(super) lossless: bool,
    pub(super) rebuilds: bool,
    pub(super) turns_keys: bool,
    pub(super) sessions: bool,
    pub(super) parks: bool,
    pub(super) reach: Reach,
    windows: bool,
}

type Make = dyn Fn(&ModelShape, &Device, usize) -> Box<dyn CacheBackend>;
type Rows = dyn Fn(usize, Option<usize>, usize) -> usize;

/// Which truncations must not be refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reach {
    /// To every length.
    Everywhere,
    /// To where the last call began, and where nothing was dropped further.
    LastCall,
    /// Only where nothing was dropped.
    NothingDropped,
    /// None but to 0 and to the end.
    Nowhere,
}

impl Contract {
    /// A backend whose every logit, key and value has the bits of [`FullKv`](crate::cache::FullKv),
    /// whatever its budget and however a text is split into calls, and whose last call can be undone.
    #[must_use]
    pub fn lossless<C, F>(make: F) -> Self
    where
        C: CacheBackend + 'static,
        F: Fn(&ModelShape, &Device, usize) -> C + 'static,
    {
        Self {
            make: Box::new(move |shape, device, budget| Box::new(make(shape, device, budget))),
            rows: Box::new(|_, _, length| length),
            lossless: true,
            rebuilds: false,
            turns_keys: false,
            sessions: true,
            parks: false,
            reach: Reach::LastCall,
            windows: true,
        }
    }

    /// A backend that holds no more rows than its budget, and has the bits of
    /// [`FullKv`](crate::cache::FullKv) as long as it dropped none.
    #[must_use]
    pub fn lossy<C, F>(make: F) -> Self
    where
        C: CacheBackend + 'static,
        F: Fn(&ModelShape, &Device, usize) -> C + 'static,
    {
        Self {
            lossless: false,
            rows: Box::new(|budget, _, _| budget),
            reach: Reach::NothingDropped,
            ..Self::lossless(make)
        }
    }

    /// The most rows of keys and values stored between steps for each KV head of a layer that shows all
    /// keys, if that is not the budget (of a lossless backend: all): `most(budget, prompt, length)` for
    /// a batch row of `length` tokens whose prompt, once it is over, was that long.
    #[must_use]
    pub fn with_rows(
        mut self,
        most: impl Fn(usize, Option<usize>, usize) -> usize + 'static,
    ) -> Self {
        self.rows = Box::new(most);
        self
    }

    /// What the backend keeps it does not store as it is: the report's `keys_values` may be less than
    /// the rows a next query reads.
    #[must_use]
    pub const fn with_rebuilt_rows(mut self) -> Self {
        self.rebuilds = true;
        self
    }

    /// Keys may be shown turned to another position than they came in with.
    #[must_use]
    pub const fn with_turned_keys(mut self) -> Self {
        self.turns_keys = true;
        self
    }

    /// No truncation is ever refused.
    #[must_use]
    pub const fn with_every_truncation(mut self) -> Self {
        self.reach = Reach::Everywhere;
        self
    }

    /// A truncation may be refused even where nothing was dropped.
    #[must_use]
    pub const fn with_no_truncation(mut self) -> Self {
        self.reach = Reach::Nowhere;
        self
    }

    /// The backend has a floor of memory to which it can be parked.
    #[must_use]
    pub const fn with_parking(mut self) -> Self {
        self.parks = true;
        self
    }

    /// The backend leaves drafts, states and the choice of rows to the trait's own methods, which refuse
    /// them.
    #[must_use]
    pub const fn without_sessions(mut self) -> Self {
        self.sessions = false;
        self
    }

    /// The backend refuses models in which a layer has a window, when it is built.
    #[must_use]
    pub const fn without_windows(mut self) -> Self {
        self.windows = false;
        self
    }

    pub(super) fn serves(&self, shape: &ModelShape) -> bool {
        self.windows || shape.windows.iter().all(Option::is_none)
    }

    pub(super) fn build(
        &self,
        shape: &ModelShape,
        device: &Device,
        budget: usize,
    ) -> Box<dyn CacheBackend> {
        (self.make)(shape, device, budget)
    }

    pub(super) fn rows(&self, budget: usize, prompt: Option<usize>, length: usize) -> usize {
        (self.rows)(budget, prompt, length).min(length)
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
