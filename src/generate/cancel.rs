//! Ending a generation from another thread.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

/// Ends a [`Generation`](super::Generation) from another thread. Clones are one switch.
///
/// ```
/// use kv_direct::generate::Cancel;
///
/// let cancel = Cancel::new();
/// let other = cancel.clone();
/// std::thread::spawn(move || other.cancel()).join().unwrap();
/// assert!(cancel.is_cancelled());
/// ```
#[derive(Debug, Clone, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// A switch that is off.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Switches it on, for good.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether it is on.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
