//! Batches whose sequences come and go, on every backend: each has the bits that it has alone.

use std::ops::ControlFlow;

use burn::tensor::DType;
use kv_direct::{
    Decoder,
    cache::{CacheBackend, CacheError, Replay, State},
    exact::Conformance,
    planner::{Planner, Throughput},
    policy::{FullKv, H2o, SnapKv, StreamingLlm, Tova, Window},
    residual::{Plan, ResidualCheckpoint, ResidualConfig},
};

use crate::support::{
    caches::checkpoint,
    feed::bits,
    kinds::{FIRST_SLIDING, Held, Kind, decoders, kinds},
    models::tiny,
    random::tokens,
    simulator::{Amount, Policy},
};

/// Some decoders and every kind of cache that serves them.
fn cases() -> impl Iterator<Item = (&'static Decoder, Kind)> {
    let some = [1, FIRST_SLIDING, FIRST_SLIDING + 2];
    some.into_iter().flat_map(|index| {
        let reindexed = |kind: &Kind| {
            let policy = Policy::Streaming {
                sinks: 2,
                recent: Amount::Entries(4),
                reindexed: true,
            };
            matches!(kind, Kind::Policy(found) if *found == policy)
        };
        let served = kinds().into_iter();
        let served = served.filter(move |kind| index < FIRST_SLIDING || !reindexed(kind));
        served.map(move |kind| (&decoders()[index], kind))
    })
}

fn make(decoder: &Decoder, kind: Kind) -> Box<dyn CacheBackend> {
    match Held::new(decoder, kind) {
        Held::Any(cache) => cache,
        Held::Residual(cache) => cache,
    }
}

/// The bits of the logits of each sequence, for a step of one token each.
fn step(decoder: &Decoder, cache: &mut dyn CacheBackend, ids: &[u32]) -> Vec<Vec<u32>> {
    let tokens: Vec<Vec<u32>> = ids.iter().map(|&id| vec![id]).collect();
    let logits = decoder.forward(tokens, cache).expect("it fits");
    let rows = bits(&logits);
    rows.chunks(rows.len() / ids.len())
        .map(<[u32]>::to_vec)
        .collect()
}

#[test]
fn sequences_join_leave_and_are_replaced() {
    for (decoder, kind) in cases() {
        let (name, make) = (format!("{kind:?}"), || make(decoder, kind));
        let prompts = [tokens(1, 20), tokens(2, 3), tokens(3, 31), tokens(4, 12)];
        let mut alone: Vec<Box<dyn CacheBackend>> = prompts.iter().map(|_| make()).collect();
        for (cache, prompt) in alone.iter_mut().zip(&prompts) {
            decoder.forward(&prompt[..], cache).expect("it fits");
        }
        // The first two in one batch from the start; an empty cache takes the third, then the fourth.
        let mut batch = make();
        batch
            .join(&alone[0].state().expect("a state"))
            .expect("an empty cache takes a batch");
        batch
            .join(&alone[1].state().expect("a state"))
            .expect("it joins");
        let ids = [7, 11, 13, 17];
        let together = step(decoder, &mut batch, &ids[..2]);
        let expected = alone[..2]
            .iter_mut()
            .zip(ids)
            .flat_map(|(cache, id)| step(decoder, cache, &[id]));
        assert_eq!(together, expected.collect::<Vec<_>>(), "{name}: two");

        batch
            .join(&alone[2].state().expect("a state"))
            .expect("it joins");
        let together = step(decoder, &mut batch, &ids[..3]);
        let expected = alone[..3]
            .iter_mut()
            .zip(ids)
            .flat_map(|(cache, id)| step(decoder, cache, &[id]));
        assert_eq!(together, expected.collect::<Vec<_>>(), "{name}: three");

        // The second leaves as a cache of its own; the fourth takes its place in the batch.
        let mut left = batch.fork();
        left.select_sequences(&[1]).expect("there is one");
        batch.select_sequences(&[0, 2]).expect("there are three");
        batch
            .join(&alone[3].state().expect("a state"))
            .expect("it joins");
        for _ in 0..3 {
            let together = step(decoder, &mut batch, &[ids[0], ids[2], ids[3]]);
            let expected: Vec<_> = [0, 2, 3]
                .iter()
                .flat_map(|&i| step(decoder, &mut alone[i], &[ids[i]]))
                .collect();
            assert_eq!(together, expected, "{name}: replaced");
            assert_eq!(
                step(decoder, &mut left, &[ids[1]]),
                step(decoder, &mut alone[1], &[ids[1]]),
                "{name}: left"
            );
        }
    }
}

#[test]
fn one_sequence_is_cleared_while_others_go_on() {
    for (decoder, kind) in cases() {
        let (name, make) = (format!("{kind:?}"), || make(decoder, kind));
        let prompts = vec![tokens(1, 20), tokens(2, 15)];
        let mut batch = make();
        decoder
            .forward(prompts.clone(), &mut batch)
            .expect("it fits");
        let mut second = make();
        decoder
            .forward(&prompts[1][..], &mut second)
            .expect("it fits");
        batch
            .truncate(&[0, 15])
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(batch.lengths(), [0, 15]);
        let mut first = make();
        let fresh = tokens(9, 1);
        for _ in 0..4 {
            let together = step(decoder, &mut batch, &[fresh[0], 5]);
            let expected = [
                step(decoder, &mut first, &fresh),
                step(decoder, &mut second, &[5]),
            ]
            .concat();
            assert_eq!(together, expected, "{name}");
        }
    }
}

#[test]
fn a_refused_join_changes_nothing() {
    let decoder = tiny(2);
    let (mut batch, mut other) = (
        FullKv::new(&decoder.shape()),
        Window::new(&decoder.shape(), 8).expect("a budget"),
    );
    decoder
        .forward(&[1, 2, 3][..], &mut batch)
        .expect("it fits");
    decoder
        .forward(&[1, 2, 3][..], &mut other)
        .expect("it fits");
    let refused = batch.join(&other.state().expect("a state"));
    assert!(
        matches!(refused, Err(CacheError::Foreign { .. })),
        "{refused:?}"
    );
    batch.begin_draft().expect("no draft is open");
    let own = FullKv::new(&decoder.shape()).state().expect("a state");
    assert!(matches!(batch.join(&own), Err(CacheError::DraftOpen)));
    assert_eq!(batch.lengths(), [3]);
    // With certificates there is one sequence, and no state.
    let routines = Conformance::of(&decoder.shape().kernels, decoder.device(), DType::F32);
    let plan = Plan::tokens(&decoder.shape());
    let mut certified =
        ResidualCheckpoint::new(&decoder.shape(), &routines, plan).expect("it certifies");
    let refused = certified.join(&own);
    assert!(
        matches!(refused, Err(CacheError::Unsupported { .. })),
        "{refused:?}"
    );
}

#[test]
fn a_join_stays_within_a_byte_budget() {
    let decoder = tiny(2);
    let shape = decoder.shape();
    let throughput: Throughput = "read 9e9; 64 tokens: projection 5e10, block 6e10, attention 2e10"
        .parse()
        .expect("throughputs");
    let planner = Planner::new(&shape, &throughput, 300).expect("sizes");
    let budget = planner.with_sequences(2).smallest();
    let config = || ResidualConfig::new(Plan::tokens(&shape)).with_byte_budget(budget);
    let caches: [ResidualCheckpoint; 3] = [1, 2, 3].map(|seed| {
        let mut cache = checkpoint(&decoder, config());
        decoder
            .forward(&tokens(seed, 290)[..], &mut cache)
            .expect("it fits");
        cache
    });
    let [mut batch, second, third] = caches;
    batch
        .join(&second.state().expect("a state"))
        .expect("two fit");
    assert!(batch.memory().total() <= budget, "{:?}", batch.memory());
    decoder
        .forward(vec![vec![1], vec![2]], &mut batch)
        .expect("it fits");
    let held = batch.memory();
    assert!(
        held.total() + held.scratch_peak <= budget,
        "{held:?} of {budget}"
    );
    let before = batch.lengths().to_vec();
    let refused = batch.join(&third.state().expect("a state"));
    assert!(
        matches!(refused, Err(CacheError::StepBytes { .. })),
        "{refused:?}"
    );
    assert_eq!(batch.lengths(), before);
}

#[test]
fn a_cache_is_parked_and_resumed_behind_the_trait() {
    for (decoder, kind) in cases() {
        let go_on = || |_| ControlFlow::Continue(());
        let (name, make) = (format!("{kind:?}"), || make(decoder, kind));
        let mut cache = make();
        decoder
            .forward(&tokens(1, 20)[..], &mut cache)
            .expect("it fits");
        let mut expected = cache.fork();
        let held = |cache: &dyn CacheBackend| cache.memory().keys_values;
        let before = held(&*cache);
        match cache.park() {
            Ok(()) => assert!(held(&*cache) <= before, "{name}"),
            Err(error) => assert!(matches!(error, CacheError::Unsupported { .. }), "{error}"),
        }
        let at = |layer| -> Box<dyn Replay + '_> { Box::new(decoder.at(layer)) };
        let resumed = cache.resume(&at, &mut go_on()).expect("it rebuilds");
        assert!(resumed.is_continue());
        assert_eq!(held(&*cache) > 0, before > 0, "{name}");
        let found = step(decoder, &mut *cache, &[5]);
        assert_eq!(found, step(decoder, &mut *expected, &[5]), "{name}");
    }
}

#[test]
fn caches_and_decoders_cross_threads() {
    fn send<T: Send + 'static>() {}
    fn share<T: Send + Sync + 'static>() {}
    send::<Box<dyn CacheBackend>>();
    share::<Decoder>();
    share::<FullKv>();
    share::<ResidualCheckpoint>();
    share::<H2o>();
    share::<SnapKv>();
    share::<StreamingLlm>();
    share::<Tova>();
    share::<Window>();
    share::<State>();
    share::<Conformance>();
    share::<CacheError>();
}
