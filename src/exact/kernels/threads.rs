//! Work shared out to threads. No number of threads changes a bit: shares are independent of one another.

/// Threads that can work at once.
pub(crate) fn count() -> usize {
    #[cfg(feature = "rayon")]
    return rayon::current_num_threads();
    #[cfg(not(feature = "rayon"))]
    1
}

/// Runs both, at the same time where a thread is free.
pub(crate) fn join(one: impl FnOnce() + Send, other: impl FnOnce() + Send) {
    #[cfg(feature = "rayon")]
    rayon::join(one, other);
    #[cfg(not(feature = "rayon"))]
    {
        one();
        other();
    }
}

/// Runs `work` over chunks of `size` elements of `data`, with the index of each chunk.
pub(crate) fn chunks<T: Send>(data: &mut [T], size: usize, work: impl Fn(usize, &mut [T]) + Sync) {
    #[cfg(feature = "rayon")]
    {
        use rayon::prelude::*;
        let chunks = data.par_chunks_mut(size).enumerate();
        chunks.for_each(|(index, chunk)| work(index, chunk));
    }
    #[cfg(not(feature = "rayon"))]
    for (index, chunk) in data.chunks_mut(size).enumerate() {
        work(index, chunk);
    }
}
