//! What a replay costs beside a prefill of the same tokens.
//!
//! `cargo bench --bench rebuild`, with `KV_DIRECT_MODELS` naming a folder of model folders, measures
//! SmolLM2-135M-Instruct; without it a small random decoder takes its place. Runs are interleaved.

mod common;

use std::{ops::ControlFlow, time::Duration};

use common::{
    interleaved::{interleaved, median},
    model, prefill, residual, sizes, undone_step,
};
use criterion::{Criterion, SamplingMode, criterion_group, criterion_main};
use kv_direct::cache::CacheBackend;
use kv_direct::policy::FullKv;
use kv_direct::residual::Plan;

/// A resume, and a step from ids alone, against a prefill of the same tokens.
fn replay(criterion: &mut Criterion) {
    let (name, decoder) = model();
    let shape = decoder.shape();
    let mut group = criterion.benchmark_group("replay");
    group.sampling_mode(SamplingMode::Flat).sample_size(10);
    group.measurement_time(Duration::from_millis(1));
    for &tokens in sizes(&[512, 1024, 2048]) {
        let mut parked = residual(&decoder, Plan::tokens(&shape).with_hot(usize::MAX));
        let mut ids = residual(&decoder, Plan::tokens(&shape));
        prefill(&decoder, &mut parked, tokens);
        prefill(&decoder, &mut ids, tokens);
        let mut times = [Vec::new(), Vec::new(), Vec::new()];
        group.bench_function(format!("{name}, {tokens} tokens"), |bencher| {
            bencher.iter_custom(|count| {
                interleaved(count, &mut times, |index| match index {
                    0 => {
                        parked.park().expect("it rebuilds");
                        let done =
                            parked.resume(|layer| decoder.at(layer), |_| ControlFlow::Continue(()));
                        assert!(done.expect("a decoder").is_continue());
                    }
                    1 => {
                        undone_step(&decoder, &mut ids, tokens);
                    }
                    _ => prefill(&decoder, &mut FullKv::new(&shape), tokens),
                })
            });
        });
        if times[0].is_empty() {
            continue;
        }
        let [resumed, stepped, prefilled] = times.map(|times| median(&times));
        println!(
            "{tokens} tokens, {name}: a prefill {prefilled:.3} s; a resume {resumed:.3} s, ratio {:.3}; a step from \
             ids {stepped:.3} s, ratio {:.3}\n",
            resumed / prefilled,
            stepped / prefilled
        );
    }
    group.finish();
}

criterion_group!(benches, replay);
criterion_main!(benches);
