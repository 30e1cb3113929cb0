//! Where a forward pass runs, so that [`linear`](super::linear()) can share out products of a single row
//! at little cost. Where there is nothing to share out (another device, no feature `rayon`) the work
//! simply runs.

use burn::tensor::{Device, Tensor};

/// Runs `work`, a forward pass on `device`, on a thread of the pool: handing every product over from
/// outside would cost two wake-ups each.
pub(crate) fn in_pool<R: Send>(device: &Device, work: impl FnOnce() -> R + Send) -> R {
    #[cfg(all(feature = "flex", feature = "rayon"))]
    if *device == Device::flex() {
        return rayon::scope(|_| work());
    }
    let _ = device;
    work()
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
