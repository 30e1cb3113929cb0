//! The thread on which a forward pass runs.
//!
//! On the CPU with feature `rayon` it is a thread of the pool, so that kernels share their work out to the other
//! threads at little cost. On another device, or without the feature, it is the calling thread.

use burn::tensor::Device;

/// Runs `work`, a forward pass on `device`, on a thread of the pool. From a thread outside of it, every product would
/// cost two wake-ups.
pub(crate) fn in_pool<R: Send>(device: &Device, work: impl FnOnce() -> R + Send) -> R {
    #[cfg(all(feature = "flex", feature = "rayon"))]
    if *device == Device::flex() {
        return rayon::scope(|_| work());
    }
    let _ = device;
    work()
}
