//! The life of a cache: truncate, clear, fork, two caches on one model.

use crate::support::CacheExt as _;
use std::{num::NonZeroUsize, ops::ControlFlow};

use kv_direct::{
    cache::{CacheBackend, CacheError, LayerIndex},
    model::DecoderConfig,
    policy::FullKv,
    residual::ResumeProgress,
};

use crate::{
    allocator::measure,
    support::{PlanKind, backends, feed, random, residual, seen, tiny, tokens},
};

#[test]
fn the_last_call_of_a_lossless_backend_can_be_undone() {
    let decoder = tiny(2);
    let ids = tokens(2, 40);
    for (name, mut cache) in backends(&decoder)
        .into_iter()
        .filter(|(name, _)| *name != "Window")
    {
        feed(&decoder, &mut cache, &ids[..20]);
        let before = seen(&cache, 3);
        feed(&decoder, &mut cache, &tokens(77, 13)[..]);
        cache.truncate_all(20).expect("every length can be reached");
        assert_eq!(before.0, seen(&cache, 3).0, "{name}");
        assert_eq!(before.1, seen(&cache, 3).1, "{name}");
        let mut straight = cache.fork();
        straight.clear();
        feed(&decoder, &mut straight, &ids[..20]);
        let expected = feed(&decoder, &mut straight, &ids[20..]);
        assert!(
            feed(&decoder, &mut cache, &ids[20..]) == expected,
            "{name} goes on as if never fed"
        );
    }
}

/// What stays is neither moved nor copied, however much it is.
#[test]
fn undoing_a_call_costs_what_the_call_was() {
    let decoder = tiny(2);
    let parked = || residual(&decoder, usize::MAX, PlanKind::Tokens);
    for length in [30, 1_100, 2_000] {
        let full: Box<dyn CacheBackend> = Box::new(FullKv::new(&decoder.shape()));
        for mut cache in [full, Box::new(parked())] {
            feed(&decoder, &mut cache, &tokens(1, length)[..]);
            feed(&decoder, &mut cache, &tokens(2, 5)[..]);
            let (done, peak, _) = measure(|| cache.truncate_all(length));
            done.expect("the last call");
            assert!(
                peak < 4 << 10,
                "{peak} bytes to take 5 tokens of {length} back"
            );
        }
    }
}

/// Broken off before any layer it leaves a parked session; carried through it leaves one that was never
/// parked, also where a batch row is empty.
#[test]
fn a_resume_gives_back_what_was_parked_or_leaves_it() {
    let mut windowed = DecoderConfig::new(97, 64, 3, 4, 2);
    windowed.layers[1].window = NonZeroUsize::new(7);
    for decoder in [tiny(2), random(&windowed)] {
        for (floor, hot) in [
            (PlanKind::Tokens, 0),
            (PlanKind::Tokens, 5),
            (PlanKind::Tokens, usize::MAX),
            (PlanKind::Residuals, 5),
            (PlanKind::Residuals, usize::MAX),
        ] {
            let mut cache = residual(&decoder, hot, floor);
            feed(
                &decoder,
                &mut cache,
                vec![tokens(1, 70), vec![], tokens(2, 9)],
            );
            let mut straight = cache.fork();
            cache.park().expect("it rebuilds");
            let parked = seen(&cache, 3);
            for layer in 0..=3 {
                let stop = |resuming: ResumeProgress| match resuming.done == layer {
                    true => ControlFlow::Break(()),
                    false => ControlFlow::Continue(()),
                };
                let was_parked = cache.is_parked();
                let broken = cache.resume(|layer| decoder.at(layer), stop);
                let broken = broken.expect("a decoder that is there").is_break();
                assert_eq!((broken, cache.is_parked()), (was_parked, was_parked));
                assert_eq!(seen(&cache, 3), parked, "{floor:?}, {hot}, before {layer}");
            }
            let done = cache.resume(|layer| decoder.at(layer), |_| ControlFlow::Continue(()));
            assert!(done.expect("a decoder that is there").is_continue());
            assert!(!cache.is_parked());
            // A window's rows of the last call, which would undo it, do not come back.
            let (found, whole) = (cache.memory().keys_values, straight.memory().keys_values);
            let same = decoder.shape().windows.iter().all(Option::is_none);
            assert!(found == whole || !same && found < whole, "{floor:?}, {hot}");
            let call = vec![tokens(3, 2), tokens(4, 2), tokens(5, 2)];
            let expected = feed(&decoder, &mut straight, call.clone());
            assert!(
                feed(&decoder, &mut cache, call) == expected,
                "{floor:?}, {hot}"
            );
            // A batch of nothing but an empty row has nothing to come back.
            cache.clear();
            feed(&decoder, &mut cache, vec![tokens(1, 3), vec![]]);
            cache.select_sequences(&[1]).expect("there are two");
            cache.park().expect("it rebuilds");
            let done = cache.resume(|layer| decoder.at(layer), |_| ControlFlow::Continue(()));
            assert!(done.expect("nothing to rebuild").is_continue());
            feed(&decoder, &mut cache, &[1, 2][..]);
        }
    }
}

/// Rows of different lengths go back to where each of them stood.
#[test]
fn the_last_call_of_a_batch_can_be_undone_row_by_row() {
    let decoder = tiny(2);
    let rows = |seed, lengths: [usize; 3]| -> Vec<Vec<u32>> {
        let rows = lengths.iter().enumerate();
        rows.map(|(row, &n)| tokens(seed + row as u64, n)).collect()
    };
    for (name, mut cache) in backends(&decoder)
        .into_iter()
        .filter(|(name, _)| *name != "Window")
    {
        feed(&decoder, &mut cache, rows(1, [9, 3, 0]));
        let mut straight = cache.fork();
        feed(&decoder, &mut cache, rows(5, [1, 12, 4]));
        let refused = cache.truncate(&[9, 3]);
        assert!(
            matches!(
                refused,
                Err(CacheError::Sequences {
                    expected: 3,
                    found: 2
                })
            ),
            "{refused:?}"
        );
        let refused = cache.truncate(&[9, 3, 5]);
        assert!(
            matches!(
                refused,
                Err(CacheError::TruncateBeyond { to: 5, longest: 4 })
            ),
            "{refused:?}"
        );
        cache.truncate(&[9, 3, 0]).expect("the last call");
        assert_eq!(seen(&cache, 3).0, [9, 3, 0], "{name}");
        let next = rows(9, [2, 1, 3]);
        let expected = feed(&decoder, &mut straight, next.clone());
        assert!(feed(&decoder, &mut cache, next) == expected, "{name}");
    }
}

#[test]
fn any_length_of_a_residual_checkpoint_can_be_reached() {
    let decoder = tiny(2);
    let ids = tokens(2, 100);
    for (name, mut cache) in backends(&decoder)
        .into_iter()
        .filter(|(name, _)| name.starts_with("Residual"))
    {
        feed(&decoder, &mut cache, &ids[..]);
        for to in [99, 70, 64, 3] {
            cache.truncate_all(to).expect("every length can be reached");
            let mut straight = cache.fork();
            straight.clear();
            feed(&decoder, &mut straight, &ids[..to]);
            let expected = feed(&decoder, &mut straight, &ids[to..to + 1]);
            assert!(
                feed(&decoder, &mut cache, &ids[to..to + 1]) == expected,
                "{name} from {to}"
            );
        }
    }
}

/// A store that was short of rows after a truncation, was filled up again by rebuilt ones, and is then
/// read as it is: its slots must stand in the order `FullKv` has them.
#[test]
fn what_a_truncation_within_the_exact_rows_leaves_goes_on_in_the_same_order() {
    let decoder = tiny(2);
    let calls = [&[1, 2, 3, 4, 5][..], &[11], &[12], &[13, 14, 15], &[16]];
    for floor in [PlanKind::Tokens, PlanKind::Residuals] {
        for hot in [3, 4, 6] {
            for to in 1..5 {
                let mut full = FullKv::new(&decoder.shape());
                let mut cache = residual(&decoder, hot, floor);
                for (index, call) in calls.into_iter().enumerate() {
                    let expected = feed(&decoder, &mut full, call);
                    let found = feed(&decoder, &mut cache, call);
                    assert!(
                        found == expected,
                        "{floor:?}, {hot} rows, to {to}, call {index}"
                    );
                    if index == 0 {
                        full.truncate_all(to).expect("a prefix");
                        cache.truncate_all(to).expect("a prefix");
                    }
                }
            }
        }
    }
}

#[test]
fn a_window_refuses_to_go_back_to_where_it_dropped_rows() {
    let decoder = tiny(2);
    for (_, mut cache) in backends(&decoder)
        .into_iter()
        .filter(|(name, _)| *name == "Window")
    {
        feed(&decoder, &mut cache, &tokens(1, 5)[..]);
        cache.truncate_all(3).expect("nothing was dropped");
        feed(&decoder, &mut cache, &tokens(1, 9)[..]);
        let before = seen(&cache, 3);
        let refused = cache.truncate_all(8);
        assert!(
            matches!(
                refused,
                Err(CacheError::Irreversible {
                    sequence: 0,
                    to: 8,
                    oldest: 12
                })
            ),
            "{refused:?}"
        );
        assert_eq!(seen(&cache, 3), before);
        cache.truncate_all(12).expect("the end is where it stands");
        cache.truncate_all(0).expect("as good as clear");
        assert_eq!(cache.length(0), 0);
    }
}

#[test]
fn clear_and_truncate_to_nothing_are_as_new() {
    let decoder = tiny(2);
    let ids = tokens(9, 30);
    for (name, mut cache) in backends(&decoder) {
        let fresh = feed(&decoder, &mut cache.fork(), &ids[..]);
        for clear in [true, false] {
            feed(&decoder, &mut cache, vec![tokens(4, 25), tokens(5, 3)]);
            if clear {
                cache.clear();
            } else {
                cache
                    .truncate_all(0)
                    .expect("any backend can forget everything");
            }
            assert_eq!(cache.memory().total(), 0, "{name}");
            assert!(
                feed(&decoder, &mut cache, &ids[..]) == fresh,
                "{name}: also another batch is welcome"
            );
            cache.clear();
        }
    }
}

#[test]
fn a_fork_and_its_origin_share_nothing_that_changes() {
    let decoder = tiny(2);
    let ids = tokens(6, 40);
    for (name, mut cache) in backends(&decoder) {
        feed(&decoder, &mut cache, &ids[..20]);
        let mut fork = cache.fork();
        feed(&decoder, &mut fork, &tokens(50, 20)[..]);
        let mut alone = cache.fork();
        alone.clear();
        feed(&decoder, &mut alone, &ids[..20]);
        let expected = feed(&decoder, &mut alone, &ids[20..]);
        assert!(feed(&decoder, &mut cache, &ids[20..]) == expected, "{name}");
    }
}

#[test]
fn two_caches_take_turns_on_one_decoder() {
    let decoder = tiny(2);
    let (a, b) = (tokens(1, 24), tokens(2, 24));
    for ((name, mut one), (_, mut two)) in backends(&decoder).into_iter().zip(backends(&decoder)) {
        let mut alone = one.fork();
        let expected: Vec<_> = a
            .chunks(5)
            .map(|part| feed(&decoder, &mut alone, part))
            .collect();
        for (index, (part, other)) in a.chunks(5).zip(b.chunks(5)).enumerate() {
            assert!(feed(&decoder, &mut one, part) == expected[index], "{name}");
            feed(&decoder, &mut two, other);
        }
    }
}

#[test]
fn what_a_cache_keeps_is_what_its_policy_says() {
    let decoder = tiny(2);
    for (name, mut cache) in backends(&decoder) {
        feed(&decoder, &mut cache, &tokens(1, 10)[..]);
        feed(&decoder, &mut cache, &tokens(3, 2)[..]);
        let kept = cache.cached(LayerIndex::new(2));
        let from = if name == "Window" { 6 } else { 0 };
        assert_eq!(kept.sequence(0), [(from..12).collect::<Vec<_>>()], "{name}");
        assert_eq!(
            cache.cached(LayerIndex::new(3)).sequences(),
            0,
            "there is no layer 3"
        );
    }
}
