//! Layers with a window: what they hold, and that nobody can tell from a cache that keeps everything.

use crate::support::CacheExt as _;
use std::num::NonZeroUsize;

use kv_direct::{
    cache::{CacheBackend, CacheError, LayerIndex},
    exact::KV_BLOCK,
    model::{Decoder, DecoderConfig},
    policy::{FullKv, Window},
    residual::ResidualCheckpoint,
};
use proptest::prelude::*;

use crate::{
    families::gemma,
    support::{PlanKind, backends, feed, random, residual, seen, tokens},
};

/// A token's keys and values at one layer of [`windowed`], f32.
const ROW: usize = 2 * 2 * 16 * 4;
/// A slot's entry in the list that says what slots hold.
const ENTRY: usize = 8;

/// A layer with this window, one without, one with.
fn windowed(window: usize) -> Decoder {
    let mut config = DecoderConfig::new(97, 64, 3, 4, 2);
    for layer in [0, 2] {
        config.layers[layer].window = NonZeroUsize::new(window);
    }
    random(&config)
}

/// A cache that keeps every row of every layer: the mask is the decoder's business alone.
fn everything(decoder: &Decoder) -> FullKv {
    let mut shape = decoder.shape();
    shape.windows.fill(None);
    FullKv::new(&shape)
}

#[test]
fn what_leaves_a_window_is_never_missed() {
    let windows = [
        1,
        2,
        12,
        100,
        KV_BLOCK - 1,
        KV_BLOCK,
        KV_BLOCK + 1,
        700,
        5000,
    ];
    let decoders: Vec<Decoder> = windows.into_iter().map(windowed).collect();
    let call = prop_oneof![4 => 1usize..=3, 2 => 1usize..=90, 1 => 400usize..=700];
    let strategy = (
        0..windows.len(),
        prop_oneof![Just(0usize), 1usize..=64, 500usize..=520],
        prop::collection::vec(call, 1..10),
        any::<u64>(),
    );
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        cases: 32,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    runner
        .run(&strategy, |(model, hot, mut calls, seed)| {
            let decoder = &decoders[model];
            let mut oracle = everything(decoder);
            let mut full = FullKv::new(&decoder.shape());
            let mut ours =
                [PlanKind::Tokens, PlanKind::Residuals].map(|floor| residual(decoder, hot, floor));
            let mut total = 0;
            calls.retain(|call| {
                total += call;
                total <= 2000
            });
            for (turn, length) in calls.into_iter().enumerate() {
                let call = tokens(seed.wrapping_add(turn as u64), length);
                let expected = feed(decoder, &mut oracle, &call[..]);
                let found = feed(decoder, &mut full, &call[..]);
                prop_assert!(found == expected, "FullKv, call {}", turn);
                for cache in &mut ours {
                    let found = feed(decoder, cache, &call[..]);
                    prop_assert!(found == expected, "{:?}, call {}", cache, turn);
                }
            }
            Ok(())
        })
        .unwrap_or_else(|failure| panic!("{failure}"));
}

#[test]
fn a_window_layer_holds_its_window_and_the_last_call_and_no_more() {
    let decoder = windowed(20);
    let shape = decoder.shape();
    let mut caches: Vec<(Box<dyn CacheBackend>, usize)> = vec![
        (Box::new(FullKv::new(&shape)), usize::MAX),
        (Box::new(Window::new(&shape, 7).expect("a budget")), 7),
        (Box::new(residual(&decoder, 7, PlanKind::Tokens)), 7),
    ];
    for (cache, budget) in &mut caches {
        let mut total = 0;
        for call in [5, 30, 1, 1, 700, 1, 3] {
            let before = total;
            total += call;
            feed(&decoder, &mut *cache, &tokens(1, call)[..]);
            let rows = 2 * (before.min(19) + call) + total.min(*budget);
            let report = cache.memory();
            assert_eq!(report.keys_values, ROW * rows, "{cache:?} after {call}");
            // A window of 19 and one token fit one piece, or stand at the edge of two; the full layer
            // may have grown.
            let slots = |rows: usize| (rows + KV_BLOCK).next_multiple_of(KV_BLOCK);
            let most = 2 * slots(before.min(19) + call) + slots(total.min(*budget));
            let ids = 16 * total;
            assert!(
                report.total() <= most * (ROW + ENTRY) + ids,
                "{cache:?} after {call}"
            );
            for layer in [0, 2] {
                let kept = cache.cached(LayerIndex::new(layer));
                let expected: Vec<usize> = (total.saturating_sub(19)..total).collect();
                assert_eq!(
                    kept.sequence(0),
                    [expected],
                    "a window counts the query's own"
                );
            }
        }
    }
}

#[test]
fn the_last_call_can_be_undone_and_an_older_one_is_refused_or_rebuilt() {
    let decoder = random(&gemma());
    let ids = tokens(3, 80);
    for (name, mut cache) in backends(&decoder) {
        feed(&decoder, &mut cache, &ids[..30]);
        feed(&decoder, &mut cache, &ids[30..40]);
        let before = seen(&cache, 3);
        let straight = |to: usize| {
            let mut fresh = cache.fork();
            fresh.clear();
            feed(&decoder, &mut fresh, &ids[..to]);
            feed(&decoder, &mut fresh, &ids[to..to + 3])
        };
        let lossless = name != "Window";
        for to in [39, 30, 29, 5] {
            let mut cache = cache.fork();
            match cache.truncate_all(to) {
                Ok(()) => {
                    assert!(
                        lossless && (to >= 30 || name.starts_with("Residual")),
                        "{name}"
                    );
                    let next = feed(&decoder, &mut cache, &ids[to..to + 3]);
                    assert!(next == straight(to), "{name} from {to}");
                }
                Err(CacheError::Irreversible {
                    sequence: row,
                    to: asked,
                    oldest,
                }) => {
                    let expected = if lossless { 30 } else { 40 };
                    assert_eq!((row, asked, oldest), (0, to, expected), "{name}");
                    assert!(to < expected && !name.starts_with("Residual"));
                    assert_eq!(seen(&cache, 3), before, "{name} is as it was");
                }
                Err(error) => panic!("{name}: {error}"),
            }
        }
    }
}

/// A row that brings nothing in a call has its window trimmed all the same: it is the other row's
/// last call that can be undone.
#[test]
fn the_rows_of_a_batch_slide_each_at_its_own_position() {
    let decoder = windowed(KV_BLOCK);
    let make = || -> (FullKv, ResidualCheckpoint) {
        (
            FullKv::new(&decoder.shape()),
            residual(&decoder, 3, PlanKind::Tokens),
        )
    };
    let (mut full, mut ours) = make();
    let mut alone = [everything(&decoder), everything(&decoder)];
    for (turn, lengths) in [[600, 2], [0, 500], [300, 1], [1, 40], [200, 0]]
        .into_iter()
        .enumerate()
    {
        let call: Vec<Vec<u32>> = lengths
            .iter()
            .enumerate()
            .map(|(row, &n)| tokens((2 * turn + row) as u64, n))
            .collect();
        let longest = lengths[0].max(lengths[1]);
        let together = feed(&decoder, &mut full, call.clone());
        assert!(
            feed(&decoder, &mut ours, call.clone()) == together,
            "call {turn}"
        );
        for (row, ids) in call.iter().enumerate().filter(|(_, ids)| !ids.is_empty()) {
            let expected = feed(&decoder, &mut alone[row], &ids[..]);
            let found = &together[row * longest * 97..][..ids.len() * 97];
            assert!(found == expected, "row {row} of call {turn}");
        }
    }
    assert_eq!((full.length(0), full.length(1)), (1101, 543));
}

#[test]
fn the_replay_ends_at_the_last_layer_that_shows_all_keys() {
    let all_slide = {
        let mut config = gemma();
        config
            .layers
            .iter_mut()
            .for_each(|layer| layer.window = NonZeroUsize::new(12));
        random(&config)
    };
    let mut cache = residual(&all_slide, 0, PlanKind::Tokens);
    let mut full = FullKv::new(&all_slide.shape());
    for (turn, call) in [50, 1, 1, 20, 1].into_iter().enumerate() {
        let call = tokens(turn as u64, call);
        assert!(feed(&all_slide, &mut cache, &call[..]) == feed(&all_slide, &mut full, &call[..]));
        assert_eq!(
            cache.memory().scratch_peak,
            full.memory().scratch_peak,
            "nothing to rebuild"
        );
    }
    cache.truncate_all(40).expect("every length can be reached");
    assert_eq!(
        cache.memory().keys_values,
        0,
        "rows come back with the next step"
    );
    full.clear();
    feed(&all_slide, &mut full, &tokens(0, 50)[..40]);
    for call in [1, 2, 1] {
        let call = tokens(9, call);
        assert!(feed(&all_slide, &mut cache, &call[..]) == feed(&all_slide, &mut full, &call[..]));
    }
    assert_eq!(cache.memory().keys_values, full.memory().keys_values);
}
