//! Parking and resuming.

use std::ops::ControlFlow;

use kv_direct::{
    cache::{CacheBackend, Draft, ResumeProgress},
    model::{Decoder, DecoderConfig},
    residual::{Plan, ResidualCheckpoint, ResidualConfig},
};

use crate::support::{
    caches::{PlanKind, checkpoint, residual, seen},
    feed::feed,
    kinds::{Kind, every_run},
    models::{random_decoder, slides, sliding, tiny, with_windows},
    random::tokens,
};

/// A resume that stops before any layer leaves the cache parked. A complete one equals a cache that was never
/// parked, also where a sequence is empty.
#[test]
fn resuming_rebuilds_all_layers_or_changes_nothing() {
    let windowed = with_windows(DecoderConfig::new(97, 64, 3, 4, 2), &[1], 7);
    for decoder in [tiny(2), random_decoder(&windowed)] {
        for (plan_kind, hot) in [
            (PlanKind::Tokens, 0),
            (PlanKind::Tokens, 5),
            (PlanKind::Tokens, usize::MAX),
            (PlanKind::Residuals, 5),
            (PlanKind::Residuals, usize::MAX),
        ] {
            let mut cache = residual(&decoder, hot, plan_kind);
            feed(
                &decoder,
                &mut cache,
                vec![tokens(1, 70), vec![], tokens(2, 9)],
            );
            let mut straight = cache.fork();
            cache.park().expect("it can rebuild");
            let parked = seen(&cache, 3);
            for layer in 0..=3 {
                let stop = |resuming: ResumeProgress| match resuming.done == layer {
                    true => ControlFlow::Break(()),
                    false => ControlFlow::Continue(()),
                };
                let was_parked = cache.is_parked();
                let stopped = cache.resume(|layer| decoder.at(layer), stop);
                let stopped = stopped.expect("a decoder that is there").is_break();
                assert_eq!((stopped, cache.is_parked()), (was_parked, was_parked));
                assert_eq!(
                    seen(&cache, 3),
                    parked,
                    "{plan_kind:?}, {hot}, before {layer}"
                );
            }
            let done = cache.resume(|layer| decoder.at(layer), |_| ControlFlow::Continue(()));
            assert!(done.expect("a decoder that is there").is_continue());
            assert!(!cache.is_parked());
            // Entries that only an undo of the last step would need are not rebuilt.
            let (found, whole) = (cache.memory().keys_values, straight.memory().keys_values);
            let same = decoder.shape().windows.iter().all(Option::is_none);
            assert!(
                found == whole || !same && found < whole,
                "{plan_kind:?}, {hot}"
            );
            let step = vec![tokens(3, 2), tokens(4, 2), tokens(5, 2)];
            let expected = feed(&decoder, &mut straight, step.clone());
            assert!(
                feed(&decoder, &mut cache, step) == expected,
                "{plan_kind:?}, {hot}"
            );
            // A batch of one empty sequence has nothing to rebuild.
            cache.clear();
            feed(&decoder, &mut cache, vec![tokens(1, 3), vec![]]);
            cache.select_sequences(&[1]).expect("there are two");
            cache.park().expect("it can rebuild");
            let done = cache.resume(|layer| decoder.at(layer), |_| ControlFlow::Continue(()));
            assert!(done.expect("nothing to rebuild").is_continue());
            feed(&decoder, &mut cache, &[1, 2][..]);
        }
    }
}

#[test]
fn every_call_works_on_a_parked_cache() {
    for mut run in every_run().filter(|run| matches!(run.kind, Kind::Residual { .. })) {
        run.park();
        run.feed(&[6, 0, 1], false, 1);
        run.park();
        run.park();
        let mut fork = run.fork();
        fork.park();
        let mut selected = run.fork();
        selected.select_sequences(&[3, 1, 1]);
        let lengths = run.lengths();
        let most: Vec<usize> = lengths
            .iter()
            .map(|length| length - length.min(&1))
            .collect();
        run.truncate(if slides(run.decoder) { &lengths } else { &most });
        run.park();
        run.move_to_another(true, true);
        run.resume(Some(1));
        run.resume(None);
        run.begin_draft();
        run.feed(&vec![4; lengths.len()], false, 2);
        run.park();
        run.resume(Some(0));
        let mut accepted = run.fork();
        run.end_draft(Draft::Discard);
        accepted.truncate(&accepted.lengths().iter().map(|n| n - 2).collect::<Vec<_>>());
        accepted.end_draft(Draft::Accept);
        for mut run in [run, fork, accepted] {
            run.finish();
        }
        drop(selected);
    }
}

/// Everything is rebuilt, though queries of the draft may still be truncated.
#[test]
fn a_draft_parked_midway_can_be_resumed() {
    for mut run in every_run().filter(|run| matches!(run.kind, Kind::Residual { .. })) {
        run.begin_draft();
        run.feed(&[5, 2], false, 1);
        run.park();
        run.feed(&[1, 1], false, 2);
        run.park();
        run.resume(None);
        run.feed(&[1, 0], false, 3);
        run.truncate(&[4, 3]);
        run.feed(&[1, 1], false, 4);
        run.end_draft(Draft::Accept);
        run.finish();
    }
}

/// Every token is hot, and a byte budget is set that never binds.
fn all_hot(decoder: &Decoder) -> ResidualCheckpoint {
    let plan = Plan::tokens(&decoder.shape()).with_hot(usize::MAX);
    let config = ResidualConfig::new(plan).even_if_larger();
    checkpoint(decoder, config.with_byte_budget(usize::MAX))
}

#[test]
fn resuming_nothing_rebuilds_nothing() {
    let decoder = sliding(1);
    let mut ours = all_hot(&decoder);
    feed(&decoder, &mut ours, &tokens(1, 30)[..]);
    let mut again = ours.fork();
    ours.park().expect("it can rebuild");
    let done = ours.resume(|layer| decoder.at(layer), |_| ControlFlow::Continue(()));
    assert!(
        done.expect("a window of 1 shows nothing before")
            .is_continue()
    );
    assert!(feed(&decoder, &mut ours, &[3][..]) == feed(&decoder, again.as_mut(), &[3][..]));

    let decoder = sliding(7);
    let mut ours = all_hot(&decoder);
    feed(&decoder, &mut ours, vec![vec![1, 2, 3], vec![]]);
    ours.park().expect("it can rebuild");
    ours.select_sequences(&[1]).expect("the empty sequence");
    let done = ours.resume(|layer| decoder.at(layer), |_| ControlFlow::Continue(()));
    assert!(done.expect("nothing was parked").is_continue());
    feed(&decoder, &mut ours, &[3][..]);
}
