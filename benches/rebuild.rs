//! What rebuilding costs: a resume against a prefill, and the dial from all kept to all replayed.
//!
//! `cargo bench --bench rebuild`, with `KV_DIRECT_MODELS` naming a folder of model folders, measures
//! SmolLM2-135M-Instruct; without it a small random decoder takes its place. What is compared takes turns.

mod common;

use std::{hint::black_box, ops::ControlFlow, time::Duration};

use common::{
    model, prefill,
    turns::{in_turn, median},
};
use criterion::{Criterion, SamplingMode, criterion_group, criterion_main};
use kv_direct::{
    cache::{CacheBackend, FullKv, Plan, ResidualCheckpoint, ResidualConfig},
    exact::conformance::Conformance,
    model::{Decoder, Input},
};

fn cache(decoder: &Decoder, config: ResidualConfig, probe: &Conformance) -> ResidualCheckpoint {
    let config = config.with_conformance(probe.clone());
    ResidualCheckpoint::new(&decoder.shape(), decoder.device(), config).expect("flex is exact")
}

fn probe(decoder: &Decoder) -> Conformance {
    let shape = decoder.shape();
    Conformance::probe(&shape.kernels, decoder.device(), shape.dtype)
}

/// A parked session comes back by a replay of its ids; the same ids taken in anew are the peer.
fn resume(criterion: &mut Criterion) {
    let (name, decoder) = model();
    let probe = probe(&decoder);
    let mut group = criterion.benchmark_group("resume");
    group.sampling_mode(SamplingMode::Flat).sample_size(10);
    group.measurement_time(Duration::from_millis(1));
    for tokens in [512, 1024, 2048] {
        let mut parked = cache(&decoder, ResidualConfig::parked(), &probe);
        prefill(&decoder, &mut parked, tokens);
        let mut times = [Vec::new(), Vec::new()];
        group.bench_function(format!("{name}, {tokens} tokens"), |bencher| {
            bencher.iter_custom(|count| {
                in_turn(count, &mut times, |index| {
                    if index == 0 {
                        parked.park().expect("it rebuilds");
                        let done =
                            parked.resume(|layer| decoder.at(layer), |_| ControlFlow::Continue(()));
                        assert!(done.expect("a decoder").is_continue());
                    } else {
                        prefill(&decoder, &mut FullKv::new(&decoder.shape()), tokens);
                    }
                })
            });
        });
        if times[0].is_empty() {
            continue;
        }
        let [resumed, taken_in] = times.map(|times| median(&times));
        println!(
            "resume of {tokens} tokens, {name}: {resumed:.3} s, a prefill {taken_in:.3} s, ratio {:.3}\n",
            resumed / taken_in
        );
    }
    group.finish();
}

/// Steps of one token with everything kept, the top half of the layers kept, and nothing kept but ids.
fn dial(criterion: &mut Criterion) {
    const TOKENS: usize = 2048;
    let (name, decoder) = model();
    let (shape, probe) = (decoder.shape(), probe(&decoder));
    let half = Plan::keep_top(&shape, shape.layers().div_ceil(2)).expect("half of them");
    let bounded = |plan| cache(&decoder, ResidualConfig::planned(plan), &probe);
    let mut caches: [Box<dyn CacheBackend>; 3] = [
        Box::new(FullKv::new(&shape)),
        Box::new(bounded(half)),
        Box::new(bounded(Plan::tokens(&shape))),
    ];
    for cache in &mut caches {
        prefill(&decoder, cache.as_mut(), TOKENS);
    }
    let mut times = [Vec::new(), Vec::new(), Vec::new()];
    let mut group = criterion.benchmark_group("dial");
    group.sampling_mode(SamplingMode::Flat).sample_size(10);
    group.measurement_time(Duration::from_millis(1));
    group.bench_function(name, |bencher| {
        bencher.iter_custom(|count| {
            in_turn(count, &mut times, |index| {
                let cache = caches[index].as_mut();
                let logits = decoder.forward(Input::from(&[7][..]), cache);
                black_box(logits.expect("a step"));
                cache.truncate(TOKENS).expect("the last call");
            })
        });
    });
    group.finish();
    if times[0].is_empty() {
        return;
    }
    let held = caches.each_ref().map(|cache| cache.memory().total());
    let [full, half, all] = times.map(|times| median(&times));
    for (what, time, held) in [
        ("all kept", full, held[0]),
        ("top half kept", half, held[1]),
        ("ids alone", all, held[2]),
    ] {
        println!(
            "{what}: {held} bytes between steps, {time:.3} s a step at {TOKENS} tokens, {name}"
        );
    }
    println!("ratio of top half to ids alone {:.3}\n", half / all);
}

criterion_group!(benches, resume, dial);
criterion_main!(benches);
