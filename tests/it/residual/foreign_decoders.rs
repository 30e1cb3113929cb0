//! Decoders of other crates, of every kind of block: exact where they repeat bits, certified where they do not.

use std::{collections::BTreeMap, sync::Mutex};

use burn::tensor::{DType, Device, Tensor};
use kv_direct::{
    cache::{CacheBackend, CacheError, KeysValues, LayerIndex, Projection, Replay, Span, TokenIds},
    exact::{CheckKind, Conformance},
    forward_backend,
    policy::{FullKv, StreamingLlm, StreamingLlmConfig},
    positions::Positions,
    residual::{Plan, ResidualCheckpoint, ResidualConfig, Retain},
};
use proptest::{prelude::*, test_runner::TestCaseError};

use crate::support::{
    cases::{check, runner},
    feed::bits,
    foreign::{Foreign, Kind, Place},
    plans::retain,
    random::tokens,
};

fn kind(stock: bool) -> impl Strategy<Value = Kind> {
    let heads = (
        1_usize..5,
        1_usize..4,
        prop_oneof![Just(8_usize), Just(32), Just(64)],
    );
    let flags = prop::array::uniform4(any::<bool>());
    let place = prop_oneof![Just(Place::Rotary), Just(Place::Learned), Just(Place::None)];
    (48_usize..1_101, heads, flags, place, 1_usize..900).prop_map(
        move |(
            hidden,
            (kv_heads, group, head_dim),
            [fused, gated, layer_norm, biases],
            place,
            inner,
        )| Kind {
            hidden,
            heads: kv_heads * group,
            kv_heads,
            head_dim,
            inner,
            layers: 3,
            vocab: 97,
            context: 700,
            fused,
            gated,
            layer_norm,
            biases,
            place,
            stock,
        },
    )
}

/// Feeds the same steps to both caches. Returns how many have other bits.
fn differing(
    decoder: &Foreign,
    caches: [&mut dyn CacheBackend; 2],
    steps: &[TokenIds],
) -> Result<usize, TestCaseError> {
    let [one, other] = caches;
    let mut differing = 0;
    for step in steps {
        let [one, other] = [&mut *one, &mut *other].map(|cache| {
            decoder
                .forward(step.clone(), cache)
                .map(|logits| bits(&logits))
        });
        let pair = (one.expect("it runs"), other.expect("it runs"));
        differing += usize::from(pair.0 != pair.1);
    }
    Ok(differing)
}

/// A text in these steps.
fn text(steps: &[usize]) -> Vec<TokenIds> {
    let step = |(index, &count): (usize, &usize)| TokenIds::from(&tokens(index as u64, count)[..]);
    steps.iter().enumerate().map(step).collect()
}

#[test]
fn a_decoder_on_exact_routines_has_the_bits_of_full_kv_in_every_plan() {
    let layers = prop::collection::vec(retain(), 3);
    let sizes = prop::collection::vec(prop_oneof![Just(1_usize), 1_usize..90], 2..7);
    let strategy = (
        kind(false),
        layers,
        0_usize..70,
        1_usize..80,
        sizes,
        any::<u64>(),
    );
    check(
        runner(8),
        &strategy,
        |(kind, layers, hot, chunk, sizes, seed)| {
            let decoder = Foreign::new(kind, seed);
            let shape = decoder.shape();
            let report = decoder.conformance(90);
            prop_assert!(report.is_exact(), "{report}");
            let mine = Plan::new(&shape, layers).expect("a plan for three layers");
            for plan in [
                mine.with_chunk(chunk),
                Plan::tokens(&shape),
                Plan::residuals(&shape),
            ] {
                let config = ResidualConfig::new(plan.with_hot(hot)).even_if_larger();
                let mut found =
                    ResidualCheckpoint::new(&shape, &report, config).expect("it repeats bits");
                let mut full = FullKv::new(&shape);
                // Two sequences, one of them shorter.
                let batch = |(index, &count): (usize, &usize)| {
                    let seed = seed.wrapping_add(index as u64);
                    TokenIds::from(vec![
                        tokens(seed, count),
                        tokens(seed ^ 1, count.div_ceil(2)),
                    ])
                };
                let steps: Vec<TokenIds> = sizes.iter().enumerate().map(batch).collect();
                let caches: [&mut dyn CacheBackend; 2] = [&mut found, &mut full];
                prop_assert_eq!(differing(&decoder, caches, &steps)?, 0);
                found.park().expect("it rebuilds");
                let caches: [&mut dyn CacheBackend; 2] = [&mut found, &mut full];
                prop_assert_eq!(differing(&decoder, caches, &steps[..1])?, 0);
                prop_assert_eq!(found.memory().blocks_certified, 0);
            }
            Ok(())
        },
    );
}

#[test]
fn a_decoder_on_stock_operations_has_the_bits_of_full_kv_by_certificates() {
    let sizes = prop::collection::vec(prop_oneof![Just(1_usize), 1_usize..90], 2..7);
    let strategy = (kind(true), any::<bool>(), sizes, any::<u64>());
    check(runner(8), &strategy, |(kind, residuals, sizes, seed)| {
        let decoder = Foreign::new(kind, seed);
        let shape = decoder.shape();
        let plan = match residuals {
            true => Plan::residuals(&shape),
            false => Plan::tokens(&shape),
        };
        let config = ResidualConfig::new(plan.with_hot(8)).even_if_larger();
        // The routines of `exact` repeat bits. Nothing is said of the decoder.
        let report = Conformance::of(&shape.kernels, &Device::flex(), DType::F32);
        prop_assert!(report.is_exact() && !report.covers_decoder());
        let mut found = ResidualCheckpoint::new(&shape, &report, config).expect("it certifies");
        let mut full = FullKv::new(&shape);
        let steps: Vec<usize> = [200].into_iter().chain(sizes).collect();
        let caches: [&mut dyn CacheBackend; 2] = [&mut found, &mut full];
        prop_assert_eq!(differing(&decoder, caches, &text(&steps))?, 0);
        let memory = found.memory();
        prop_assert!(
            memory.blocks_certified + memory.blocks_kept > 0,
            "{memory:?}"
        );
        Ok(())
    });
}

/// The entries that each call of `forward` may read, by layer and by the positions of the call.
type Calls = Mutex<BTreeMap<(usize, Vec<usize>), usize>>;

/// Notes what a replay is given.
struct Noting<'a> {
    replay: &'a dyn Replay,
    layer: usize,
    calls: &'a Calls,
}

impl Replay for Noting<'_> {
    fn embed(&self, tokens: &TokenIds, positions: &Positions) -> Result<Tensor<3>, CacheError> {
        self.replay.embed(tokens, positions)
    }

    fn project(&self, x: Tensor<3>, positions: &Positions) -> Result<Projection, CacheError> {
        self.replay.project(x, positions)
    }

    fn forward(
        &self,
        residual: Tensor<3>,
        positions: &Positions,
        keys_values: &KeysValues,
    ) -> Result<Tensor<3>, CacheError> {
        let used = |position: &&usize| **position != Positions::EMPTY;
        let segments = keys_values.segments(0).iter();
        let readable = segments.map(|segment| segment.positions(0).iter().filter(used).count());
        let (call, readable) = (positions.slots(0, 0).to_vec(), readable.sum());
        let before = self
            .calls
            .lock()
            .expect("no panic")
            .insert((self.layer, call), readable);
        assert_eq!(before.unwrap_or(readable), readable, "layer {}", self.layer);
        self.replay.forward(residual, positions, keys_values)
    }

    fn rotate(
        &self,
        keys: Tensor<4>,
        from: &Positions,
        to: &Positions,
    ) -> Result<Tensor<4>, CacheError> {
        self.replay.rotate(keys, from, to)
    }
}

#[derive(Debug)]
struct Noted(ResidualCheckpoint, Calls);

impl CacheBackend for Noted {
    fn keys_values(&mut self, layer: LayerIndex, span: Span<'_>) -> Result<KeysValues, CacheError> {
        let replay = Noting {
            replay: span.replay,
            layer: layer.index(),
            calls: &self.1,
        };
        let span = Span::new(span.positions, span.residual, span.projection, &replay);
        self.0.keys_values(layer, span)
    }

    forward_backend!(self => self.0; begin wants observe commit queries lifecycle clear fork);
}

/// A certificate is about a call. So the call that rebuilds a chunk is the same when the text has grown.
#[test]
fn a_chunk_that_was_certified_is_rebuilt_by_the_same_call() {
    let decoder = Foreign::new(Kind::gpt2(64, 4, 3), 0);
    let shape = decoder.shape();
    let report = Conformance::of(&shape.kernels, &Device::flex(), DType::F32);
    let config = ResidualConfig::new(Plan::tokens(&shape).with_hot(8)).even_if_larger();
    let found = ResidualCheckpoint::new(&shape, &report, config).expect("it certifies");
    let mut found = Noted(found, Calls::default());
    let mut full = FullKv::new(&shape);
    let caches: [&mut dyn CacheBackend; 2] = [&mut found, &mut full];
    let steps = text(&[200, 75, 1, 65, 71, 1, 70]);
    assert_eq!(differing(&decoder, caches, &steps).expect("it runs"), 0);
    assert!(found.0.memory().blocks_certified > 0);
    assert!(found.1.into_inner().expect("no panic").len() > 4);
}

/// Products of burn sum one row in another order than many.
#[test]
fn a_decoder_on_stock_operations_fails_its_probe_and_certifies() {
    let kind = Kind {
        stock: true,
        ..Kind::gpt2(768, 12, 2)
    };
    let decoder = Foreign::new(kind, 1);
    let shape = decoder.shape();
    let report = decoder.conformance(300);
    assert!(report.covers_decoder() && !report.is_exact(), "{report}");
    let failed = |kind| {
        report
            .checks()
            .iter()
            .any(|check| check.kind == kind && check.differing > 0)
    };
    assert!(failed(CheckKind::Steps) && failed(CheckKind::Projection) && failed(CheckKind::Block));
    assert!(!failed(CheckKind::Embedding));

    let plan = Plan::tokens(&shape).with_hot(4);
    let config = ResidualConfig::new(plan.clone()).with_certified_eviction(false);
    let refused = ResidualCheckpoint::new(&shape, &report, config);
    assert!(
        matches!(refused, Err(CacheError::NotExact(_))),
        "{refused:?}"
    );

    let mut cache = ResidualCheckpoint::new(&shape, &report, plan.clone()).expect("it certifies");
    let mut full = FullKv::new(&shape);
    let steps: Vec<usize> = [4].into_iter().chain([1; 70]).collect();
    let caches: [&mut dyn CacheBackend; 2] = [&mut cache, &mut full];
    assert_eq!(
        differing(&decoder, caches, &text(&steps)).expect("it runs"),
        0
    );
    assert!(cache.memory().blocks_kept > 0, "{:?}", cache.memory());

    // Without certificates the same decoder has other bits: the report of the routines alone does not see it.
    let routines = Conformance::of(&shape.kernels, &Device::flex(), DType::F32);
    let config = ResidualConfig::new(plan).with_certified_eviction(false);
    let mut cache = ResidualCheckpoint::new(&shape, &routines, config).expect("asked for");
    let mut full = FullKv::new(&shape);
    let caches: [&mut dyn CacheBackend; 2] = [&mut cache, &mut full];
    assert!(differing(&decoder, caches, &text(&steps)).expect("it runs") > 0);
}

/// Residuals take half the bytes of keys and values where no heads are shared.
#[test]
fn a_gpt2_is_exact_and_its_residuals_take_half_the_bytes() {
    let decoder = Foreign::new(Kind::gpt2(128, 4, 4), 2);
    let (shape, report) = (decoder.shape(), decoder.conformance(515));
    assert!(report.is_exact(), "{report}");
    let plan = Plan::new(&shape, vec![Retain::Residual; 4]).expect("four layers");
    let mut cache = ResidualCheckpoint::new(&shape, &report, plan).expect("it repeats bits");
    let mut full = FullKv::new(&shape);
    let caches: [&mut dyn CacheBackend; 2] = [&mut cache, &mut full];
    assert_eq!(
        differing(&decoder, caches, &text(&[900, 1, 60, 1, 1])).expect("it runs"),
        0
    );
    let bytes = |cache: &dyn CacheBackend| {
        let memory = cache.memory();
        memory.residuals + memory.keys_values
    };
    assert_eq!(2 * bytes(&cache), bytes(&full));
}

#[test]
fn a_probe_counts_what_a_decoder_leaves_out() {
    let decoder = Foreign::new(Kind::gpt2(64, 4, 2), 3);
    let (shape, device) = (decoder.shape(), Device::flex());
    let text = tokens(1, 20);
    let nothing =
        Conformance::probe_decoder(&shape, &device, &text, |_, _| Ok::<_, CacheError>(()));
    assert!(!nothing.expect("it runs").is_exact());
    let half = Conformance::probe_decoder(&shape, &device, &text, |ids, cache| {
        let ids = ids.sequence(0);
        decoder
            .forward(ids[..ids.len().div_ceil(2)].into(), cache)
            .map(drop)
    });
    assert!(!half.expect("it runs").is_exact());
    let twice = Conformance::probe_decoder(&shape, &device, &text, |ids, cache| {
        let ids = ids.sequence(0);
        let (one, other) = ids.split_at(ids.len() / 2);
        let parts = [one, other].into_iter().filter(|part| !part.is_empty());
        parts
            .map(|part| decoder.forward(part.into(), cache))
            .try_for_each(|logits| logits.map(drop))
    });
    assert!(!twice.expect("it runs").is_exact());
    let batch = Conformance::probe_decoder(&shape, &device, &text, |ids, cache| {
        let ids = ids.sequence(0).to_vec();
        decoder
            .forward(TokenIds::from(vec![ids.clone(), ids]), cache)
            .map(drop)
    });
    assert!(matches!(
        batch,
        Err(CacheError::Sequences {
            expected: 1,
            found: 2
        })
    ));
    for tokens in [0, 1] {
        assert!(!decoder.conformance(tokens).covers_decoder());
    }
}

#[test]
fn keys_without_rotation_are_not_re_indexed() {
    let decoder = Foreign::new(Kind::gpt2(64, 4, 2), 3);
    let refused = StreamingLlm::new(&decoder.shape(), StreamingLlmConfig::new(28));
    assert!(matches!(refused, Err(CacheError::NotRotary)), "{refused:?}");
}
