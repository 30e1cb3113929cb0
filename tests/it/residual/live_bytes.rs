//! What a cache with a byte budget reports is what the process holds, call by call.

use kv_direct::{
    cache::{CacheBackend, CacheError, Draft, KeysValues, LayerIndex, Span, Step},
    forward_backend,
    model::{Decoder, DecoderConfig},
    planner::{Planner, Throughput},
    residual::{Plan, ResidualCheckpoint, ResidualConfig},
};

use crate::support::{
    allocator::{MIB, live, measure_all, near},
    caches::{CacheExt as _, checkpoint},
    feed::feed,
    models::{config, gemma, qwen2, qwen3, random_decoder, with_windows},
    process::passes_alone,
    random::tokens,
};

/// Measures every call of the trait.
#[derive(Debug)]
struct Measured {
    inner: ResidualCheckpoint,
    /// What the process holds beside the cache.
    base: isize,
    /// The most bytes held during calls since this was last reset.
    most: usize,
}

impl Measured {
    fn measured<R>(&mut self, call: impl FnOnce(&mut ResidualCheckpoint) -> R) -> R {
        let held = (live() - self.base).unsigned_abs();
        let (result, peak, _) = measure_all(|| call(&mut self.inner));
        self.most = self.most.max(held + peak);
        result
    }

    /// Compares what is held with what the cache reports.
    fn check(&mut self, what: &str) {
        let memory = self.memory();
        let held = (live() - self.base).unsigned_abs();
        assert!(
            near(held, memory.total()),
            "{what}: {held} bytes are held, reported {memory:?}"
        );
    }

    /// The most bytes that the cache reports, if it held `before` bytes before.
    fn reported(&self, before: usize) -> usize {
        let memory = self.memory();
        before.max(memory.total() + memory.scratch_peak)
    }
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

    fn select_sequences(&mut self, sequences: &[usize]) -> Result<(), CacheError> {
        self.measured(|cache| cache.select_sequences(sequences))
    }

    fn park(&mut self) -> Result<(), CacheError> {
        self.measured(CacheBackend::park)
    }
}

/// 6 KiB of keys and values a token; narrow otherwise, so that the cache is most of what is held.
fn wide(mut config: DecoderConfig) -> Decoder {
    let layer = config.layers[1].clone();
    (config.hidden, config.heads, config.kv_heads) = (32, 4, 4);
    (config.head_dim, config.intermediate, config.max_positions) = (32, 32, 8_192);
    config.layers.resize(6, layer);
    if config.layers[0].window.is_some() {
        config = with_windows(config, &[0, 2, 4], 700);
    }
    random_decoder(&config)
}

/// Feeds tokens, then one more, and compares after both. The activations of a long step do not belong to the
/// cache, so the peak is compared for short steps only.
fn step(decoder: &Decoder, cache: &mut Measured, count: usize, what: &str) {
    let more = (count > 1).then_some(1);
    for count in [count].into_iter().chain(more) {
        let before = cache.memory().total();
        cache.most = 0;
        drop(feed(decoder, cache, &tokens(count as u64, count)[..]));
        let what = format!("{what}, {count} more, {} tokens", cache.length(0));
        cache.check(&what);
        let (most, reported) = (cache.most, cache.reported(before));
        assert!(
            count > 100 || near(most, reported),
            "{what}: at most {most} bytes, reported {reported}: {:?}",
            cache.memory()
        );
    }
}

/// Calls something else on the cache, and compares.
fn perform(
    cache: &mut Measured,
    what: &str,
    call: impl FnOnce(&mut Measured) -> Result<(), CacheError>,
) {
    let before = cache.memory().total();
    cache.most = 0;
    call(cache).expect("it can be done here");
    cache.check(what);
    let (most, reported) = (cache.most, cache.reported(before));
    assert!(
        most <= reported + reported / 10 + MIB,
        "{what}: at most {most} bytes, reported {reported}"
    );
}

fn run(decoder: &Decoder, plan: &Plan, budget: usize, name: &str) {
    let config = ResidualConfig::new(plan.clone()).with_byte_budget(budget);
    let base = live();
    let mut cache = Measured {
        inner: checkpoint(decoder, config),
        base,
        most: 0,
    };
    let cache = &mut cache;
    let what = |what: &str| {
        format!(
            "{name}, {plan}, {} hot tokens, {budget} bytes: {what}",
            plan.hot()
        )
    };
    step(decoder, cache, 300, &what("a start"));
    step(decoder, cache, 2_700, &what("a prompt"));
    step(decoder, cache, 1_093, &what("to a whole block"));
    perform(cache, &what("truncated"), |cache| cache.truncate(&[300]));
    step(decoder, cache, 1, &what("after that"));
    perform(cache, &what("a draft"), CacheBackend::begin_draft);
    step(decoder, cache, 40, &what("in a draft"));
    perform(cache, &what("discarded"), |cache| {
        cache.end_draft(Draft::Discard)
    });
    step(decoder, cache, 1, &what("after that"));
    perform(cache, &what("parked"), CacheBackend::park);
    step(decoder, cache, 1, &what("after that"));
    let state = cache.state().expect("no open draft or step");
    perform(cache, &what("reloaded"), |cache| {
        let result = cache.set_state(&state);
        drop(state);
        result
    });
    step(decoder, cache, 1, &what("after that"));
    cache.clear();
    perform(cache, &what("cleared"), |_| Ok(()));
}

#[test]
#[ignore = "counts the bytes of the whole process: the other test starts it in a process of its own"]
fn measured_alone() {
    let throughput = "read 9e9; 16 tokens: projection 3e10, block 4e10, attention 1e10";
    let throughput: Throughput = throughput.parse().expect("a throughput");
    let all = [
        ("Llama", config(4, 2)),
        ("Qwen2", qwen2()),
        ("Qwen3", qwen3()),
        ("Gemma", gemma()),
    ];
    for (name, config) in all {
        let decoder = wide(config);
        let shape = decoder.shape();
        let planner = Planner::new(&shape, &throughput, 4_100)
            .expect("sizes are known")
            .with_steps_of(2_700);
        let all = Plan::retain_top(&shape, shape.layers()).expect("as many layers");
        let room = planner.cost(&all).expect("a cost").peak() - planner.smallest();
        // Buffers that kernels make once for shapes like these do not belong to a cache.
        let warm = Plan::tokens(&shape).with_chunk(16);
        let config = ResidualConfig::new(warm);
        let mut cache = checkpoint(&decoder, config);
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
fn a_cache_within_a_budget_holds_what_it_reports() {
    passes_alone(module_path!(), "measured_alone");
}
