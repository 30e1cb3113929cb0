//! Where a forward pass runs, so that [`linear`](super::linear()) can share out products of a single row
//! at little cost. Where there is nothing to share out (another device, no feature `rayon`) the work
//! simply runs.

use burn::tensor::Device;
#[cfg(feature = "model")]
use burn::tensor::Tensor;

/// Runs `work`, a forward pass of `rows` rows on `device`, on a thread of the pool: handing every
/// product over from outside would cost two wake-ups each.
///
/// While a single row is decoded one more thread looks out for work without falling asleep, since a
/// step's products are shorter than it takes to wake a thread. It gives its core up to whoever wants
/// it.
pub(crate) fn in_pool<R: Send>(device: &Device, rows: usize, work: impl FnOnce() -> R + Send) -> R {
    #[cfg(all(feature = "flex", feature = "rayon"))]
    if *device == Device::flex() {
        return threads::run(rows == 1, work);
    }
    let _ = (device, rows);
    work()
}

/// Both results; on two threads for a single row `x`.
#[cfg(feature = "model")]
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

#[cfg(all(feature = "flex", feature = "rayon"))]
mod threads {
    use std::sync::atomic::{AtomicBool, Ordering};

    /// Runs `work` in the pool, with a second thread on the look-out where `look_out` says so.
    pub(super) fn run<R: Send>(look_out: bool, work: impl FnOnce() -> R + Send) -> R {
        let over = AtomicBool::new(false);
        rayon::scope(|scope| {
            if look_out && rayon::current_num_threads() > 1 {
                scope.spawn(|_| {
                    while !over.load(Ordering::Relaxed) {
                        if rayon::yield_now() != Some(rayon::Yield::Executed) {
                            std::thread::yield_now();
                        }
                    }
                });
            }
            // Also when `work` panics: nobody must look out for ever.
            let _end = End(&over);
            work()
        })
    }

    /// Says that a forward pass is over, when dropped.
    struct End<'a>(&'a AtomicBool);

    impl Drop for End<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
}
