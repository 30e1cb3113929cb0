//! A whole prompt with `FullKv`, against the rate at which this machine multiplies matrices.
//!
//! `cargo bench --bench prefill`, with `KV_DIRECT_MODELS` naming a folder of model folders, measures
//! SmolLM2-135M-Instruct; without it random weights of its shape take its place.
//!
//! Counted are the operations of all products, of scores that queries see, and of one row of the head.

mod common;

use common::{
    interleaved::{medians, timed},
    limits::Limits,
    prefill, sizes, smollm2,
    work::operations_of_prompt,
};
use criterion::{Criterion, criterion_group, criterion_main};
use kv_direct::policy::FullKv;

fn prompt(criterion: &mut Criterion) {
    let (name, decoder) = smollm2();
    let shape = decoder.shape();
    let mut limits = Limits::new();
    for &tokens in sizes(&[512, 2048]) {
        let name = format!("{name}, {tokens} tokens");
        let times = medians(criterion, ("prefill", &name), &mut limits, 1, |_| {
            timed(|| prefill(&decoder, &mut FullKv::new(&shape), tokens))
        });
        let Some(times) = times else { continue };
        let rate = operations_of_prompt(&decoder, tokens) as f64 / times[0];
        println!(
            "prefill, {name}: {:.0} tokens/s, {:.1} GFLOP/s, {:.2} of the matrix rate {:.0}\n",
            tokens as f64 / times[0],
            rate / 1e9,
            rate / limits.matrix_rate(),
            limits.matrix_rate() / 1e9,
        );
    }
}

criterion_group!(benches, prompt);
criterion_main!(benches);
