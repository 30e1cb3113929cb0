//! Certified eviction: where rebuilt entries have other bits, the entries stay and the logits keep theirs.

use burn::tensor::{DType, Device};
use kv_direct::{
    cache::{CacheBackend, CacheError, Draft, TokenIds},
    exact::Conformance,
    model::{Decoder, DecoderConfig},
    policy::FullKv,
    residual::{Plan, ResidualCheckpoint, ResidualConfig},
};
use proptest::prelude::*;

use crate::support::{
    caches::{CacheExt as _, checkpoint},
    cases::{check, runner},
    engine::Engine,
    feed::feed,
    models::{random_decoder, with_windows},
    random::tokens,
    unstable::Shaken,
};

fn cache(decoder: &Decoder, plan: Plan, certified: bool) -> ResidualCheckpoint {
    let config = ResidualConfig::new(plan)
        .even_if_larger()
        .with_certified_eviction(certified);
    checkpoint(decoder, config)
}

fn decoders() -> [Decoder; 2] {
    let config = DecoderConfig::new(97, 64, 4, 4, 2);
    [config.clone(), with_windows(config, &[0, 2], 9)].map(|config| random_decoder(&config))
}

/// Feeds both caches the same steps. Returns how many gave other bits.
fn differing(decoder: &Decoder, cache: &mut dyn CacheBackend, steps: &[usize]) -> usize {
    let mut full = FullKv::new(&decoder.shape());
    let steps = steps.iter().enumerate().filter(|&(index, &count)| {
        let ids = tokens(index as u64, count);
        feed(decoder, &mut full, &ids[..]) != feed(decoder, cache, &ids[..])
    });
    steps.count()
}

#[test]
fn a_block_that_differs_stays_and_logits_equal_full_kv() {
    let steps = [150, 1, 40, 1, 1, 70, 1, 130, 1];
    for decoder in decoders() {
        let shape = decoder.shape();
        for plan in [Plan::tokens(&shape), Plan::residuals(&shape)] {
            let plan = plan.with_hot(20).with_chunk(16);
            let shaken = |certified, one_in| Shaken {
                inner: cache(&decoder, plan.clone(), certified),
                one_in,
            };
            let wrong = differing(&decoder, &mut shaken(false, 40), &steps);
            assert!(wrong > 0, "{plan}: this matmul is stable");

            let mut some = shaken(true, 40);
            assert_eq!(differing(&decoder, &mut some, &steps), 0, "{plan}");
            let memory = some.memory();
            assert!(memory.blocks_kept > 0, "{plan}: {memory:?}");
            assert!(memory.blocks_certified > 0, "{plan}: {memory:?}");

            // Whole blocks stay, beside the hot tokens and those of a block that is not full yet.
            let mut none = shaken(true, u32::MAX);
            assert_eq!(differing(&decoder, &mut none, &steps), 0, "{plan}");
            assert_eq!(none.memory().blocks_kept, 0, "{plan}");
            let more = memory.keys_values - none.memory().keys_values;
            assert_eq!(
                more,
                memory.blocks_kept * 16 * 2 * (shape.kernels.kv_heads * shape.kernels.head_dim) * 4,
                "{plan}"
            );
        }
    }
}

/// A real device whose probe fails: in f16 on the CPU, one row is summed in another order than many.
#[test]
fn f16_is_checked_by_default_and_has_the_bits_of_full_kv() {
    let engine = Engine::new(DType::F16, 4);
    let (shape, device) = (engine.shape(), Device::flex());
    let conformance = Conformance::probe(&shape.kernels, &device, DType::F16);
    assert!(!conformance.is_exact());
    let plan = Plan::tokens(&shape).with_hot(8);
    let mut ours = ResidualCheckpoint::new(&shape, &conformance, plan).expect("certified");
    let mut full = FullKv::new(&shape);
    let mut ids = &tokens(3, 360)[..];
    // Entries of a long step are rebuilt to the bit, those of single tokens are not.
    for count in [200, 64].into_iter().chain([1; 96]) {
        let (step, rest) = ids.split_at(count);
        assert!(
            engine.feed(&mut full, step) == engine.feed(&mut ours, step),
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
fn a_budget_error_says_that_entries_stay_as_they_differ() {
    let [decoder, _] = decoders();
    let shape = decoder.shape();
    let plan = Plan::tokens(&shape).with_hot(16).with_chunk(16);
    let budget = plan.cost(&shape, 600).expect("a cost").peak() * 3 / 2;
    let config = ResidualConfig::new(plan)
        .with_certified_eviction(true)
        .with_byte_budget(budget);
    let inner = checkpoint(&decoder, config);
    let mut shaken = Shaken { inner, one_in: 2 };
    let mut full = FullKv::new(&shape);
    let ids = tokens(5, 600);
    for (index, step) in ids.chunks(20).enumerate() {
        let before = shaken.memory();
        assert!(before.total() + before.scratch_peak <= budget, "{before:?}");
        match decoder.forward(step, &mut shaken) {
            Ok(logits) => {
                let expected = decoder.forward(step, &mut full).expect("no budget");
                assert!(logits.into_data() == expected.into_data(), "step {index}");
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
                    "a refused step changes nothing"
                );
                return;
            }
        }
    }
    panic!("a budget of {budget} bytes was never too small");
}

#[test]
fn batches_parking_and_states_are_refused() {
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
    ours.truncate_all(100).expect("the last step can be undone");
}

#[derive(Debug, Clone)]
enum Call {
    Feed(usize),
    Truncate(f64),
    Draft(usize, bool),
}

#[test]
fn any_calls_give_the_bits_of_full_kv() {
    let decoders = decoders();
    let call = prop_oneof![
        4 => (1_usize..90).prop_map(Call::Feed),
        2 => Just(Call::Feed(1)),
        2 => (0.0..1.0).prop_map(Call::Truncate),
        1 => ((1_usize..30), any::<bool>()).prop_map(|(count, accept)| Call::Draft(count, accept)),
    ];
    let strategy = (
        0_usize..2,
        0_usize..40,
        0_usize..3,
        prop::collection::vec(call, 2..9),
    );
    check(runner(48), &strategy, |(model, hot, chunk, calls)| {
        let decoder = &decoders[model];
        let shape = decoder.shape();
        let plan = Plan::tokens(&shape).with_hot(hot).with_chunk(16 << chunk);
        let mut ours = Shaken {
            inner: cache(decoder, plan, true),
            one_in: 60,
        };
        let mut full = FullKv::new(&shape);
        for (index, call) in calls.into_iter().enumerate() {
            let ids = |count| tokens(index as u64, count);
            let both = |ours: &mut Shaken, full: &mut FullKv, count: usize| {
                feed(decoder, ours, &ids(count)[..]) == feed(decoder, full, &ids(count)[..])
            };
            match call {
                Call::Feed(count) => {
                    prop_assert!(both(&mut ours, &mut full, count), "call {index}")
                }
                Call::Truncate(share) => {
                    let to = (full.length(0) as f64 * share) as usize;
                    if ours.truncate_all(to).is_ok() {
                        full.truncate_all(to).expect("nothing was dropped");
                    }
                }
                Call::Draft(count, accept) => {
                    ours.begin_draft().expect("no draft");
                    full.begin_draft().expect("no draft");
                    prop_assert!(both(&mut ours, &mut full, count), "call {index}");
                    if accept {
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
}
