//! What is compared takes turns, so that it meets the same weather on a shared machine.

use std::time::{Duration, Instant};

/// Times of each of `runs`, in turn, `count` times, added up to one duration.
pub(crate) fn in_turn(
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

/// The middle one, in seconds.
pub(crate) fn median(times: &[Duration]) -> f64 {
    let mut times = times.to_vec();
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64()
}
