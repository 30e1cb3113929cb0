//! Keys and values of N tokens at one layer: rebuilt from their residuals against read from memory
//! (KV-Direct, Figure 7), beside what this machine can do at most.
//!
//! `cargo bench --bench layer`. With `KV_DIRECT_MODELS` naming a folder of model folders, layer 0 of
//! SmolLM2-135M-Instruct is measured; without it one of random numbers takes its place. The other shapes are
//! always of random numbers.
//!
//! Rebuilding is the norm, the product with the weights of keys and values, QK-norm and rotation; only the product's
//! operations are counted. Residuals come in chunks of 64 tokens, as in a replay, and all in one call. Reading is
//! burn's sum of keys and of values, or a copy of both, whose bytes count once, as read. Runs are interleaved.
//! The limits are measured between the samples. One round that does not count follows them.

mod common;

use std::{hint::black_box, time::Duration};

use burn::tensor::{Tensor, TensorData};
use common::{
    interleaved::{interleaved, median},
    limits::{Memory, Square},
    noise, real_model, sizes,
};
use criterion::{Criterion, SamplingMode, criterion_group, criterion_main};
use kv_direct::{
    cache::{LayerIndex, Replay},
    model::{Decoder, DecoderConfig},
    positions::Positions,
};

/// Tokens of a chunk of a replay.
const CHUNK: usize = 64;

fn layer(criterion: &mut Criterion) {
    let limits = (Memory::new(), Square::new());
    for (name, decoder) in decoders() {
        for &tokens in sizes(&[1, 16, 64, 256, 1024, 4096]) {
            compare(criterion, &limits, (name, &decoder), tokens);
        }
    }
}

fn decoders() -> [(&'static str, Decoder); 3] {
    let of_shape = |hidden, heads, kv_heads, head_dim| {
        let mut config = DecoderConfig::new(256, hidden, 1, heads, kv_heads);
        (config.head_dim, config.max_positions) = (head_dim, 4096);
        // The feed-forward layer is not measured.
        config.intermediate = 64;
        config
    };
    let smol = || noise(of_shape(576, 9, 3, 64));
    let mut qwen = of_shape(1024, 16, 8, 128);
    qwen.qk_norm = true;
    [
        real_model("a layer of its shape").unwrap_or_else(|| ("SmolLM2's shape", smol())),
        ("Qwen3-0.6B's shape", noise(qwen)),
        ("MHA 16 x 64", noise(of_shape(1024, 16, 16, 64))),
    ]
}

fn compare(
    criterion: &mut Criterion,
    (memory, square): &(Memory, Square),
    (name, decoder): (&str, &Decoder),
    tokens: usize,
) {
    let (shape, at) = (decoder.shape(), decoder.at(LayerIndex::new(0)));
    let width = shape.kernels.kv_heads * shape.kernels.head_dim;
    let numbers = |count: usize| (0..count).map(|i| (i % 17) as f32 / 17.0).collect();
    let calls = |rows: usize| -> Vec<_> {
        let call = |from| {
            let residual = numbers(rows * shape.hidden);
            let residual = TensorData::new::<f32, _>(residual, [1, rows, shape.hidden]);
            let residual = Tensor::<3>::from_data(residual, decoder.device());
            (residual, Positions::contiguous(&[from], &[rows]))
        };
        (0..tokens).step_by(rows).map(call).collect()
    };
    let (chunks, whole) = (calls(tokens.min(CHUNK)), calls(tokens));
    let held = [(); 2].map(|()| {
        let dims = [1, shape.kernels.kv_heads, tokens, shape.kernels.head_dim];
        let held = TensorData::new::<f32, _>(numbers(tokens * width), dims);
        Tensor::<4>::from_data(held, decoder.device())
    });
    let rebuild = |calls: &[(Tensor<3>, Positions)]| {
        for (residual, positions) in calls {
            black_box(at.project(residual.clone(), positions).expect("rows"));
        }
    };
    let run = |index| match index {
        0 => rebuild(&chunks),
        1 => rebuild(&whole),
        2 => (held.iter()).for_each(|held| drop(black_box(held.clone().sum().into_data()))),
        _ => (held.iter()).for_each(|held| drop(black_box(held.clone().add_scalar(0.0)))),
    };

    let mut times = [const { Vec::new() }; 4];
    let (mut reads, mut products) = (Vec::new(), Vec::new());
    let mut group = criterion.benchmark_group("layer");
    group.sampling_mode(SamplingMode::Flat).sample_size(10);
    group.warm_up_time(Duration::from_millis(100));
    group.measurement_time(Duration::from_secs(1));
    group.bench_function(format!("{name}, {tokens} tokens"), |bencher| {
        bencher.iter_custom(|count| {
            reads.push(memory.read());
            products.push(square.multiply());
            (0..times.len()).for_each(run);
            interleaved(count, &mut times, run)
        });
    });
    group.finish();
    if times[0].is_empty() {
        return;
    }
    let [rebuilt, at_once, summed, copied] = times.map(|times| median(&times));
    let bytes = 2 * tokens * width * shape.dtype.size();
    let reads = Memory::BYTES as f64 / median(&reads) / 1e9;
    let products = Square::OPERATIONS as f64 / median(&products) / 1e9;
    let operations = (2 * tokens * shape.hidden * 2 * width) as f64 / rebuilt / 1e9;
    let read = |time: f64| {
        let rate = bytes as f64 / time / 1e9;
        format!("{:.1} µs, {rate:.1} GB/s ({:.2})", time * 1e6, rate / reads)
    };
    println!(
        "layer, {tokens} tokens, {name}: rebuilt {:.1} µs (in one call {:.1}), {operations:.1} GFLOP/s ({:.2} of {products:.0}); \
         summed {}, copied {} of {reads:.1} GB/s; rebuilt / sum {:.1}, rebuilt / copy {:.1}\n",
        rebuilt * 1e6,
        at_once * 1e6,
        operations / products,
        read(summed),
        read(copied),
        rebuilt / summed,
        rebuilt / copied,
    );
}

criterion_group!(benches, layer);
criterion_main!(benches);
