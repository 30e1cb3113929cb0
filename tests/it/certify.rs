//! Certified eviction: where rebuilt rows have other bits, the rows stay and the logits keep theirs.

use crate::support::CacheExt as _;
use std::num::NonZeroUsize;

use burn::tensor::{DType, Device, Tensor, TensorData};
use kv_direct::{
    cache::{
        CacheBackend, CacheError, Draft, KeysValues, LayerIndex, Projection, Replay, Span, TokenIds,
    },
    exact::conformance::Conformance,
    forward_backend,
    model::{Decoder, DecoderConfig},
    policy::FullKv,
    positions::Positions,
    residual::{Plan, ResidualCheckpoint, ResidualConfig},
};
use proptest::{prelude::*, test_runner::TestRunner};

use crate::{
    engine::Engine,
    support::{feed, random, tokens},
};

/// A block whose products have other bits in a replay than in a step, for about one row in `one_in`: which, is
/// told by the row's bits, so that it is the same ones in every replay.
struct Unstable<'a> {
    block: &'a dyn Replay,
    one_in: u32,
}

impl Unstable<'_> {
    /// Rows of `of`, `width` numbers each, changed in the last bit where the row of `residual` says so.
    fn shaken<const D: usize>(&self, of: Tensor<D>, residual: &Tensor<3>) -> Tensor<D> {
        let tokens = residual.dims()[1];
        let rows = residual.clone().into_data();
        let rows = rows.as_slice::<f32>().expect("f32");
        let shaken: Vec<f32> = rows
            .chunks_exact(rows.len() / tokens)
            .map(|row| {
                let hash = row.iter().fold(0u32, |hash, x| {
                    (hash ^ x.to_bits())
                        .wrapping_mul(0x9e37_79b1)
                        .rotate_left(5)
                });
                if hash % self.one_in == 0 {
                    1.0 + f32::EPSILON
                } else {
                    1.0
                }
            })
            .collect();
        let mut shape = [1; D];
        shape[D - 2] = tokens;
        let device = of.device();
        of * Tensor::<D>::from_data(TensorData::new(shaken, shape), &device)
    }
}

impl Replay for Unstable<'_> {
    fn embed(&self, tokens: &TokenIds) -> Result<Tensor<3>, CacheError> {
        self.block.embed(tokens)
    }

    fn project(
        &self,
        residual: Tensor<3>,
        positions: &Positions,
    ) -> Result<Projection, CacheError> {
        let Projection { keys, values } = self.block.project(residual.clone(), positions)?;
        let values = self.shaken(values, &residual);
        Ok(Projection { keys, values })
    }

    fn forward(
        &self,
        residual: Tensor<3>,
        positions: &Positions,
        keys_values: &KeysValues,
    ) -> Result<Tensor<3>, CacheError> {
        let rows = self
            .block
            .forward(residual.clone(), positions, keys_values)?;
        Ok(self.shaken(rows, &residual))
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

/// A cache whose replays are unstable.
#[derive(Debug)]
struct Shaken {
    inner: ResidualCheckpoint,
    one_in: u32,
}

impl CacheBackend for Shaken {
    fn keys_values(&mut self, layer: LayerIndex, span: Span<'_>) -> Result<KeysValues, CacheError> {
        let replay = Unstable {
            block: span.replay,
            one_in: self.one_in,
        };
        let span = Span::new(span.positions, span.residual, span.projection, &replay);
        self.inner.keys_values(layer, span)
    }

    forward_backend!(self => self.inner; begin wants observe commit queries lifecycle clear fork);
}

fn cache(decoder: &Decoder, plan: Plan, certified: bool) -> ResidualCheckpoint {
    let config = ResidualConfig::new(plan)
        .even_if_larger()
        .with_certified_eviction(certified);
    ResidualCheckpoint::new(&decoder.shape(), decoder.conformance(), config).expect("a plan")
}

fn decoders() -> [Decoder; 2] {
    let mut config = DecoderConfig::new(97, 64, 4, 4, 2);
    let plain = random(&config);
    for layer in [0, 2] {
        config.layers[layer].window = NonZeroUsize::new(9);
    }
    [plain, random(&config)]
}

/// Feeds both the same calls; answers how many gave other bits.
fn differing(decoder: &Decoder, cache: &mut dyn CacheBackend, calls: &[usize]) -> usize {
    let mut full = FullKv::new(&decoder.shape());
    let calls = calls.iter().enumerate().filter(|&(index, &count)| {
        let ids = tokens(index as u64, count);
        feed(decoder, &mut full, &ids[..]) != feed(decoder, cache, &ids[..])
    });
    calls.count()
}

#[test]
fn a_block_that_differs_stays_and_the_logits_are_those_of_full_kv() {
    let calls = [150, 1, 40, 1, 1, 70, 1, 130, 1];
    for decoder in decoders() {
        let shape = decoder.shape();
        for plan in [Plan::tokens(&shape), Plan::residuals(&shape)] {
            let plan = plan.with_hot(20).with_chunk(16);
            let shaken = |certified, one_in| Shaken {
                inner: cache(&decoder, plan.clone(), certified),
                one_in,
            };
            let wrong = differing(&decoder, &mut shaken(false, 40), &calls);
            assert!(wrong > 0, "{plan}: this matmul is stable");

            let mut some = shaken(true, 40);
            assert_eq!(differing(&decoder, &mut some, &calls), 0, "{plan}");
            let memory = some.memory();
            assert!(memory.blocks_kept > 0, "{plan}: {memory:?}");
            assert!(memory.blocks_certified > 0, "{plan}: {memory:?}");

            // What stays is whole blocks, beside the hot rows and those of a block that is not full yet.
            let mut none = shaken(true, u32::MAX);
            assert_eq!(differing(&decoder, &mut none, &calls), 0, "{plan}");
            assert_eq!(none.memory().blocks_kept, 0, "{plan}");
            let more = memory.keys_values - none.memory().keys_values;
            assert_eq!(
                more,
                memory.blocks_kept * 16 * 2 * shape.kv_width() * 4,
                "{plan}"
            );
        }
    }
}

/// A real device whose probe fails: one row is another sum than many, in f16 on the CPU.
#[test]
fn f16_is_certified_by_default_and_has_the_bits_of_full_kv() {
    let engine = Engine::new(DType::F16, 4);
    let (shape, device) = (engine.shape(), Device::flex());
    let conformance = Conformance::probe(&shape.kernels, &device, DType::F16);
    assert!(!conformance.is_exact());
    let plan = Plan::tokens(&shape).with_hot(8);
    let mut ours = ResidualCheckpoint::new(&shape, &conformance, plan).expect("certified");
    let mut full = FullKv::new(&shape);
    let mut ids = &tokens(3, 360)[..];
    // Many rows in a call are rebuilt to the bit, single ones are not.
    for count in [200, 64].into_iter().chain([1; 96]) {
        let (call, rest) = ids.split_at(count);
        assert!(
            engine.feed(&mut full, call) == engine.feed(&mut ours, call),
            "{ids:?}"
        );
        ids = rest;
    }
    let memory = ours.memory();
    assert!(
        memory.blocks_certified >= 6 && memory.blocks_kept >= 1,
        "{memory:?}"
    );
}

#[test]
fn a_budget_error_says_that_rows_stay_because_they_differ() {
    let [decoder, _] = decoders();
    let shape = decoder.shape();
    let plan = Plan::tokens(&shape).with_hot(16).with_chunk(16);
    let budget = plan.cost(&shape, 600).expect("a cost").peak() * 3 / 2;
    let config = ResidualConfig::new(plan)
        .with_certified_eviction(true)
        .with_byte_budget(budget);
    let inner = ResidualCheckpoint::new(&shape, decoder.conformance(), config).expect("a plan");
    let mut shaken = Shaken { inner, one_in: 2 };
    let mut full = FullKv::new(&shape);
    let ids = tokens(5, 600);
    for (index, call) in ids.chunks(20).enumerate() {
        let before = shaken.memory();
        assert!(before.total() + before.scratch_peak <= budget, "{before:?}");
        match decoder.forward(call, &mut shaken) {
            Ok(logits) => {
                let expected = decoder.forward(call, &mut full).expect("no budget");
                assert!(logits.into_data() == expected.into_data(), "call {index}");
            }
            Err(error) => {
                let text =
                    std::error::Error::source(&error).map_or(error.to_string(), |e| e.to_string());
                assert!(
                    text.contains("entries stay because they had other bits"),
                    "{text}"
                );
                assert_eq!(
                    shaken.length(0),
                    20 * index,
                    "a refused call changes nothing"
                );
                return;
            }
        }
    }
    panic!("a budget of {budget} bytes was never too small");
}

#[test]
fn what_a_certificate_cannot_cover_is_refused() {
    let [decoder, windows] = decoders();
    let plan = |decoder: &Decoder| Plan::tokens(&decoder.shape()).with_hot(4);
    let mut ours = cache(&decoder, plan(&decoder), true);
    let two = TokenIds::from(vec![vec![1, 2], vec![3]]);
    assert!(matches!(
        decoder.forward(two, &mut ours),
        Err(kv_direct::model::ForwardError::Cache(
            CacheError::Sequences {
                expected: 1,
                found: 2
            }
        ))
    ));
    feed(&decoder, &mut ours, &tokens(1, 100)[..]);
    let unsupported = |result| matches!(result, Err(CacheError::Unsupported { .. }));
    assert!(unsupported(ours.park()) && unsupported(ours.state().map(drop)));
    assert!(matches!(
        ours.select_sequences(&[0, 0]),
        Err(CacheError::Sequences { .. })
    ));

    let mut ours = cache(&windows, plan(&windows), true);
    feed(&windows, &mut ours, &tokens(1, 100)[..]);
    feed(&windows, &mut ours, &tokens(2, 100)[..]);
    assert!(matches!(
        ours.truncate_all(50),
        Err(CacheError::Irreversible { .. })
    ));
    ours.truncate_all(100).expect("the last call can be undone");
}

#[derive(Debug, Clone)]
enum Act {
    Feed(usize),
    Truncate(f64),
    Draft(usize, bool),
}

#[test]
fn any_life_of_a_certified_cache_is_that_of_full_kv() {
    let decoders = decoders();
    let act = prop_oneof![
        4 => (1_usize..90).prop_map(Act::Feed),
        2 => Just(Act::Feed(1)),
        2 => (0.0..1.0).prop_map(Act::Truncate),
        1 => ((1_usize..30), any::<bool>()).prop_map(|(count, keep)| Act::Draft(count, keep)),
    ];
    let strategy = (
        0_usize..2,
        0_usize..40,
        0_usize..3,
        prop::collection::vec(act, 2..9),
    );
    let mut runner = TestRunner::new(ProptestConfig {
        cases: 48,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    let result = runner.run(&strategy, |(model, hot, chunk, acts)| {
        let decoder = &decoders[model];
        let shape = decoder.shape();
        let plan = Plan::tokens(&shape).with_hot(hot).with_chunk(16 << chunk);
        let mut ours = Shaken {
            inner: cache(decoder, plan, true),
            one_in: 60,
        };
        let mut full = FullKv::new(&shape);
        for (index, act) in acts.into_iter().enumerate() {
            let ids = |count| tokens(index as u64, count);
            let both = |ours: &mut Shaken, full: &mut FullKv, count: usize| {
                feed(decoder, ours, &ids(count)[..]) == feed(decoder, full, &ids(count)[..])
            };
            match act {
                Act::Feed(count) => prop_assert!(both(&mut ours, &mut full, count), "act {index}"),
                Act::Truncate(share) => {
                    let to = (full.length(0) as f64 * share) as usize;
                    if ours.truncate_all(to).is_ok() {
                        full.truncate_all(to).expect("nothing was dropped");
                    }
                }
                Act::Draft(count, keep) => {
                    ours.begin_draft().expect("no draft");
                    full.begin_draft().expect("no draft");
                    prop_assert!(both(&mut ours, &mut full, count), "act {index}");
                    if keep {
                        ours.end_draft(Draft::Accept).expect("a draft");
                        full.end_draft(Draft::Accept).expect("a draft");
                    } else {
                        ours.end_draft(Draft::Discard).expect("a draft");
                        full.end_draft(Draft::Discard).expect("a draft");
                    }
                }
            }
            prop_assert_eq!(ours.length(0), full.length(0));
        }
        Ok(())
    });
    if let Err(error) = result {
        panic!("{error}");
    }
}
