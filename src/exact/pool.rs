//! Where a forward pass runs, so that [`linear`](super::linear()) can share out products of a single row
//! at little cost. Where there is nothing to share out (another device, no feature `rayon`) the work
//! simply runs.

#[cfg(all(feature = "flex", feature = "rayon"))]
use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use burn::tensor::{Device, Tensor};

/// Runs `work`, a forward pass of `rows` rows on `device`, on a thread of the pool: handing every
/// product over from outside would cost two wake-ups each.
///
/// While a single row is decoded one more thread looks out for work without falling asleep, since a
/// step's products are shorter than it takes to wake a thread. It gives its core up to whoever wants
/// it.
pub(crate) fn in_pool<R: Send>(device: &Device, rows: usize, work: impl FnOnce() -> R + Send) -> R {
    #[cfg(all(feature = "flex", feature = "rayon"))]
    if *device == Device::flex() {
        return rayon::scope(|scope| {
            let over = Arc::new(Over::default());
            if rows == 1 && rayon::current_num_threads() > 1 {
                let over = Arc::clone(&over);
                scope.spawn(move |_| over.look_out());
            }
            // Also when `work` panics: nobody must look out for ever.
            let _end = End(over);
            work()
        });
    }
    let _ = (device, rows);
    work()
}

/// Whether a forward pass has ended.
#[cfg(all(feature = "flex", feature = "rayon"))]
#[derive(Default)]
struct Over(AtomicBool);

#[cfg(all(feature = "flex", feature = "rayon"))]
impl Over {
    /// Does the pool's work as it comes, until the pass has ended.
    fn look_out(&self) {
        while !self.0.load(Ordering::Relaxed) {
            if rayon::yield_now() != Some(rayon::Yield::Executed) {
                std::thread::yield_now();
            }
        }
    }
}

#[cfg(all(feature = "flex", feature = "rayon"))]
struct End(Arc<Over>);

#[cfg(all(feature = "flex", feature = "rayon"))]
impl Drop for End {
    fn drop(&mut self) {
        self.0.0.store(true, Ordering::Relaxed);
    }
}

/// Both results; on two threads for a single row `x`.
pub(crate) fn both<A: Send, B: Send>(
    x: &Tensor<3>,
    one: impl FnOnce() -> A + Send,
    other: impl FnOnce() -> B + Send,
) -> (A, B) {
    #[cfg(all(feature = "flex", feature = "rayon"))]
    if x.dims()[..2] == [1, 1] && x.device() == Device::flex() {
        return rayon::join(one, other);
    }
    let _ = x;
    (one(), other())
}
