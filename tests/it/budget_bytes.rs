//! What a cache with a budget says it holds is what the process holds, call by call.

use crate::support::CacheExt as _;
use std::num::NonZeroUsize;

use kv_direct::{
    cache::{CacheBackend, CacheError, Draft, KeysValues, LayerIndex, Span, Step},
    forward_backend,
    model::{Decoder, DecoderConfig},
    planner::{Planner, Throughput},
    residual::{Plan, ResidualCheckpoint, ResidualConfig},
};

use crate::{
    allocator::{live, measure_all},
    alone::passes_alone,
    families::{config, gemma, qwen2, qwen3},
    support::{feed, random, tokens},
};

const MIB: usize = 1 << 20;

/// Measures every call of a step, and what else is done to the cache.
#[derive(Debug)]
struct Measured {
    inner: ResidualCheckpoint,
    /// What the process holds beside the cache.
    base: isize,
    /// The most bytes held within the calls since this was last looked at.
    most: usize,
}

impl Measured {
    fn measured<R>(&mut self, call: impl FnOnce(&mut ResidualCheckpoint) -> R) -> R {
        let held = (live() - self.base).unsigned_abs();
        let (result, peak, _) = measure_all(|| call(&mut self.inner));
        self.most = self.most.max(held + peak);
        result
    }

    /// Compares what is held with what the cache says.
    fn check(&mut self, what: &str) {
        let memory = self.memory();
        let held = (live() - self.base).unsigned_abs();
        assert!(
            near(held, memory.total()),
            "{what}: {held} bytes are held, told {memory:?}"
        );
    }

    /// What it says was held at most, where it held `before` bytes before.
    fn told(&self, before: usize) -> usize {
        let memory = self.memory();
        before.max(memory.total() + memory.scratch_peak)
    }
}

const fn near(found: usize, told: usize) -> bool {
    found.abs_diff(told) <= told / 10 + MIB
}

impl CacheBackend for Measured {
    forward_backend!(self => self.inner; queries state set_state clear fork);

    fn begin(&mut self, step: &Step) -> Result<(), CacheError> {
        self.measured(|cache| cache.begin(step))
    }

    fn keys_values(&mut self, layer: LayerIndex, span: Span<'_>) -> Result<KeysValues, CacheError> {
        self.measured(|cache| cache.keys_values(layer, span))
    }

    fn commit(&mut self) -> Result<(), CacheError> {
        self.measured(CacheBackend::commit)
    }

    fn truncate(&mut self, to: &[usize]) -> Result<(), CacheError> {
        self.measured(|cache| cache.truncate(to))
    }

    fn begin_draft(&mut self) -> Result<(), CacheError> {
        self.measured(CacheBackend::begin_draft)
    }

    fn end_draft(&mut self, draft: Draft) -> Result<(), CacheError> {
        self.measured(|cache| cache.end_draft(draft))
    }

    fn select_sequences(&mut self, rows: &[usize]) -> Result<(), CacheError> {
        self.measured(|cache| cache.select_sequences(rows))
    }

    fn park(&mut self) -> Result<(), CacheError> {
        self.measured(CacheBackend::park)
    }
}

/// 6 KiB of keys and values a token; narrow otherwise, so that little but the cache is held.
fn wide(mut config: DecoderConfig) -> Decoder {
    let layer = config.layers[1].clone();
    (config.hidden, config.heads, config.kv_heads) = (32, 4, 4);
    (config.head_dim, config.intermediate, config.max_positions) = (32, 32, 8_192);
    config.layers.resize(6, layer);
    if config.layers[0].window.is_some() {
        for layer in [0, 2, 4] {
            config.layers[layer].window = NonZeroUsize::new(700);
        }
    }
    random(&config)
}

/// Feeds tokens, then one more, and compares after both. The rows of a long call itself are no cache's: only of
/// short ones is it known what the cache held at most.
fn step(decoder: &Decoder, cache: &mut Measured, count: usize, what: &str) {
    let more = (count > 1).then_some(1);
    for count in [count].into_iter().chain(more) {
        let before = cache.memory().total();
        cache.most = 0;
        drop(feed(decoder, cache, &tokens(count as u64, count)[..]));
        let what = format!("{what}, {count} more, {} tokens", cache.length(0));
        cache.check(&what);
        let (most, told) = (cache.most, cache.told(before));
        assert!(
            count > 100 || near(most, told),
            "{what}: at most {most} bytes, told {told}: {:?}",
            cache.memory()
        );
    }
}

/// Does something else to the cache, and compares.
fn act(
    cache: &mut Measured,
    what: &str,
    act: impl FnOnce(&mut Measured) -> Result<(), CacheError>,
) {
    let before = cache.memory().total();
    cache.most = 0;
    act(cache).expect("it can be done here");
    cache.check(what);
    let (most, told) = (cache.most, cache.told(before));
    assert!(
        most <= told + told / 10 + MIB,
        "{what}: at most {most} bytes, told {told}"
    );
}

fn run(decoder: &Decoder, plan: &Plan, budget: usize, name: &str) {
    let config = ResidualConfig::new(plan.clone()).with_byte_budget(budget);
    let base = live();
    let inner = ResidualCheckpoint::new(&decoder.shape(), decoder.conformance(), config);
    let mut cache = Measured {
        inner: inner.expect("the probe passed"),
        base,
        most: 0,
    };
    let cache = &mut cache;
    let what = |what: &str| {
        format!(
            "{name}, {plan}, {} hot rows, {budget} bytes: {what}",
            plan.hot()
        )
    };
    step(decoder, cache, 300, &what("a start"));
    step(decoder, cache, 2_700, &what("a prompt"));
    step(decoder, cache, 1_093, &what("to a whole piece"));
    act(cache, &what("truncated"), |cache| cache.truncate(&[300]));
    step(decoder, cache, 1, &what("after that"));
    act(cache, &what("a draft"), CacheBackend::begin_draft);
    step(decoder, cache, 40, &what("in a draft"));
    act(cache, &what("discarded"), |cache| {
        cache.end_draft(Draft::Discard)
    });
    step(decoder, cache, 1, &what("after that"));
    act(cache, &what("parked"), CacheBackend::park);
    step(decoder, cache, 1, &what("after that"));
    let state = cache.state().expect("no draft, no step");
    act(cache, &what("reloaded"), |cache| {
        let result = cache.set_state(&state);
        drop(state);
        result
    });
    step(decoder, cache, 1, &what("after that"));
    cache.clear();
    act(cache, &what("cleared"), |_| Ok(()));
}

#[test]
#[ignore = "counts the bytes of the whole process: the other test starts it alone"]
fn bytes_by_themselves() {
    let speeds = "read 9e9; 16 tokens: projection 3e10, block 4e10, attention 1e10";
    let speeds: Throughput = speeds.parse().expect("rates of a call");
    let all = [
        ("Llama", config(4, 2)),
        ("Qwen2", qwen2()),
        ("Qwen3", qwen3()),
        ("Gemma", gemma()),
    ];
    for (name, config) in all {
        let decoder = wide(config);
        let shape = decoder.shape();
        let planner = Planner::new(&shape, &speeds, 4_100)
            .expect("sizes are known")
            .with_steps_of(2_700);
        let all = Plan::keep_top(&shape, shape.layers()).expect("as many layers");
        let room = planner.cost(&all).expect("a cost").peak() - planner.smallest();
        // What kernels make for themselves once, for shapes like these, is no cache's.
        let warm = Plan::tokens(&shape).with_chunk(16);
        let config = ResidualConfig::new(warm);
        let cache = ResidualCheckpoint::new(&shape, decoder.conformance(), config);
        let mut cache = cache.expect("the probe passed");
        for count in [4_000, 1] {
            feed(&decoder, &mut cache, &tokens(1, count)[..]);
        }
        drop(cache);
        // The smallest budget, and one with room for some of the layers.
        let budget = match name {
            "Llama" | "Gemma" => planner.smallest(),
            _ => planner.smallest() + room / 3,
        };
        let plan = planner.plan(budget).expect("no less than the smallest");
        run(&decoder, &plan, budget, name);
    }
}

#[test]
fn a_cache_with_a_budget_holds_what_it_says() {
    passes_alone("budget_bytes::bytes_by_themselves");
}
