//! Drafts: what accepting and discarding leave.

use kv_direct::{
    cache::{CacheBackend, Draft},
    model::{DecoderConfig, Input},
    policy::{FullKv, SnapKv, SnapKvConfig, TokenBudget, Tova, TovaConfig, Window},
};

use crate::support::{
    caches::{CacheExt as _, PlanKind, residual, seen},
    feed::feed,
    kinds::{FIRST_SLIDING, Kind, continue_alike, decoders, every_run, kinds, snap, tova},
    models::{random_decoder, tiny, with_windows},
    random::tokens,
    simulator::Amount,
    test_run::TestRun,
};

/// Sliding windows do not move in a draft. So the step before it can still be undone afterwards.
#[test]
fn the_step_before_can_be_undone_afterwards() {
    let decoder = random_decoder(&with_windows(DecoderConfig::new(97, 64, 3, 4, 2), &[0], 5));
    let full: Box<dyn CacheBackend> = Box::new(FullKv::new(&decoder.shape()));
    let hot = residual(&decoder, 3, PlanKind::Residuals);
    for mut cache in [full, Box::new(hot)] {
        feed(&decoder, &mut cache, &tokens(1, 10)[..]);
        let mut straight = cache.fork();
        feed(&decoder, &mut cache, &tokens(2, 4)[..]);
        cache.begin_draft().expect("no draft is open");
        feed(&decoder, &mut cache, &tokens(3, 6)[..]);
        cache.end_draft(Draft::Discard).expect("a draft is open");
        cache.truncate_all(10).expect("the last step");
        let next = &tokens(4, 3)[..];
        let expected = feed(&decoder, &mut straight, next);
        assert!(feed(&decoder, &mut cache, next) == expected);
    }
}

/// The step before a draft can be undone for every sequence, also after a selection has reordered them.
#[test]
fn the_step_before_can_be_undone_after_a_selection() {
    let decoder = random_decoder(&with_windows(DecoderConfig::new(97, 64, 3, 4, 2), &[0], 5));
    let mut cache = FullKv::new(&decoder.shape());
    feed(&decoder, &mut cache, vec![tokens(1, 10), tokens(2, 30)]);
    feed(&decoder, &mut cache, vec![tokens(3, 4), tokens(4, 1)]);
    cache.select_sequences(&[1, 0]).expect("there are two");
    cache.begin_draft().expect("no draft is open");
    feed(&decoder, &mut cache, vec![tokens(5, 2); 2]);
    cache.end_draft(Draft::Discard).expect("a draft is open");
    cache.truncate(&[30, 10]).expect("the last step");
}

/// A prompt that ended with tokens that were truncated continues.
#[test]
fn a_prompt_whose_end_was_truncated_is_not_over() {
    let decoder = tiny(2);
    let chunk = |seed, count, more| Input::from(&tokens(seed, count)[..]).more_follows(more);
    let run = |draft: bool| {
        let config = SnapKvConfig::new(4, 2);
        let mut cache = SnapKv::new(&decoder.shape(), config).expect("above the window");
        let feed = |cache: &mut SnapKv, input| {
            drop(decoder.forward(input, cache).expect("a valid step"));
        };
        feed(&mut cache, chunk(1, 5, true));
        if draft {
            cache.begin_draft().expect("no draft is open");
            feed(&mut cache, chunk(2, 3, false));
            cache.truncate_all(5).expect("within the draft");
            feed(&mut cache, chunk(3, 4, false));
            cache.end_draft(Draft::Accept).expect("a draft is open");
        } else {
            feed(&mut cache, chunk(3, 4, false));
        }
        feed(&mut cache, chunk(4, 1, false));
        seen(&cache, 3)
    };
    assert_eq!(run(true), run(false));
}

/// A draft's step ends the prompts of all sequences, also of an idle one. Once nothing is left of the draft,
/// no prompt has ended.
#[test]
fn once_empty_it_has_ended_no_prompt_of_an_idle_sequence() {
    let decoder = tiny(2);
    let half = TokenBudget::of_prompt(0.5).expect("a share");
    let chunk = |lengths: [usize; 2], more| {
        let lengths = vec![tokens(1, lengths[0]), tokens(2, lengths[1])];
        Input::from(lengths).more_follows(more)
    };
    let run = |draft: bool| {
        let mut cache = Window::new(&decoder.shape(), half).expect("a budget");
        let feed = |cache: &mut Window, input| {
            drop(decoder.forward(input, cache).expect("a valid step"));
        };
        feed(&mut cache, chunk([5, 3], true));
        if draft {
            cache.begin_draft().expect("no draft is open");
            feed(&mut cache, chunk([2, 0], false));
            cache.truncate(&[5, 3]).expect("within the draft");
            cache.end_draft(Draft::Accept).expect("a draft is open");
        }
        feed(&mut cache, chunk([8, 9], false));
        seen(&cache, 3)
    };
    assert_eq!(run(true), run(false));
}

#[test]
fn it_may_cross_the_edge_of_a_block_of_slots() {
    let [_, few @ ..] = [2, 4, 6, 8, 10, 14].map(|kind| kinds()[kind]);
    let on = |model: usize, kinds: &[Kind]| {
        let runs = kinds
            .iter()
            .map(|&kind| TestRun::new(&decoders()[model], kind));
        runs.collect::<Vec<_>>()
    };
    let runs = [on(1, &few), on(FIRST_SLIDING, &kinds()[2..3])];
    for mut run in runs.into_iter().flatten() {
        run.feed(&[505, 3], false, 1);
        run.begin_draft();
        run.feed(&[6, 2], false, 2);
        run.feed(&[5, 0], false, 3);
        run.truncate(&[511, 4]);
        run.feed(&[3, 1], false, 4);
        let mut accepted = run.fork();
        run.end_draft(Draft::Discard);
        accepted.end_draft(Draft::Accept);
        for mut run in [run, accepted] {
            run.feed(&[9, 1], false, 5);
            run.finish();
        }
    }
}

#[test]
fn it_may_hold_all_tokens_there_are() {
    for mut run in every_run() {
        run.begin_draft();
        let mut nothing = run.fork();
        nothing.end_draft(Draft::Accept);
        nothing.finish();
        run.feed(&[12, 0], false, 1);
        run.feed(&[1, 5], false, 2);
        let mut emptied = run.fork();
        emptied.truncate(&[0, 0]);
        assert!(!emptied.is_draft(), "truncation to zero ends the draft");
        emptied.end_draft(Draft::Discard);
        emptied.finish();
        let mut discarded = run.fork();
        discarded.end_draft(Draft::Discard);
        assert_eq!(
            discarded.held.get().lengths().len(),
            0,
            "any batch can follow"
        );
        discarded.finish();
        run.truncate(&[13, 0]);
        run.feed(&[0, 4], false, 3);
        run.end_draft(Draft::Accept);
        run.finish();
    }
}

#[test]
fn within_a_prompt_it_leaves_no_trace_or_counts_as_one_step() {
    for mut run in every_run() {
        run.feed(&[7, 2], true, 1);
        run.begin_draft();
        run.feed(&[3, 1], true, 2);
        run.feed(&[4, 0], true, 3);
        let mut accepted = run.fork();
        run.feed(&[2, 6], false, 4);
        run.end_draft(Draft::Discard);
        run.feed(&[1, 1], true, 5);
        run.feed(&[6, 3], false, 6);
        run.finish();
        accepted.truncate(&[12, 3]);
        accepted.feed(&[3, 0], false, 7);
        accepted.feed(&[1, 1], false, 8);
        accepted.end_draft(Draft::Accept);
        accepted.finish();
    }
}

/// Attention reports nothing for the first tokens of a draft while they are within the budget.
#[test]
fn truncated_tokens_do_not_decide_what_is_evicted() {
    for budget in [10, 12] {
        for lengths in [&[8][..], &[8, 11], &[8, 3]] {
            let mut run = TestRun::new(&decoders()[1], tova(Amount::Entries(budget)));
            run.feed(lengths, false, 1);
            run.begin_draft();
            for (seed, count) in [(2, 1), (3, 1), (4, 4)] {
                run.feed(&vec![count; lengths.len()], false, seed);
            }
            let to: Vec<usize> = lengths.iter().map(|length| length + 5).collect();
            run.truncate(&to);
            run.end_draft(Draft::Accept);
            run.finish();
        }
    }
}

#[test]
fn scores_are_dropped_when_it_ends_the_prompt() {
    for kind in [tova(Amount::Share(0.5)), snap(Amount::Entries(6))] {
        let mut run = TestRun::new(&decoders()[1], kind);
        run.feed(&[9, 12], true, 1);
        assert!(run.held.get().memory().scores > 0, "scores of the queries");
        run.begin_draft();
        run.feed(&[2, 2], false, 2);
        run.end_draft(Draft::Accept);
        assert_eq!(run.held.get().memory().scores, 0, "{kind:?}");
    }
}

#[test]
fn once_empty_it_ends_no_prompt() {
    for mut run in every_run() {
        run.feed(&[9, 12], true, 1);
        run.begin_draft();
        run.feed(&[2, 2], false, 2);
        run.truncate(&[9, 12]);
        run.end_draft(Draft::Accept);
        run.feed(&[6, 3], false, 3);
        run.finish();
    }
}

#[test]
fn a_share_of_the_prompt_counts_its_chunks() {
    let share = TokenBudget::of_prompt(0.5).expect("a share");
    let decoder = &decoders()[1];
    let make = || Tova::new(&decoder.shape(), TovaConfig::new(share)).expect("a budget");
    let (mut one, mut two) = (make(), make());
    let ids = tokens(3, 16);
    let steps = [
        (0..5, true),
        (5..10, true),
        (10..14, false),
        (14..16, false),
    ];
    one.begin_draft().expect("none is open");
    for (range, more) in steps {
        let input = Input::from(&ids[range]).more_follows(more);
        decoder.forward(input, &mut one).expect("a valid step");
    }
    one.truncate_all(14).expect("within the draft");
    one.end_draft(Draft::Accept).expect("one is open");
    feed(decoder, &mut two, &ids[..14]);
    assert_eq!(seen(&one, 3), seen(&two, 3));
    continue_alike(decoder, &mut one, &mut two);
}
