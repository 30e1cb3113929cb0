//! The thread on which a forward pass runs.
//!
//! On the CPU with feature `rayon` it is a thread of the pool, so that [`linear`](super::linear()) can distribute the
//! products of a single token at little cost. On another device, or without the feature, it is the calling thread.

use burn::tensor::Device;
#[cfg(feature = "model")]
use burn::tensor::Tensor;

/// Runs `work`, a forward pass of `tokens` tokens on `device`, on a thread of the pool. From a thread outside of it,
/// every product would cost two wake-ups.
///
/// While a single token is decoded, one more thread polls for work without sleeping: waking a thread takes longer
/// than the products of a step. It yields its core to any thread that needs it.
pub(crate) fn in_pool<R: Send>(
    device: &Device,
    tokens: usize,
    work: impl FnOnce() -> R + Send,
) -> R {
    #[cfg(all(feature = "flex", feature = "rayon"))]
    if *device == Device::flex() {
        return threads::run(tokens == 1, work);
    }
    let _ = (device, tokens);
    work()
}

/// Returns the results of both closures. If `x` is a single token, they run on two threads.
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

    /// Runs `work` in the pool. With `poll`, a second thread polls for work.
    pub(super) fn run<R: Send>(poll: bool, work: impl FnOnce() -> R + Send) -> R {
        let over = AtomicBool::new(false);
        rayon::scope(|scope| {
            if poll && rayon::current_num_threads() > 1 {
                scope.spawn(|_| {
                    while !over.load(Ordering::Relaxed) {
                        if rayon::yield_now() != Some(rayon::Yield::Executed) {
                            std::thread::yield_now();
                        }
                    }
                });
            }
            // Dropped also when `work` panics, so that the polling ends.
            let _end = End(&over);
            work()
        })
    }

    /// Marks the forward pass as over when it is dropped.
    struct End<'a>(&'a AtomicBool);

    impl Drop for End<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
}
