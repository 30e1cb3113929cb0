//! How many replays there are: one a step, and none where the budget still has room.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::Relaxed},
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

use crate::support::{
    caches::{CacheExt as _, checkpoint},
    feed::feed,
    models::{random_decoder, with_windows},
    random::tokens,
};

/// A block that counts the tokens it processes.
struct Counted<'a> {
    block: &'a dyn Replay,
    processed: &'a AtomicUsize,
}

impl Replay for Counted<'_> {
    fn embed(&self, tokens: &TokenIds, positions: &Positions) -> Result<Tensor<3>, CacheError> {
        self.block.embed(tokens, positions)
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
        self.processed.fetch_add(residual.dims()[1], Relaxed);
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

/// A cache that counts the tokens its replays process, once for each block.
#[derive(Debug)]
struct Counting {
    inner: ResidualCheckpoint,
    processed: Arc<AtomicUsize>,
}

impl Counting {
    fn new(decoder: &Decoder, config: ResidualConfig) -> Self {
        Self {
            inner: checkpoint(decoder, config),
            processed: Arc::default(),
        }
    }

    /// Tokens processed by blocks since the last call.
    fn replayed(&self) -> usize {
        self.processed.swap(0, Relaxed)
    }
}

impl CacheBackend for Counting {
    fn keys_values(&mut self, layer: LayerIndex, span: Span<'_>) -> Result<KeysValues, CacheError> {
        let replay = Counted {
            block: span.replay,
            processed: &self.processed,
        };
        let span = Span::new(span.positions, span.residual, span.projection, &replay);
        self.inner.keys_values(layer, span)
    }

    forward_backend!(self => self.inner; begin wants observe commit queries lifecycle clear fork);
}

#[test]
fn the_tokens_of_a_step_share_one_replay() {
    let decoder = random_decoder(&DecoderConfig::new(97, 64, 4, 4, 2));
    let plan = Plan::tokens(&decoder.shape()).with_hot(5).with_chunk(8);
    for count in [1, 3, 30] {
        let mut cache = Counting::new(&decoder, ResidualConfig::new(plan.clone()));
        feed(&decoder, &mut cache, &tokens(1, 69)[..]);
        assert_eq!(cache.replayed(), 0, "nothing was old");
        feed(&decoder, &mut cache, &tokens(2, count)[..]);
        // 64 old tokens through three of four layers, whatever the length of the step.
        assert_eq!(cache.replayed(), 3 * 64, "a step of {count}");
        cache.truncate_all(69).expect("the last step");
        feed(&decoder, &mut cache, &tokens(2, 1)[..]);
        // Hot tokens that this step displaced are rebuilt once.
        let missing = 64 + count.min(5_usize);
        assert_eq!(cache.replayed(), 3 * missing);
        feed(&decoder, &mut cache, &tokens(2, 1)[..]);
        assert_eq!(cache.replayed(), 3 * 65);
    }
    let stored = Plan::retain_top(&decoder.shape(), 2).expect("four layers");
    let mut cache = Counting::new(&decoder, ResidualConfig::new(stored.with_chunk(8)));
    feed(&decoder, &mut cache, &tokens(1, 64)[..]);
    feed(&decoder, &mut cache, &tokens(1, 1)[..]);
    assert_eq!(
        cache.replayed(),
        64,
        "what the plan stores is not computed again"
    );
}

/// While a budget has room nothing is replayed. Later only as few layers as necessary are replayed, and fewer
/// again once there is room.
#[test]
fn bytes_left_by_the_budget_save_layers() {
    for windows in [false, true] {
        let layers: &[usize] = if windows { &[0, 2, 4, 6] } else { &[] };
        let config = DecoderConfig::new(97, 64, 8, 4, 4);
        let decoder = random_decoder(&with_windows(config, layers, 20));
        let shape = decoder.shape();
        let plan = Plan::tokens(&shape).with_hot(16).with_chunk(8);
        let budget = plan.cost(&shape, 1500).expect("a cost").peak()
            + shape.keys_values_per_old_token() * 500;
        let config = ResidualConfig::new(plan).with_byte_budget(budget);
        let mut cache = Counting::new(&decoder, config);
        let mut full = FullKv::new(&shape);
        let mut text = Vec::new();
        let mut replayed = Vec::new();
        let step = |cache: &mut Counting, full: &mut FullKv, ids: &[u32]| {
            let [found, expected] = [feed(&decoder, cache, ids), feed(&decoder, full, ids)];
            assert!(found == expected, "{} tokens", full.length(0));
            let memory = cache.memory();
            assert!(
                memory.total() + memory.scratch_peak <= budget,
                "{memory:?} of {budget}"
            );
            cache.replayed()
        };
        for ids in tokens(3, 1_440).chunks(30) {
            text.extend_from_slice(ids);
            replayed.push(step(&mut cache, &mut full, ids));
        }
        assert!(
            replayed[..6].iter().all(|&count| count == 0),
            "{replayed:?}"
        );
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
        assert_eq!(step(&mut cache, &mut full, &[2]), 0, "rebuilt entries stay");
    }
}
