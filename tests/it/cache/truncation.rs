//! Truncation: which lengths a cache reaches, and what it then continues with.

use kv_direct::{
    cache::{CacheBackend, CacheError, Draft},
    policy::FullKv,
};

use crate::support::{
    allocator::measure,
    caches::{CacheExt as _, PlanKind, backends, residual, seen},
    feed::feed,
    kinds::{Kind, every_kind},
    models::tiny,
    random::tokens,
    test_run::TestRun,
};

#[test]
fn a_lossless_backend_can_undo_its_last_step() {
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
            "{name} continues as if never fed"
        );
    }
}

/// Entries that stay are neither moved nor copied, however many there are.
#[test]
fn undoing_a_step_copies_nothing_that_stays() {
    let decoder = tiny(2);
    let parked = || residual(&decoder, usize::MAX, PlanKind::Tokens);
    for length in [30, 1_100, 2_000] {
        let full: Box<dyn CacheBackend> = Box::new(FullKv::new(&decoder.shape()));
        for mut cache in [full, Box::new(parked())] {
            feed(&decoder, &mut cache, &tokens(1, length)[..]);
            feed(&decoder, &mut cache, &tokens(2, 5)[..]);
            let (done, peak, _) = measure(|| cache.truncate_all(length));
            done.expect("the last step");
            assert!(
                peak < 4 << 10,
                "{peak} bytes to take 5 tokens of {length} back"
            );
        }
    }
}

/// Each sequence returns to the length it had before the step.
#[test]
fn each_sequence_can_undo_its_part_of_the_last_step() {
    let decoder = tiny(2);
    let batch = |seed, lengths: [usize; 3]| -> Vec<Vec<u32>> {
        let lengths = lengths.iter().enumerate();
        lengths
            .map(|(sequence, &n)| tokens(seed + sequence as u64, n))
            .collect()
    };
    for (name, mut cache) in backends(&decoder)
        .into_iter()
        .filter(|(name, _)| *name != "Window")
    {
        feed(&decoder, &mut cache, batch(1, [9, 3, 0]));
        let mut straight = cache.fork();
        feed(&decoder, &mut cache, batch(5, [1, 12, 4]));
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
        cache.truncate(&[9, 3, 0]).expect("the last step");
        assert_eq!(seen(&cache, 3).0, [9, 3, 0], "{name}");
        let next = batch(9, [2, 1, 3]);
        let expected = feed(&decoder, &mut straight, next.clone());
        assert!(feed(&decoder, &mut cache, next) == expected, "{name}");
    }
}

#[test]
fn a_residual_checkpoint_reaches_any_length() {
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

/// Rebuilt entries fill up a store that a truncation left short. Its slots must then be in the order that
/// `FullKv` has.
#[test]
fn truncated_hot_tokens_leave_the_slots_in_order() {
    let decoder = tiny(2);
    let steps = [&[1, 2, 3, 4, 5][..], &[11], &[12], &[13, 14, 15], &[16]];
    for plan_kind in [PlanKind::Tokens, PlanKind::Residuals] {
        for hot in [3, 4, 6] {
            for to in 1..5 {
                let mut full = FullKv::new(&decoder.shape());
                let mut cache = residual(&decoder, hot, plan_kind);
                for (index, step) in steps.into_iter().enumerate() {
                    let expected = feed(&decoder, &mut full, step);
                    let found = feed(&decoder, &mut cache, step);
                    assert!(
                        found == expected,
                        "{plan_kind:?}, {hot} hot tokens, to {to}, step {index}"
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
fn a_window_refuses_to_return_to_evicted_entries() {
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
                    shortest: 12
                })
            ),
            "{refused:?}"
        );
        assert_eq!(seen(&cache, 3), before);
        cache.truncate_all(12).expect("the length it has");
        cache.truncate_all(0).expect("as good as clear");
        assert_eq!(cache.length(0), 0);
    }
}

#[test]
fn clearing_and_truncating_to_zero_equal_a_new_cache() {
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
                    .expect("any backend can drop everything");
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
fn the_last_step_can_be_undone_after_calls_that_feed_nothing() {
    for (decoder, kind) in every_kind().filter(|(_, kind)| kind.lossless()) {
        let mut run = TestRun::new(decoder, kind);
        run.feed(&[30, 4, 9], false, 1);
        run.feed(&[20, 0, 1], false, 2);
        for by_file in [false, true] {
            run.move_to_another(by_file, false);
        }
        run.select_sequences(&[2, 0, 1, 0]);
        run.begin_draft();
        run.end_draft(Draft::Discard);
        run.begin_draft();
        run.end_draft(Draft::Accept);
        if matches!(kind, Kind::Residual { .. }) {
            run.park();
        }
        run = run.fork();
        let undo = run.undo();
        assert_eq!(undo, [9, 30, 4, 30]);
        run.truncate(&undo);
        run.move_to_another(true, false);
        run.finish();
    }
}
