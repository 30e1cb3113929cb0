//! Attention alone, with the heads of SmolLM2: one query over a context, and a prompt over itself.
//!
//! `cargo bench --bench attention`. One query reads every key and value once: its limit is the read rate. There are as
//! many contexts as are larger than the processor's caches, read one after another, as the layers of a model are.
//! A prompt computes most of the time: its limit is the matrix rate. Only what a query sees is counted.

mod common;

use std::hint::black_box;

use burn::tensor::{Device, Tensor};
use common::{
    interleaved::{medians, timed_in_pool},
    limits::Limits,
    measuring, sizes,
};
use criterion::{Criterion, criterion_group, criterion_main};
use kv_direct::{
    exact::{AttentionParams, Segment, attention},
    positions::Positions,
};

const HEADS: usize = 9;
const KV_HEADS: usize = 3;
const HEAD_DIM: usize = 64;
/// Bytes of all contexts together, if they are measured.
const BYTES: usize = 256 << 20;

/// The entries of one sequence of `tokens` tokens.
fn entries(tokens: usize) -> Vec<Vec<Segment>> {
    let rows = Tensor::<3>::full([KV_HEADS, tokens, HEAD_DIM], 0.5, &Device::flex());
    let positions = vec![(0..tokens).collect()];
    vec![vec![Segment::from_rows(rows.clone(), rows, positions, 0)]]
}

fn query(tokens: usize) -> Tensor<4> {
    Tensor::full([1, HEADS, tokens, HEAD_DIM], 0.5, &Device::flex())
}

fn params() -> AttentionParams {
    AttentionParams::new(1.0 / (HEAD_DIM as f64).sqrt())
}

/// One query, the last of its text.
fn one_query(criterion: &mut Criterion) {
    let mut limits = Limits::new();
    for &tokens in sizes(&[512, 2048, 8192, 16_384]) {
        let bytes = 2 * KV_HEADS * HEAD_DIM * size_of::<f32>() * tokens;
        let contexts = if measuring() {
            BYTES.div_ceil(bytes)
        } else {
            1
        };
        let contexts: Vec<_> = (0..contexts).map(|_| entries(tokens)).collect();
        let (query, position) = (query(1), Positions::shared(&[[tokens - 1]]));
        let name = format!("one query, {tokens} tokens");
        let times = medians(criterion, ("attention", &name), &mut limits, 1, |_| {
            timed_in_pool(|| {
                for context in &contexts {
                    black_box(attention(query.clone(), &position, context, &params()));
                }
            })
        });
        let Some(times) = times else { continue };
        let rate = (contexts.len() * bytes) as f64 / times[0];
        println!(
            "attention, {name}: {:.1} µs, {:.1} GB/s, {:.2} of the read rate {:.1}\n",
            times[0] / contexts.len() as f64 * 1e6,
            rate / 1e9,
            rate / limits.read_rate(),
            limits.read_rate() / 1e9,
        );
    }
}

/// All queries of a prompt.
fn prompt(criterion: &mut Criterion) {
    let mut limits = Limits::new();
    for &tokens in sizes(&[512, 1024, 2048, 4096]) {
        let (query, entries) = (query(tokens), entries(tokens));
        let positions = Positions::contiguous(&[0], &[tokens]);
        let name = format!("prompt, {tokens} tokens");
        let times = medians(criterion, ("attention", &name), &mut limits, 1, |_| {
            timed_in_pool(|| {
                black_box(attention(query.clone(), &positions, &entries, &params()));
            })
        });
        let Some(times) = times else { continue };
        let pairs = tokens * (tokens + 1) / 2;
        let rate = (4 * HEADS * HEAD_DIM * pairs) as f64 / times[0];
        println!(
            "attention, {name}: {:.2} ms, {:.1} GFLOP/s, {:.2} of the matrix rate {:.0}\n",
            times[0] * 1e3,
            rate / 1e9,
            rate / limits.matrix_rate(),
            limits.matrix_rate() / 1e9,
        );
    }
}

criterion_group!(benches, one_query, prompt);
criterion_main!(benches);
