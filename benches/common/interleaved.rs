//! Runs are interleaved, so that other load on the machine affects all alike.

use std::time::{Duration, Instant};

use criterion::{Criterion, SamplingMode};

use super::limits::Limits;

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

/// The medians of what `run` returns for each index below `count`, in seconds. Criterion says how often they run, in
/// turn; `limits` are measured before every sample. Nothing where this bench is not asked for.
pub(crate) fn medians(
    criterion: &mut Criterion,
    (group, name): (&str, &str),
    limits: &mut Limits,
    count: usize,
    mut run: impl FnMut(usize) -> Duration,
) -> Option<Vec<f64>> {
    limits.forget();
    let mut times = vec![Vec::new(); count];
    let mut group = criterion.benchmark_group(group);
    group.sampling_mode(SamplingMode::Flat).sample_size(10);
    group.warm_up_time(Duration::from_millis(100));
    group.measurement_time(Duration::from_secs(1));
    group.bench_function(name, |bencher| {
        bencher.iter_custom(|rounds| {
            limits.measure();
            let mut all = Duration::ZERO;
            for _ in 0..rounds {
                for (index, times) in times.iter_mut().enumerate() {
                    times.push(run(index));
                    all += times[times.len() - 1];
                }
            }
            all
        });
    });
    group.finish();
    let ran = times.iter().all(|times| !times.is_empty());
    ran.then(|| times.iter().map(|times| median(times)).collect())
}

/// The time of `work`.
pub(crate) fn timed<R>(work: impl FnOnce() -> R) -> Duration {
    let start = Instant::now();
    work();
    start.elapsed()
}

/// The time of `work` on a thread of the pool, where the decoder runs its steps.
pub(crate) fn timed_in_pool(work: impl FnOnce() + Send) -> Duration {
    rayon::scope(|_| timed(work))
}
