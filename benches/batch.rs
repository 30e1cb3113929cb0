//! Steps of several sequences beside those of one, and sequences of unequal length beside what each costs alone.
//!
//! `cargo bench --bench batch`, with `KV_DIRECT_MODELS` naming a folder of model folders, measures
//! SmolLM2-135M-Instruct; without it random weights of its shape take its place. `-- steps` or `-- unequal` runs one
//! part. Runs are interleaved.

mod common;

use std::{hint::black_box, time::Duration};

use common::{
    interleaved::{median, medians, timed},
    limits::Limits,
    measuring, prefill, sizes, smollm2, wanted,
    work::{bytes_of_step, operations_of_step},
};
use criterion::{Criterion, criterion_group, criterion_main};
use kv_direct::{
    cache::CacheBackend,
    model::{Decoder, Input},
    policy::FullKv,
};

/// Tokens of every sequence of equal length.
const CONTEXT: usize = 256;
/// Short sequences beside the long one.
const SHORT: usize = 15;

/// One-token steps of sequences of equal length.
fn steps(criterion: &mut Criterion) {
    if !wanted("steps") {
        return;
    }
    let (name, decoder) = smollm2();
    let counts = sizes(&[1, 2, 4, 8, 16, 32]);
    let mut one = FullKv::new(&decoder.shape());
    prefill(&decoder, &mut one, CONTEXT);
    let mut caches: Vec<_> = counts.iter().map(|_| one.fork()).collect();
    for (cache, &count) in caches.iter_mut().zip(counts) {
        cache
            .select_sequences(&vec![0; count])
            .expect("copies of it");
        // The first step copies what is still shared.
        undone(&decoder, cache.as_mut());
    }
    let mut limits = Limits::new();
    let all = counts.len();
    let times = medians(criterion, ("steps", name), &mut limits, all, |index| {
        undone(&decoder, caches[index].as_mut())
    });
    let Some(times) = times else { return };
    for (&count, time) in counts.iter().zip(&times) {
        let read = bytes_of_step(&decoder, count, CONTEXT) as f64 / limits.read_rate();
        let operations = operations_of_step(&decoder, count, CONTEXT) as f64;
        println!(
            "steps, {name}, {count} sequences of {CONTEXT} tokens: {:.2} ms, {:.2} of one sequence; at the read rate \
             {:.2} of it, at the matrix rate {:.2}",
            time * 1e3,
            time / times[0],
            read / time,
            operations / limits.matrix_rate() / time,
        );
    }
    println!();
}

/// A long sequence beside short ones. Runs a few times in turn, without criterion: it takes long.
fn unequal(_: &mut Criterion) {
    if !wanted("unequal") {
        return;
    }
    let (name, decoder) = smollm2();
    let (long, rounds) = if measuring() { (2000, 3) } else { (100, 1) };
    let mut lengths = vec![10; SHORT];
    lengths.insert(0, long);
    let (mut prompts, mut steps) = ([const { Vec::new() }; 3], [const { Vec::new() }; 3]);
    for _ in 0..rounds {
        for (index, lengths) in [&lengths[..], &[long], &[10]].into_iter().enumerate() {
            let mut cache = FullKv::new(&decoder.shape());
            prompts[index].push(timed(|| prompt(&decoder, &mut cache, lengths)));
            undone(&decoder, &mut cache);
            steps[index].extend((0..8).map(|_| undone(&decoder, &mut cache)));
        }
    }
    for (what, times) in [("prompts", prompts), ("steps", steps)] {
        let [together, long, short] = times.map(|times| median(&times));
        println!(
            "unequal {what}, {name}, {lengths:?} tokens: {:.2} ms, {:.2} of their sum alone, {:.2} of the long one alone",
            together * 1e3,
            together / (long + SHORT as f64 * short),
            together / long,
        );
    }
    println!();
}

/// Processes arbitrary tokens, of each sequence as many as `lengths` says.
fn prompt(decoder: &Decoder, cache: &mut dyn CacheBackend, lengths: &[usize]) {
    let tokens: Vec<Vec<u32>> = lengths.iter().map(|&length| vec![7; length]).collect();
    let input = Input::from(tokens).last_only();
    black_box(decoder.forward(input, cache).expect("it fits").into_data());
}

/// The time of a step of one token in each sequence, which is then undone.
fn undone(decoder: &Decoder, cache: &mut dyn CacheBackend) -> Duration {
    let lengths = cache.lengths().to_vec();
    let time = timed(|| prompt(decoder, cache, &vec![1; lengths.len()]));
    cache.truncate(&lengths).expect("the last step");
    time
}

criterion_group!(benches, steps, unequal);
criterion_main!(benches);
