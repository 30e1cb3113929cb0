//! Speed of one-token decode steps against the rate at which this machine reads memory.
//!
//! `cargo bench --bench decode`, with `KV_DIRECT_MODELS` naming a folder of
//! model folders, measures SmolLM2-135M-Instruct; without it a small random decoder takes its place.
//!
//! A step reads every weight once, so the limit is how fast memory is read. That rate is measured
//! between the decode samples.

mod common;

use std::time::Duration;

use common::{
    interleaved::median, limits::Memory, model, prefill, random_decoder, undone_step,
    work::bytes_of_step,
};
use criterion::{Criterion, SamplingMode, Throughput, criterion_group, criterion_main};
use kv_direct::{
    cache::CacheBackend,
    policy::FullKv,
    residual::{Plan, ResidualCheckpoint},
};

/// Tokens in the cache when a measured step starts.
const CONTEXT: usize = 512;

/// Decode steps at [`CONTEXT`] tokens of `FullKv`, and the plain line.
fn decode(criterion: &mut Criterion) {
    let (name, decoder) = model();
    let mut cache = FullKv::new(&decoder.shape());
    prefill(&decoder, &mut cache, CONTEXT);
    // The first step may make the buffers grow.
    undone_step(&decoder, &mut cache, CONTEXT);

    let memory = Memory::new();
    let (mut steps, mut reads) = (Vec::new(), Vec::new());
    let mut group = criterion.benchmark_group("decode");
    group.sampling_mode(SamplingMode::Flat).sample_size(15);
    group.measurement_time(Duration::from_secs(15));
    group.throughput(Throughput::Elements(1));
    group.bench_function(name, |bencher| {
        bencher.iter_custom(|count| {
            let before = steps.len();
            reads.push(memory.read());
            steps.extend((0..count).map(|_| undone_step(&decoder, &mut cache, CONTEXT)));
            reads.push(memory.read());
            steps[before..].iter().sum()
        });
    });
    group.finish();

    if steps.is_empty() {
        return;
    }
    let bytes = bytes_of_step(&decoder, 1, CONTEXT);
    let achieved = bytes as f64 / median(&steps) / 1e9;
    let limit = Memory::BYTES as f64 / median(&reads) / 1e9;
    println!(
        "decode {name}: {:.1} tokens/s, {bytes} bytes a token, {achieved:.1} GB/s of {limit:.1} GB/s \
         read rate, ratio {:.2}\n",
        1.0 / median(&steps),
        achieved / limit,
    );
}

/// What rebuilding costs: 16 hot tokens of 128 against `FullKv`, step by step in turn.
fn residual(criterion: &mut Criterion) {
    const HELD: usize = 128;
    let decoder = random_decoder();
    let shape = decoder.shape();
    let residual = ResidualCheckpoint::new(
        &shape,
        decoder.conformance(),
        Plan::tokens(&shape).with_hot(16),
    )
    .expect("flex is exact");
    let mut caches: [Box<dyn CacheBackend>; 2] =
        [Box::new(FullKv::new(&shape)), Box::new(residual)];
    for cache in &mut caches {
        prefill(&decoder, cache.as_mut(), HELD);
    }
    let mut times = [Vec::new(), Vec::new()];
    let mut group = criterion.benchmark_group("residual");
    group.throughput(Throughput::Elements(1)).sample_size(20);
    let names = ["full_kv", "residual_checkpoint_16_of_128"];
    for (index, name) in names.into_iter().enumerate() {
        group.bench_function(name, |bencher| {
            bencher.iter_custom(|count| {
                let before = times[index].len();
                for _ in 0..count {
                    for (cache, times) in caches.iter_mut().zip(&mut times) {
                        times.push(undone_step(&decoder, cache.as_mut(), HELD));
                    }
                }
                times[index][before..].iter().sum()
            });
        });
    }
    group.finish();

    if times[0].is_empty() {
        return;
    }
    let [full, residual] = times.map(|times| median(&times) * 1e3);
    println!(
        "residual, 16 hot tokens of {HELD} against FullKv: {residual:.3} and {full:.3} ms a step, ratio {:.1}\n",
        residual / full,
    );
}

criterion_group!(benches, decode, residual);
criterion_main!(benches);
