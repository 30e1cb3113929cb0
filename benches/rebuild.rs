//! What rebuilding costs: replays against a prefill, and the dial from all kept to all replayed, predicted and
//! measured.
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
    cache::{CacheBackend, FullKv, Plan, Planner, ResidualCheckpoint, ResidualConfig, Speeds},
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

/// The step of one token, undone.
fn step(decoder: &Decoder, cache: &mut dyn CacheBackend, tokens: usize) {
    let logits = decoder.forward(Input::from(&[7][..]), cache);
    black_box(logits.expect("a step").into_data());
    cache.truncate(tokens).expect("the last call");
}

/// A parked session that comes back, and a step that holds nothing but ids, replay the tokens before; the same
/// tokens taken in anew are the peer.
fn replay(criterion: &mut Criterion) {
    let (name, decoder) = model();
    let (shape, probe) = (decoder.shape(), probe(&decoder));
    let mut group = criterion.benchmark_group("replay");
    group.sampling_mode(SamplingMode::Flat).sample_size(10);
    group.measurement_time(Duration::from_millis(1));
    for tokens in [512, 1024, 2048] {
        let mut parked = cache(&decoder, ResidualConfig::parked(), &probe);
        let mut ids = cache(&decoder, ResidualConfig::new(0), &probe);
        prefill(&decoder, &mut parked, tokens);
        prefill(&decoder, &mut ids, tokens);
        let mut times = [Vec::new(), Vec::new(), Vec::new()];
        group.bench_function(format!("{name}, {tokens} tokens"), |bencher| {
            bencher.iter_custom(|count| {
                in_turn(count, &mut times, |index| match index {
                    0 => {
                        parked.park().expect("it rebuilds");
                        let done =
                            parked.resume(|layer| decoder.at(layer), |_| ControlFlow::Continue(()));
                        assert!(done.expect("a decoder").is_continue());
                    }
                    1 => step(&decoder, &mut ids, tokens),
                    _ => prefill(&decoder, &mut FullKv::new(&shape), tokens),
                })
            });
        });
        if times[0].is_empty() {
            continue;
        }
        let [resumed, stepped, taken_in] = times.map(|times| median(&times));
        println!(
            "{tokens} tokens, {name}: a prefill {taken_in:.3} s; a resume {resumed:.3} s, ratio {:.3}; a step from \
             ids {stepped:.3} s, ratio {:.3}\n",
            resumed / taken_in,
            stepped / taken_in
        );
    }
    group.finish();
}

/// Steps of one token: everything kept, the top half of the layers kept, ids alone, and the plans for budgets of
/// these shares of what `FullKv` holds, scratch included.
const SHARES: [usize; 4] = [25, 50, 75, 90];
const TOKENS: usize = 2047;

fn dial(criterion: &mut Criterion) {
    let (name, decoder) = model();
    let (shape, probe) = (decoder.shape(), probe(&decoder));
    let speeds = Speeds::measure(&shape, decoder.device(), TOKENS, |layer| decoder.at(layer));
    let speeds = speeds.expect("the model's own blocks");
    println!("{speeds}");
    let planner = Planner::new(&shape, &speeds, TOKENS + 1);
    let half = Plan::keep_top(&shape, shape.layers().div_ceil(2)).expect("half of them");
    let mut plans = vec![
        ("top half kept".to_owned(), half, None),
        ("ids alone".to_owned(), Plan::tokens(&shape), None),
    ];
    let full_bytes = TOKENS.next_multiple_of(512) * shape.keys_values_per_token();
    for share in SHARES {
        let budget = full_bytes * share / 100;
        let plan = planner
            .plan(budget.max(planner.smallest()))
            .expect("it is not smaller");
        plans.push((
            format!("{share} % with scratch"),
            plan,
            Some(budget.max(planner.smallest())),
        ));
    }
    let mut full = FullKv::new(&shape);
    let mut caches: Vec<_> = plans
        .iter()
        .map(|(_, plan, budget)| {
            let config = ResidualConfig::planned(plan.clone());
            cache(
                &decoder,
                budget.map_or(config.clone(), |bytes| config.with_budget(bytes)),
                &probe,
            )
        })
        .collect();
    prefill(&decoder, &mut full, TOKENS);
    caches
        .iter_mut()
        .for_each(|cache| prefill(&decoder, cache, TOKENS));

    let mut times: [Vec<Duration>; 7] = Default::default();
    let mut group = criterion.benchmark_group("dial");
    group.sampling_mode(SamplingMode::Flat).sample_size(10);
    group.measurement_time(Duration::from_millis(1));
    group.bench_function(name, |bencher| {
        bencher.iter_custom(|count| {
            in_turn(count, &mut times, |index| match index {
                0 => step(&decoder, &mut full, TOKENS),
                index => step(&decoder, &mut caches[index - 1], TOKENS),
            })
        });
    });
    group.finish();
    if times[0].is_empty() {
        return;
    }
    let times = times.map(|times| median(&times));
    let all = times[2];
    println!(
        "all kept: {} bytes between steps, {:.3} s a step at {TOKENS} tokens, {name}",
        full.memory().total(),
        times[0]
    );
    for (((what, plan, _), cache), time) in plans.iter().zip(&caches).zip(&times[1..]) {
        let (memory, predicted) = (cache.memory(), planner.price(plan).seconds(&speeds));
        println!(
            "{what}: {} bytes between steps, {} more within one, {time:.3} s a step, {:.3} of ids alone, \
             {:.2} of the {predicted:.3} s predicted; {plan}, {} hot, calls of {}",
            memory.total(),
            planner.price(plan).scratch,
            time / all,
            time / predicted,
            plan.hot(),
            plan.chunk(),
        );
    }
    println!();
}

criterion_group!(benches, replay, dial);
criterion_main!(benches);
