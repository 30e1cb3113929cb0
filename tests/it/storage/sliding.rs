//! Sliding-window layers: what they hold, and that no logit differs from a cache that holds everything.

use std::num::NonZeroUsize;

use kv_direct::{
    cache::{CacheBackend, CacheError, LayerIndex},
    exact::{ATTENTION_BLOCK, PANEL},
    model::Decoder,
    policy::{FullKv, Window},
    residual::ResidualCheckpoint,
};
use proptest::prelude::*;

use crate::support::{
    caches::{CacheExt as _, PlanKind, backends, residual, seen},
    cases::{check, runner},
    feed::feed,
    models::{gemma, random_decoder, sliding},
    random::tokens,
};

/// A token's keys and values at one layer of [`sliding`], f32.
const ENTRY: usize = 2 * 2 * 16 * 4;

/// Bytes of a slot in the list of positions.
const POSITION: usize = 8;

/// A cache that stores every entry of every layer: only the decoder's mask applies windows.
fn everything(decoder: &Decoder) -> FullKv {
    let mut shape = decoder.shape();
    shape.windows.fill(None);
    FullKv::new(&shape)
}

#[test]
fn entries_beyond_the_window_are_never_missed() {
    let windows = [
        1,
        2,
        PANEL - 1,
        PANEL,
        PANEL + 1,
        100,
        ATTENTION_BLOCK - 1,
        ATTENTION_BLOCK,
        ATTENTION_BLOCK + 1,
        700,
        5000,
    ];
    let decoders: Vec<Decoder> = windows.into_iter().map(sliding).collect();
    let step = prop_oneof![4 => 1usize..=3, 2 => 1usize..=90, 1 => 400usize..=700];
    let strategy = (
        0..windows.len(),
        prop_oneof![Just(0usize), 1usize..=64, 500usize..=520],
        prop::collection::vec(step, 1..10),
        any::<u64>(),
    );
    check(runner(32), &strategy, |(model, hot, mut steps, seed)| {
        let decoder = &decoders[model];
        let mut oracle = everything(decoder);
        let mut full = FullKv::new(&decoder.shape());
        let mut ours = [PlanKind::Tokens, PlanKind::Residuals]
            .map(|plan_kind| residual(decoder, hot, plan_kind));
        let mut total = 0;
        steps.retain(|step| {
            total += step;
            total <= 2000
        });
        for (index, length) in steps.into_iter().enumerate() {
            let step = tokens(seed.wrapping_add(index as u64), length);
            let expected = feed(decoder, &mut oracle, &step[..]);
            let found = feed(decoder, &mut full, &step[..]);
            prop_assert!(found == expected, "FullKv, step {}", index);
            for cache in &mut ours {
                let found = feed(decoder, cache, &step[..]);
                prop_assert!(found == expected, "{:?}, step {}", cache, index);
            }
        }
        Ok(())
    });
}

#[test]
fn a_layer_holds_its_window_and_the_last_step_only() {
    let decoder = sliding(20);
    let shape = decoder.shape();
    let mut caches: Vec<(Box<dyn CacheBackend>, usize)> = vec![
        (Box::new(FullKv::new(&shape)), usize::MAX),
        (Box::new(Window::new(&shape, 7).expect("a budget")), 7),
        (Box::new(residual(&decoder, 7, PlanKind::Tokens)), 7),
    ];
    for (cache, budget) in &mut caches {
        let mut total = 0;
        for step in [5, 30, 1, 1, 700, 1, 3] {
            let before = total;
            total += step;
            feed(&decoder, &mut *cache, &tokens(1, step)[..]);
            let entries = 2 * (before.min(19) + step) + total.min(*budget);
            let report = cache.memory();
            assert_eq!(
                report.keys_values,
                ENTRY * entries,
                "{cache:?} after {step}"
            );
            // A window may begin within a panel. The full-attention layer may have grown by an eighth.
            let slots = |entries: usize| (entries + entries / 8 + PANEL).next_multiple_of(PANEL);
            let most = 2 * slots(before.min(19) + step) + slots(total.min(*budget));
            let ids = 16 * total;
            assert!(
                report.total() <= most * (ENTRY + POSITION) + ids,
                "{cache:?} after {step}"
            );
            for layer in [0, 2] {
                let cached = cache.cached(LayerIndex::new(layer));
                let expected: Vec<usize> = (total.saturating_sub(19)..total).collect();
                assert_eq!(
                    cached.sequence(0),
                    [expected],
                    "a window counts the query's own"
                );
            }
        }
    }
}

#[test]
fn the_last_step_can_be_undone_an_older_one_only_rebuilt() {
    let decoder = random_decoder(&gemma());
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
                    sequence,
                    to: asked,
                    shortest,
                }) => {
                    let expected = if lossless { 30 } else { 40 };
                    assert_eq!((sequence, asked, shortest), (0, to, expected), "{name}");
                    assert!(to < expected && !name.starts_with("Residual"));
                    assert_eq!(seen(&cache, 3), before, "{name} is as it was");
                }
                Err(error) => panic!("{name}: {error}"),
            }
        }
    }
}

/// The window of an idle sequence is trimmed all the same: only the last step can be undone, and that was
/// another sequence's.
#[test]
fn each_sequence_slides_at_its_own_position() {
    let decoder = sliding(2 * ATTENTION_BLOCK);
    let make = || -> (FullKv, ResidualCheckpoint) {
        (
            FullKv::new(&decoder.shape()),
            residual(&decoder, 3, PlanKind::Tokens),
        )
    };
    let (mut full, mut ours) = make();
    let mut alone = [everything(&decoder), everything(&decoder)];
    for (index, lengths) in [[600, 2], [0, 500], [300, 1], [1, 40], [200, 0]]
        .into_iter()
        .enumerate()
    {
        let step: Vec<Vec<u32>> = lengths
            .iter()
            .enumerate()
            .map(|(sequence, &n)| tokens((2 * index + sequence) as u64, n))
            .collect();
        let longest = lengths[0].max(lengths[1]);
        let together = feed(&decoder, &mut full, step.clone());
        assert!(
            feed(&decoder, &mut ours, step.clone()) == together,
            "step {index}"
        );
        for (sequence, ids) in step.iter().enumerate().filter(|(_, ids)| !ids.is_empty()) {
            let expected = feed(&decoder, &mut alone[sequence], &ids[..]);
            let found = &together[sequence * longest * 97..][..ids.len() * 97];
            assert!(found == expected, "sequence {sequence} of step {index}");
        }
    }
    assert_eq!((full.length(0), full.length(1)), (1101, 543));
}

#[test]
fn nothing_is_replayed_without_a_full_attention_layer() {
    let all_slide = {
        let mut config = gemma();
        config
            .layers
            .iter_mut()
            .for_each(|layer| layer.window = NonZeroUsize::new(12));
        random_decoder(&config)
    };
    let mut cache = residual(&all_slide, 0, PlanKind::Tokens);
    let mut full = FullKv::new(&all_slide.shape());
    for (index, step) in [50, 1, 1, 20, 1].into_iter().enumerate() {
        let step = tokens(index as u64, step);
        assert!(feed(&all_slide, &mut cache, &step[..]) == feed(&all_slide, &mut full, &step[..]));
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
        "entries come back with the next step"
    );
    full.clear();
    feed(&all_slide, &mut full, &tokens(0, 50)[..40]);
    for step in [1, 2, 1] {
        let step = tokens(9, step);
        assert!(feed(&all_slide, &mut cache, &step[..]) == feed(&all_slide, &mut full, &step[..]));
    }
    assert_eq!(cache.memory().keys_values, full.memory().keys_values);
}
