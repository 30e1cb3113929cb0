//! Runs are interleaved, so that other load on the machine affects all alike.

use std::time::{Duration, Instant};

/// Calls `run` with each index of `times` in turn, `count` times. Adds each time to its list, and returns their sum.
pub(crate) fn interleaved(
    count: u64,
    times: &mut [Vec<Duration>],
    mut run: impl FnMut(usize),
) -> Duration {
    let mut all = Duration::ZERO;
    for _ in 0..count {
        for (index, times) in times.iter_mut().enumerate() {
            let start = Instant::now();
            run(index);
            let time = start.elapsed();
            times.push(time);
            all += time;
        }
    }
    all
}

/// The median, in seconds.
pub(crate) fn median(times: &[Duration]) -> f64 {
    let mut times = times.to_vec();
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64()
}
