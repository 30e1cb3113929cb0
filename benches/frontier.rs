//! From everything stored to maximum recompute: time and bytes of a step, against the prediction.
//!
//! `cargo bench --bench frontier`, with `KV_DIRECT_MODELS` naming a folder of model folders, measures
//! SmolLM2-135M-Instruct; without it a small random decoder takes its place. Then two random decoders whose keys and
//! values are twice as wide as the residual. Runs are interleaved.

mod common;

use std::time::Duration;

use common::{
    interleaved::{interleaved, median},
    measuring, model, noise, prefill, residual, undone_step,
};
use criterion::{Criterion, SamplingMode, criterion_group, criterion_main};
use kv_direct::{
    cache::CacheBackend,
    model::{Decoder, DecoderConfig},
    planner::{Planner, Throughput},
    policy::FullKv,
    residual::{Plan, ResidualConfig},
};

/// Shares of what `FullKv` holds, in percent.
const SHARES: [usize; 4] = [25, 50, 75, 90];

/// A name, its plan, and the byte budget if there is one.
type Planned = (String, Plan, Option<usize>);

/// Tokens held before the step.
fn tokens() -> usize {
    if measuring() { 2047 } else { 127 }
}

/// Steps at these plans, beside those of `FullKv`.
fn compare(
    criterion: &mut Criterion,
    name: &str,
    decoder: &Decoder,
    plans: impl FnOnce(&Planner<'_>) -> Vec<Planned>,
) {
    let (shape, held) = (decoder.shape(), tokens());
    let throughput = Throughput::measure(&shape, decoder.device(), held, |layer| decoder.at(layer));
    let throughput = throughput.expect("the model's own blocks");
    let planner = Planner::new(&shape, &throughput, held + 1).expect("sizes are known");
    let plans = plans(&planner);
    let mut caches: Vec<Box<dyn CacheBackend>> = vec![Box::new(FullKv::new(&shape))];
    for (_, plan, budget) in &plans {
        let config = ResidualConfig::new(plan.clone());
        let config = budget.map_or(config.clone(), |bytes| config.with_byte_budget(bytes));
        caches.push(Box::new(residual(decoder, config)));
    }
    for cache in &mut caches {
        prefill(decoder, cache.as_mut(), held);
    }
    let mut times = vec![Vec::new(); caches.len()];
    let mut group = criterion.benchmark_group("frontier");
    group.sampling_mode(SamplingMode::Flat).sample_size(10);
    group.measurement_time(Duration::from_millis(1));
    group.bench_function(name, |bencher| {
        bencher.iter_custom(|count| {
            interleaved(count, &mut times, |index| {
                undone_step(decoder, caches[index].as_mut(), held);
            })
        });
    });
    group.finish();
    if times[0].is_empty() {
        return;
    }
    let bytes: Vec<usize> = caches.iter().map(|cache| cache.memory().total()).collect();
    let times: Vec<f64> = times.iter().map(|times| median(times)).collect();
    println!("{name}, {held} tokens; {throughput}");
    println!(
        "everything stored: {} bytes between steps, {:.4} s a step",
        bytes[0], times[0]
    );
    for (index, (what, plan, _)) in plans.iter().enumerate() {
        let cost = planner.cost(plan).expect("a plan of the model");
        let (time, predicted) = (times[index + 1], cost.seconds(&throughput));
        println!(
            "{what}: {} bytes between steps ({:.3} of everything stored), {} more within one, {time:.4} s a step, \
             {:.2} of the {predicted:.4} s predicted, {:.3} of {}; {plan}, {} hot tokens, chunks of {}",
            bytes[index + 1],
            bytes[index + 1] as f64 / bytes[0] as f64,
            cost.scratch,
            time / predicted,
            time / times[1],
            plans[0].0,
            plan.hot(),
            plan.chunk(),
        );
    }
    println!();
}

/// Ids alone, the top half of the layers retained, and the plans for budgets, scratch included.
fn plans_of_model(criterion: &mut Criterion) {
    let (name, decoder) = model();
    let shape = decoder.shape();
    compare(criterion, name, &decoder, |planner| {
        let half = Plan::retain_top(&shape, shape.layers().div_ceil(2)).expect("half of them");
        let mut plans = vec![
            ("ids alone".to_owned(), Plan::tokens(&shape), None),
            ("top half retained".to_owned(), half, None),
        ];
        let full = (tokens() + 1) * shape.keys_values_per_token();
        for share in SHARES {
            let budget = (full * share / 100).max(planner.smallest());
            let plan = planner.plan(budget).expect("no less than the smallest");
            plans.push((format!("{share} % with scratch"), plan, Some(budget)));
        }
        plans
    });
}

/// Qwen3-0.6B's widths, a quarter of each, and as many KV heads as heads: a residual is half of keys and values.
fn residuals(criterion: &mut Criterion) {
    let mut wide = DecoderConfig::new(1024, 256, 8, 16, 8);
    (wide.head_dim, wide.intermediate, wide.qk_norm) = (32, 768, true);
    let shapes = [
        ("widths of Qwen3-0.6B, a quarter", wide),
        (
            "8 heads of 32, all with keys",
            DecoderConfig::new(1024, 256, 8, 8, 8),
        ),
    ];
    // Measuring the throughput of one takes seconds.
    let skipped = if measuring() { 0 } else { 1 };
    for (name, mut config) in shapes.into_iter().skip(skipped) {
        config.max_positions = 8192;
        let decoder = noise(config);
        let shape = decoder.shape();
        compare(criterion, name, &decoder, |_| {
            vec![
                ("ids alone".to_owned(), Plan::tokens(&shape), None),
                ("residuals".to_owned(), Plan::residuals(&shape), None),
            ]
        });
    }
}

criterion_group!(benches, plans_of_model, residuals);
criterion_main!(benches);
