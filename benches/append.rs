//! What `FullKv` itself takes for one token, by the length of the context: all calls of a step, without a decoder.
//!
//! `cargo bench --bench append`. The sizes are those of SmolLM2-135M. An append writes into its buffers in place, so its
//! time should not depend on the context. The contexts take turns. Each append is undone before the next, outside
//! the measured time. Then tokens follow one another without being undone: buffers grow, and that is a copy.

mod common;

use std::{hint::black_box, time::Duration};

use burn::tensor::{DType, Device, Tensor};
use common::{
    interleaved::{medians, timed},
    limits::Limits,
    sizes,
};
use criterion::{Criterion, criterion_group, criterion_main};
use kv_direct::{
    cache::{
        CacheBackend, CacheError, KeysValues, LayerIndex, ModelShape, Projection, Replay, Span,
        Step, TokenIds,
    },
    exact::KernelShapes,
    policy::FullKv,
    positions::Positions,
};

/// Tokens that follow one another at the end.
const RUN: usize = 1024;

fn append(criterion: &mut Criterion) {
    let shape = ModelShape::new(30, 576, DType::F32, KernelShapes::new(9, 3, 64));
    let contexts = sizes(&[512, 4096, 16_384]);
    let mut caches: Vec<_> = contexts.iter().map(|_| FullKv::new(&shape)).collect();
    for (cache, &context) in caches.iter_mut().zip(contexts) {
        step(cache, &shape, context);
        // The first append may make buffers grow.
        step(cache, &shape, 1);
        cache.truncate(&[context]).expect("the last step");
    }
    let mut limits = Limits::new();
    let name = format!("{contexts:?} tokens");
    let count = contexts.len();
    let times = medians(criterion, ("append", &name), &mut limits, count, |index| {
        let time = step(&mut caches[index], &shape, 1);
        caches[index]
            .truncate(&contexts[index..=index])
            .expect("the last step");
        time
    });
    let Some(times) = times else { return };
    for ((cache, &context), time) in caches.iter_mut().zip(contexts).zip(&times) {
        let read = (context * shape.keys_values_per_token()) as f64 / limits.read_rate();
        let run: Vec<_> = (0..RUN).map(|_| step(cache, &shape, 1)).collect();
        let longest = run.iter().max().expect("some").as_secs_f64();
        println!(
            "append at {context} tokens: {:.1} µs, {:.2} of that at {}, {:.3} of reading the context at the read rate; \
             {RUN} in a row: mean {:.1} µs, longest {:.1} µs",
            time * 1e6,
            time / times[0],
            contexts[0],
            time / read,
            run.iter().sum::<Duration>().as_secs_f64() / RUN as f64 * 1e6,
            longest * 1e6,
        );
    }
    println!();
}

/// The time of a step of `tokens` tokens, from its beginning to its commit.
fn step(cache: &mut FullKv, shape: &ModelShape, tokens: usize) -> Duration {
    let start = cache.lengths().first().copied().unwrap_or(0);
    let ids = TokenIds::from(vec![vec![7; tokens]]);
    let step = Step::new(ids, &[start]).expect("some tokens");
    let entries = Tensor::<4>::full([1, 3, tokens, 64], 0.5, &Device::flex());
    let projection = Projection {
        keys: entries.clone(),
        values: entries,
    };
    let residual = Tensor::full([1, tokens, shape.hidden], 0.5, &Device::flex());
    let span = Span::new(step.positions(), &residual, &projection, &Nothing);
    timed(|| {
        cache.begin(&step).expect("the next tokens");
        for layer in 0..shape.layers() {
            let read = cache.keys_values(LayerIndex::new(layer), span);
            black_box(read.expect("entries of the step"));
        }
        cache.commit().expect("all layers");
    })
}

/// `FullKv` rebuilds nothing.
struct Nothing;

impl Replay for Nothing {
    fn embed(&self, _: &TokenIds, _: &Positions) -> Result<Tensor<3>, CacheError> {
        unreachable!()
    }

    fn project(&self, _: Tensor<3>, _: &Positions) -> Result<Projection, CacheError> {
        unreachable!()
    }

    fn forward(
        &self,
        _: Tensor<3>,
        _: &Positions,
        _: &KeysValues,
    ) -> Result<Tensor<3>, CacheError> {
        unreachable!()
    }

    fn rotate(&self, _: Tensor<4>, _: &Positions, _: &Positions) -> Result<Tensor<4>, CacheError> {
        unreachable!()
    }
}

criterion_group!(benches, append);
criterion_main!(benches);
