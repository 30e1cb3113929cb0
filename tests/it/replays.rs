//! How many replays there are: one a call, and none where the budget still has room.

use crate::support::CacheExt as _;
use std::{
    num::NonZeroUsize,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use burn::tensor::Tensor;
use kv_direct::{
    cache::{CacheBackend, CacheError, KeysValues, LayerIndex, Projection, Replay, Span, TokenIds},
    forward_backend,
    model::{Decoder, DecoderConfig},
    policy::FullKv,
    positions::Positions,
    residual::{Plan, ResidualCheckpoint, ResidualConfig},
};

use crate::support::{feed, random, tokens};

/// A block that counts the rows it takes through.
struct Counted<'a> {
    block: &'a dyn Replay,
    rows: &'a AtomicUsize,
}

impl Replay for Counted<'_> {
    fn embed(&self, tokens: &TokenIds) -> Result<Tensor<3>, CacheError> {
        self.block.embed(tokens)
    }

    fn project(
        &self,
        residual: Tensor<3>,
        positions: &Positions,
    ) -> Result<Projection, CacheError> {
        self.block.project(residual, positions)
    }

    fn forward(
        &self,
        residual: Tensor<3>,
        positions: &Positions,
        keys_values: &KeysValues,
    ) -> Result<Tensor<3>, CacheError> {
        self.rows.fetch_add(residual.dims()[1], Relaxed);
        self.block.forward(residual, positions, keys_values)
    }

    fn rotate(
        &self,
        keys: Tensor<4>,
        from: &Positions,
        to: &Positions,
    ) -> Result<Tensor<4>, CacheError> {
        self.block.rotate(keys, from, to)
    }
}

/// A cache that counts the rows its replays take through blocks.
#[derive(Debug)]
struct Counting {
    inner: ResidualCheckpoint,
    rows: Arc<AtomicUsize>,
}

impl Counting {
    fn new(decoder: &Decoder, config: ResidualConfig) -> Self {
        let config = config;
        let cache = ResidualCheckpoint::new(&decoder.shape(), decoder.conformance(), config);
        Self {
            inner: cache.expect("a plan"),
            rows: Arc::default(),
        }
    }

    /// Rows through blocks since the last time.
    fn replayed(&self) -> usize {
        self.rows.swap(0, Relaxed)
    }
}

impl CacheBackend for Counting {
    fn keys_values(&mut self, layer: LayerIndex, span: Span<'_>) -> Result<KeysValues, CacheError> {
        let replay = Counted {
            block: span.replay,
            rows: &self.rows,
        };
        let span = Span::new(span.positions, span.residual, span.projection, &replay);
        self.inner.keys_values(layer, span)
    }

    forward_backend!(self => self.inner; begin wants observe commit queries lifecycle clear fork);
}

#[test]
fn the_tokens_of_a_call_share_one_replay_and_the_last_layer_only_projects() {
    let decoder = random(&DecoderConfig::new(97, 64, 4, 4, 2));
    let plan = Plan::tokens(&decoder.shape()).with_hot(5).with_chunk(8);
    for call in [1, 3, 30] {
        let mut cache = Counting::new(&decoder, ResidualConfig::new(plan.clone()));
        feed(&decoder, &mut cache, &tokens(1, 69)[..]);
        assert_eq!(cache.replayed(), 0, "nothing was old");
        feed(&decoder, &mut cache, &tokens(2, call)[..]);
        // 64 old rows through three of four layers, however many tokens come.
        assert_eq!(cache.replayed(), 3 * 64, "a call of {call}");
        cache.truncate_all(69).expect("the last call");
        feed(&decoder, &mut cache, &tokens(2, 1)[..]);
        // Hot rows that were let go of with those that came are rebuilt once.
        let missing = 64 + call.min(5);
        assert_eq!(cache.replayed(), 3 * missing.next_multiple_of(8));
        feed(&decoder, &mut cache, &tokens(2, 1)[..]);
        assert_eq!(cache.replayed(), 3 * 72);
    }
    let kept = Plan::keep_top(&decoder.shape(), 2).expect("four layers");
    let mut cache = Counting::new(&decoder, ResidualConfig::new(kept.with_chunk(8)));
    feed(&decoder, &mut cache, &tokens(1, 64)[..]);
    feed(&decoder, &mut cache, &tokens(1, 1)[..]);
    assert_eq!(
        cache.replayed(),
        64,
        "what the plan keeps is not computed again"
    );
}

/// While a budget has room nothing is replayed; then as few layers as it takes, and fewer again once there is
/// room again.
#[test]
fn what_a_budget_leaves_free_saves_replays() {
    for windows in [false, true] {
        let mut config = DecoderConfig::new(97, 64, 8, 4, 4);
        for layer in (0..8).step_by(2).filter(|_| windows) {
            config.layers[layer].window = NonZeroUsize::new(20);
        }
        let decoder = random(&config);
        let shape = decoder.shape();
        let plan = Plan::tokens(&shape).with_hot(16).with_chunk(8);
        let budget = plan.cost(&shape, 1500).expect("a cost").peak()
            + shape.keys_values_per_old_token() * 500;
        let config = ResidualConfig::new(plan).with_byte_budget(budget);
        let mut cache = Counting::new(&decoder, config);
        let mut full = FullKv::new(&shape);
        let mut text = Vec::new();
        let mut replayed = Vec::new();
        let step = |cache: &mut Counting, full: &mut FullKv, call: &[u32]| {
            let [found, expected] = [feed(&decoder, cache, call), feed(&decoder, full, call)];
            assert!(found == expected, "{} tokens", full.length(0));
            let memory = cache.memory();
            assert!(
                memory.total() + memory.scratch_peak <= budget,
                "{memory:?} of {budget}"
            );
            cache.replayed()
        };
        for call in tokens(3, 1_440).chunks(30) {
            text.extend_from_slice(call);
            replayed.push(step(&mut cache, &mut full, call));
        }
        assert!(replayed[..6].iter().all(|&rows| rows == 0), "{replayed:?}");
        let layers = replayed.last().expect("steps") / (1_410_usize - 16).next_multiple_of(8);
        assert!(
            (1..8).contains(&layers),
            "{layers} layers are replayed at the end"
        );
        assert!(replayed.is_sorted(), "{replayed:?}");

        cache.truncate_all(90).expect("every length can be reached");
        full.truncate_all(90)
            .or_else(|_| {
                full.clear();
                decoder.forward(&text[..90], &mut full).map(drop)
            })
            .expect("the same text");
        step(&mut cache, &mut full, &[1]);
        assert_eq!(step(&mut cache, &mut full, &[2]), 0, "what came back stays");
    }
}
