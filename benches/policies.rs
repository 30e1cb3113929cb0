//! What a lossy policy costs beside `FullKv`, in one run: decode steps with few entries and with all of
//! them, and processing a prompt.
//!
//! `cargo bench --bench policies`, with `KV_DIRECT_MODELS` naming a folder of model folders, measures
//! SmolLM2-135M-Instruct; without it a small random decoder takes its place. Steps are interleaved,
//! so that other load on the machine affects all caches alike.

mod common;

use std::time::{Duration, Instant};

use common::{interleaved::median, measuring, model, prefill, step, wanted};
use criterion::{Criterion, criterion_group, criterion_main};
use kv_direct::{
    cache::CacheBackend,
    model::Decoder,
    policy::{
        FullKv, H2o, H2oConfig, SnapKv, SnapKvConfig, StreamingLlm, StreamingLlmConfig, Tova,
        TovaConfig, Window,
    },
};

/// Token budgets: one that evicts, one that never does.
const BUDGETS: [usize; 2] = [512, 4096];
const NAMES: [&str; 6] = [
    "full_kv",
    "window",
    "streaming_llm",
    "h2o",
    "tova",
    "snap_kv",
];

fn caches(decoder: &Decoder, budget: usize) -> [Box<dyn CacheBackend>; 6] {
    let shape = decoder.shape();
    let fits = "the budget fits";
    [
        Box::new(FullKv::new(&shape)),
        Box::new(Window::new(&shape, budget).expect(fits)),
        Box::new(StreamingLlm::new(&shape, StreamingLlmConfig::new(budget - 4)).expect(fits)),
        Box::new(H2o::new(&shape, H2oConfig::new(budget, budget / 2)).expect(fits)),
        Box::new(Tova::new(&shape, TovaConfig::new(budget)).expect(fits)),
        Box::new(SnapKv::new(&shape, SnapKvConfig::new(budget, 32)).expect(fits)),
    ]
}

/// Tokens of the prompt.
fn context() -> usize {
    if measuring() { 2000 } else { 600 }
}

/// One-token steps after the prompt.
fn decode(criterion: &mut Criterion) {
    if !wanted("decode") {
        return;
    }
    let (name, decoder) = model();
    for budget in BUDGETS {
        let mut caches = caches(&decoder, budget);
        for cache in &mut caches {
            prefill(&decoder, cache.as_mut(), context());
        }
        let mut times = [const { Vec::new() }; NAMES.len()];
        let mut group = criterion.benchmark_group(format!("decode_at_{budget}"));
        group
            .sample_size(20)
            .measurement_time(Duration::from_secs(4));
        for (index, backend) in NAMES.into_iter().enumerate() {
            group.bench_function(backend, |bencher| {
                bencher.iter_custom(|count| {
                    let before = times[index].len();
                    for _ in 0..count {
                        for (cache, times) in caches.iter_mut().zip(&mut times) {
                            times.push(step(&decoder, cache.as_mut()));
                        }
                    }
                    times[index][before..].iter().sum()
                });
            });
        }
        group.finish();
        if times[0].is_empty() {
            continue;
        }
        let full = median(&times[0]);
        for (backend, times) in NAMES.iter().zip(&times).skip(1) {
            let ratio = median(times) / full;
            println!(
                "decode {name}, {} tokens, {backend} with {budget} entries: {ratio:.3} of full_kv",
                context(),
            );
        }
        println!();
    }
}

/// Processing a prompt, and what that holds beside the entries. Runs a few times in turn, without criterion,
/// which takes at least ten samples of what takes seconds.
fn prompt(_: &mut Criterion) {
    if !wanted("prefill") {
        return;
    }
    let rounds = if measuring() { 3 } else { 1 };
    let (name, decoder) = model();
    let mut times = [Vec::new(), Vec::new()];
    let mut scratch = [0; 2];
    for _ in 0..rounds {
        let [full, _, _, h2o, ..] = caches(&decoder, BUDGETS[0]);
        for (index, mut cache) in [full, h2o].into_iter().enumerate() {
            let start = Instant::now();
            prefill(&decoder, cache.as_mut(), context());
            times[index].push(start.elapsed());
            scratch[index] = cache.memory().scratch_peak;
        }
    }
    println!(
        "prefill {name}, {} tokens: h2o {:.3} of full_kv; held on top of the entries: {} and {} bytes\n",
        context(),
        median(&times[1]) / median(&times[0]),
        scratch[1],
        scratch[0],
    );
}

criterion_group!(benches, decode, prompt);
criterion_main!(benches);
