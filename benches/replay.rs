//! A parked cache that continues, beside a prefill of the same tokens.
//!
//! `cargo bench --bench replay`, with `KV_DIRECT_MODELS` naming a folder of model folders, measures
//! SmolLM2-135M-Instruct; without it random weights of its shape take its place. Runs are interleaved.
//!
//! Parking drops everything but token ids. The next step, of one token, replays them and stores all entries again.

mod common;

use common::{
    interleaved::{medians, timed},
    limits::Limits,
    prefill, residual, sizes, smollm2, undone_step,
    work::operations_of_prompt,
};
use criterion::{Criterion, criterion_group, criterion_main};
use kv_direct::{cache::CacheBackend, policy::FullKv, residual::Plan};

fn parked(criterion: &mut Criterion) {
    let (name, decoder) = smollm2();
    let shape = decoder.shape();
    let mut limits = Limits::new();
    for &tokens in sizes(&[200, 512, 2048]) {
        let mut cache = residual(&decoder, Plan::tokens(&shape).with_hot(usize::MAX));
        prefill(&decoder, &mut cache, tokens);
        let name = format!("{name}, {tokens} old tokens");
        let times = medians(criterion, ("parked", &name), &mut limits, 2, |index| {
            if index == 0 {
                let park = timed(|| cache.park().expect("it rebuilds"));
                return park + undone_step(&decoder, &mut cache, tokens);
            }
            timed(|| prefill(&decoder, &mut FullKv::new(&shape), tokens))
        });
        let Some(times) = times else { continue };
        let rate = operations_of_prompt(&decoder, tokens) as f64 / times[1];
        println!(
            "parked, {name}: park and a step {:.3} s, {:.3} of a prefill; the prefill {:.3} s, {:.2} of the matrix \
             rate {:.0} GFLOP/s\n",
            times[0],
            times[0] / times[1],
            times[1],
            rate / limits.matrix_rate(),
            limits.matrix_rate() / 1e9,
        );
    }
}

criterion_group!(benches, parked);
criterion_main!(benches);
