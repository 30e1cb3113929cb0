//! Places in the life of a cache where it is easy to go wrong, one by one.

use crate::support::CacheExt as _;
use kv_direct::{
    cache::{CacheBackend, CacheError, Draft, LayerIndex, Step},
    model::Input,
    policy::{FullKv, Group, Pooling, TokenBudget, Tova, TovaConfig},
    session::{self, SessionError},
};

use crate::{
    life_kinds::{FIRST_SLIDING, Held, Kind, Model, models},
    life_model::Life,
    simulator::{Amount, Policy},
    support::{PlanKind, feed, seen, tokens},
};

/// Of every kind one that drops soon.
pub fn kinds() -> Vec<Kind> {
    let residual = |hot, floor| Kind::Residual { hot, floor };
    let streaming = |reindexed| {
        Kind::Policy(Policy::Streaming {
            sinks: 2,
            recent: Amount::Rows(4),
            reindexed,
        })
    };
    vec![
        Kind::Full,
        residual(0, PlanKind::Tokens),
        residual(4, PlanKind::Tokens),
        residual(usize::MAX, PlanKind::Tokens),
        residual(4, PlanKind::Residuals),
        residual(usize::MAX, PlanKind::Residuals),
        Kind::Policy(Policy::Window { size: 6 }),
        Kind::WindowShare(0.5),
        streaming(false),
        streaming(true),
        h2o(Amount::Rows(6)),
        h2o(Amount::Share(0.5)),
        tova(Amount::Rows(6)),
        tova(Amount::Share(0.5)),
        snap(Amount::Rows(6)),
        snap(Amount::Share(0.5)),
    ]
}

fn h2o(budget: Amount) -> Kind {
    let recent = match budget {
        Amount::Rows(rows) => Amount::Rows(rows / 2),
        Amount::Share(share) => Amount::Share(share / 2.0),
    };
    Kind::Policy(Policy::H2o {
        budget,
        recent,
        sinks: 1,
        group: Group::Mean,
    })
}

fn tova(budget: Amount) -> Kind {
    Kind::Policy(Policy::Tova {
        budget,
        protect_last: false,
    })
}

fn snap(budget: Amount) -> Kind {
    Kind::Policy(Policy::Snap {
        budget,
        window: 2,
        pooling: Pooling::Average,
        kernel: 3,
        group: Group::Mean,
    })
}

/// Every kind on a model without windows and, where it serves one, on one with some.
fn everywhere() -> impl Iterator<Item = (&'static Model, Kind)> {
    let reindexed = |kind: &Kind| {
        matches!(
            kind,
            Kind::Policy(Policy::Streaming {
                reindexed: true,
                ..
            })
        )
    };
    let all = kinds().into_iter();
    let sliding = kinds().into_iter().filter(move |kind| !reindexed(kind));
    all.map(|kind| (&models()[1], kind))
        .chain(sliding.map(|kind| (&models()[FIRST_SLIDING], kind)))
}

fn everywhere_alive() -> impl Iterator<Item = Life> {
    everywhere().map(|(model, kind)| Life::new(model, kind))
}

/// Answers whether it goes on with the bits of `other`.
#[track_caller]
fn goes_on_alike(model: &Model, one: &mut dyn CacheBackend, other: &mut dyn CacheBackend) {
    let rows = one.lengths().len().max(1);
    for turn in 0..4 {
        let call: Vec<_> = (0..rows as u64)
            .map(|row| tokens(70 + turn + row, 2))
            .collect();
        let (ours, theirs) = (
            feed(&model.decoder, one, call.clone()),
            feed(&model.decoder, other, call),
        );
        assert!(ours == theirs, "{one:?} in turn {turn}");
    }
}

#[test]
fn a_row_of_a_ragged_batch_begins_anew_among_the_others() {
    for mut life in everywhere_alive() {
        life.feed(&[9, 20, 14], false, 1);
        life.feed(&[1, 2, 0], false, 2);
        life.truncate(&[10, 0, 14]);
        life.move_to_another(false, true);
        life.feed(&[0, 5, 2], true, 3);
        life.feed(&[1, 4, 1], false, 4);
        life.truncate(&[0, 9, 17]);
        life.finish();
    }
}

#[test]
fn a_batch_that_is_left_with_rows_of_no_tokens_lives_on() {
    for mut life in everywhere_alive() {
        life.feed(&[9, 0, 3], false, 1);
        life.truncate(&[9, 0, 0]);
        life.select_sequences(&[1, 2, 1]);
        life.begin_draft();
        life.feed(&[2, 0, 4], false, 2);
        life.end_draft(Draft::Discard);
        for by_file in [false, true] {
            life.move_to_another(by_file, true);
        }
        life.resume(None);
        life.feed(&[2, 0, 1], false, 3);
        life.finish();
    }
}

#[test]
fn a_draft_crosses_the_end_of_a_piece_and_may_come_back() {
    let [_, few @ ..] = [2, 4, 6, 8, 10, 14].map(|kind| kinds()[kind]);
    let on = |model: usize, kinds: &[Kind]| {
        let lives = kinds.iter().map(|&kind| Life::new(&models()[model], kind));
        lives.collect::<Vec<_>>()
    };
    let lives = [on(1, &few), on(FIRST_SLIDING, &kinds()[2..3])];
    for mut life in lives.into_iter().flatten() {
        life.feed(&[505, 3], false, 1);
        life.begin_draft();
        life.feed(&[6, 2], false, 2);
        life.feed(&[5, 0], false, 3);
        life.truncate(&[511, 4]);
        life.feed(&[3, 1], false, 4);
        let mut kept = life.fork();
        life.end_draft(Draft::Discard);
        kept.end_draft(Draft::Accept);
        for mut life in [life, kept] {
            life.feed(&[9, 1], false, 5);
            life.finish();
        }
    }
}

#[test]
fn a_draft_may_be_all_there_is() {
    for mut life in everywhere_alive() {
        life.begin_draft();
        let mut nothing = life.fork();
        nothing.end_draft(Draft::Accept);
        nothing.finish();
        life.feed(&[12, 0], false, 1);
        life.feed(&[1, 5], false, 2);
        let mut forgotten = life.fork();
        forgotten.truncate(&[0, 0]);
        assert!(!forgotten.is_draft(), "to nothing, which ends the draft");
        forgotten.end_draft(Draft::Discard);
        forgotten.finish();
        let mut restored = life.fork();
        restored.end_draft(Draft::Discard);
        assert_eq!(
            restored.held.get().lengths().len(),
            0,
            "any batch is welcome"
        );
        restored.finish();
        life.truncate(&[13, 0]);
        life.feed(&[0, 4], false, 3);
        life.end_draft(Draft::Accept);
        life.finish();
    }
}

#[test]
fn a_draft_in_the_middle_of_a_prompt_leaves_no_trace_or_counts_as_one_call() {
    for mut life in everywhere_alive() {
        life.feed(&[7, 2], true, 1);
        life.begin_draft();
        life.feed(&[3, 1], true, 2);
        life.feed(&[4, 0], true, 3);
        let mut kept = life.fork();
        life.feed(&[2, 6], false, 4);
        life.end_draft(Draft::Discard);
        life.feed(&[1, 1], true, 5);
        life.feed(&[6, 3], false, 6);
        life.finish();
        kept.truncate(&[12, 3]);
        kept.feed(&[3, 0], false, 7);
        kept.feed(&[1, 1], false, 8);
        kept.end_draft(Draft::Accept);
        kept.finish();
    }
}

/// What the first tokens of a draft saw is not asked for while they are within the budget.
#[test]
fn tokens_taken_back_in_a_draft_have_no_vote_though_earlier_ones_were_not_asked() {
    for budget in [10, 12] {
        for rows in [&[8][..], &[8, 11], &[8, 3]] {
            let mut life = Life::new(&models()[1], tova(Amount::Rows(budget)));
            life.feed(rows, false, 1);
            life.begin_draft();
            for (seed, count) in [(2, 1), (3, 1), (4, 4)] {
                life.feed(&vec![count; rows.len()], false, seed);
            }
            let to: Vec<usize> = rows.iter().map(|length| length + 5).collect();
            life.truncate(&to);
            life.end_draft(Draft::Accept);
            life.finish();
        }
    }
}

#[test]
fn a_row_that_was_alone_and_is_repeated_keeps_its_budget_when_a_call_passes_it_by() {
    for kind in kinds() {
        let mut life = Life::new(&models()[1], kind);
        life.feed(&[12], true, 1);
        life.select_sequences(&[0, 0]);
        life.feed(&[0, 4], false, 2);
        life.finish();
    }
}

/// Queries that will cut a prompt, scores, keys that were turned.
#[test]
fn what_is_remembered_of_a_row_goes_where_the_row_goes() {
    for mut life in everywhere_alive() {
        let mut over = life.fork();
        life.feed(&[9, 14], true, 1);
        over.feed(&[9, 14], false, 1);
        over.feed(&[1, 1], false, 2);
        over.feed(&[1, 1], false, 3);
        for mut life in [life, over] {
            life.select_sequences(&[1, 0, 1]);
            life.move_to_another(true, false);
            life.feed(&[0, 1, 2], false, 4);
            life.finish();
        }
    }
}

#[test]
fn a_prompt_that_goes_on_shortened_is_cut_as_if_it_had_never_been_longer() {
    for mut life in everywhere_alive() {
        life.feed(&[9, 12], true, 1);
        life.truncate(&[7, 12]);
        life.feed(&[1, 1], false, 2);
        life.finish();
    }
}

/// What a query that was taken back saw says nothing; the next one does.
#[test]
fn a_prompt_whose_newest_query_was_taken_back_is_cut_by_the_next_one() {
    let mut life = Life::new(&models()[1], tova(Amount::Share(0.5)));
    life.feed(&[9, 12], true, 1);
    life.truncate(&[7, 12]);
    let cache = life.held.get_mut();
    let rows = |cache: &dyn CacheBackend| cache.cached(LayerIndex::new(0)).sequence(0)[0].len();
    feed(&life.model.decoder, cache, vec![vec![], vec![1]]);
    assert_eq!(rows(cache), 7, "no query of it is known");
    feed(&life.model.decoder, cache, vec![vec![1], vec![1]]);
    assert_eq!(rows(cache), 3, "half of a prompt of 7");
}

#[test]
fn what_is_held_for_the_end_of_a_prompt_goes_when_a_draft_brought_it() {
    for kind in [tova(Amount::Share(0.5)), snap(Amount::Rows(6))] {
        let mut life = Life::new(&models()[1], kind);
        life.feed(&[9, 12], true, 1);
        assert!(life.held.get().memory().scores > 0, "what queries saw");
        life.begin_draft();
        life.feed(&[2, 2], false, 2);
        life.end_draft(Draft::Accept);
        assert_eq!(life.held.get().memory().scores, 0, "{kind:?}");
    }
}

/// Sums of what queries gave cannot be taken apart again.
#[test]
fn scores_are_never_taken_back() {
    let mut life = Life::new(&models()[1], h2o(Amount::Rows(40)));
    life.feed(&[9, 12], false, 1);
    life.refused("less than all", |cache| {
        let refused = cache.truncate(&[8, 12]);
        matches!(refused, Err(CacheError::Irreversible { .. }))
    });
}

#[test]
fn a_draft_of_which_nothing_is_left_ends_no_prompt() {
    for mut life in everywhere_alive() {
        life.feed(&[9, 12], true, 1);
        life.begin_draft();
        life.feed(&[2, 2], false, 2);
        life.truncate(&[9, 12]);
        life.end_draft(Draft::Accept);
        life.feed(&[6, 3], false, 3);
        life.finish();
    }
}

#[test]
fn parked_is_parked_whatever_comes_next() {
    for mut life in everywhere_alive().filter(|life| matches!(life.kind, Kind::Residual { .. })) {
        life.park();
        life.feed(&[6, 0, 1], false, 1);
        life.park();
        life.park();
        let mut fork = life.fork();
        fork.park();
        let mut selected = life.fork();
        selected.select_sequences(&[3, 1, 1]);
        let lengths = life.lengths();
        let most: Vec<usize> = lengths
            .iter()
            .map(|length| length - length.min(&1))
            .collect();
        life.truncate(if life.model.slides() { &lengths } else { &most });
        life.park();
        life.move_to_another(true, true);
        life.resume(Some(1));
        life.resume(None);
        life.begin_draft();
        life.feed(&vec![4; lengths.len()], false, 2);
        life.park();
        life.resume(Some(0));
        let mut kept = life.fork();
        life.end_draft(Draft::Discard);
        kept.truncate(&kept.lengths().iter().map(|n| n - 2).collect::<Vec<_>>());
        kept.end_draft(Draft::Accept);
        for mut life in [life, fork, kept] {
            life.finish();
        }
        drop(selected);
    }
}

/// What comes back is all that was there, though the queries of a draft may yet be taken back.
#[test]
fn what_is_parked_in_a_draft_comes_back_with_it() {
    for mut life in everywhere_alive().filter(|life| matches!(life.kind, Kind::Residual { .. })) {
        life.begin_draft();
        life.feed(&[5, 2], false, 1);
        life.park();
        life.feed(&[1, 1], false, 2);
        life.park();
        life.resume(None);
        life.feed(&[1, 0], false, 3);
        life.truncate(&[4, 3]);
        life.feed(&[1, 1], false, 4);
        life.end_draft(Draft::Accept);
        life.finish();
    }
}

#[test]
fn the_last_call_can_be_undone_after_anything_that_feeds_nothing() {
    for (model, kind) in everywhere().filter(|(_, kind)| kind.lossless()) {
        let mut life = Life::new(model, kind);
        life.feed(&[30, 4, 9], false, 1);
        life.feed(&[20, 0, 1], false, 2);
        for by_file in [false, true] {
            life.move_to_another(by_file, false);
        }
        life.select_sequences(&[2, 0, 1, 0]);
        life.begin_draft();
        life.end_draft(Draft::Discard);
        life.begin_draft();
        life.end_draft(Draft::Accept);
        if matches!(kind, Kind::Residual { .. }) {
            life.park();
        }
        life = life.fork();
        let undo = life.undo();
        assert_eq!(undo, [9, 30, 4, 30]);
        life.truncate(&undo);
        life.move_to_another(true, false);
        life.finish();
    }
}

#[test]
fn a_state_is_what_was_when_it_was_taken() {
    for (model, kind) in everywhere() {
        let mut life = Life::new(model, kind);
        life.feed(&[9, 2], false, 1);
        life.feed(&[3, 0], false, 2);
        let state = life.held.get().state().expect("no draft");
        let mut twin = life.fork();
        life.feed(&[4, 4], false, 3);
        life.finish();
        let [mut one, mut two] = [Held::new(model, kind), Held::new(model, kind)];
        one.get_mut().set_state(&state).expect("its own");
        goes_on_alike(model, one.get_mut(), twin.held.get_mut());
        two.get_mut().set_state(&state).expect("again");
        one.get_mut().set_state(&state).expect("over another");
        goes_on_alike(model, one.get_mut(), two.get_mut());
    }
}

#[test]
fn a_state_of_another_kind_is_refused_by_every_cache_and_changes_nothing() {
    let (one, two) = (&models()[1], &models()[3]);
    let mut all: Vec<(&Model, Kind)> = kinds().into_iter().map(|kind| (one, kind)).collect();
    all.extend([(&models()[2], Kind::Full), (&models()[4], Kind::Full)]);
    all.push((&models()[FIRST_SLIDING], Kind::Full));
    let fed: Vec<Life> = all
        .iter()
        .map(|&(model, kind)| {
            let mut life = Life::new(model, kind);
            life.feed(&[9, 2], false, 1);
            life
        })
        .collect();
    for (from, origin) in fed.iter().enumerate() {
        let state = origin.held.get().state().expect("no draft");
        for (to, other) in fed.iter().enumerate().filter(|(to, _)| *to != from) {
            let mut other = other.fork();
            other.begin_draft();
            other.feed(&[1, 1], false, 2);
            other.refused(&format!("{from} into {to}"), |cache| {
                let refused = cache.set_state(&state);
                matches!(refused, Err(CacheError::Foreign { .. }))
            });
            other.end_draft(Draft::Discard);
            other.finish();
        }
    }
    // Biases are not in the shape: a file knows its weights, a state does not.
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("session");
    let model = one.decoder.fingerprint();
    session::save(&path, fed[0].held.get(), &model).expect("it can be written");
    let mut other = FullKv::new(&two.decoder.shape());
    let refused = session::load(
        &path,
        &mut other,
        &two.decoder.fingerprint(),
        two.decoder.device(),
    );
    assert!(
        matches!(refused, Err(SessionError::Model { .. })),
        "{refused:?}"
    );
}

#[test]
fn a_step_left_open_refuses_everything_but_a_state_and_clear() {
    for (model, kind) in everywhere() {
        let mut life = Life::new(model, kind);
        life.feed(&[9, 2], false, 1);
        let state = life.held.get().state().expect("no draft");
        let expected = life.fork();
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("session");
        std::fs::write(&path, "what was there").expect("a file");
        let step = Step::new(vec![vec![1], vec![2]].into(), &[9, 2]).expect("a step");
        life.held.get_mut().begin(&step).expect("it follows");
        let poisoned = |refused: Result<(), CacheError>| {
            assert!(
                matches!(refused, Err(CacheError::Poisoned)),
                "{kind:?}: {refused:?}"
            );
        };
        let before = seen(life.held.get(), model.layers());
        let cache = life.held.get_mut();
        poisoned(cache.begin(&step));
        poisoned(cache.truncate_all(3));
        poisoned(cache.truncate(&[3, 2]));
        poisoned(cache.begin_draft());
        poisoned(cache.end_draft(Draft::Discard));
        poisoned(cache.end_draft(Draft::Accept));
        poisoned(cache.select_sequences(&[0]));
        poisoned(cache.state().map(drop));
        let saved = session::save(&path, cache, &model.decoder.fingerprint());
        assert!(
            matches!(
                saved,
                Err(SessionError::Cache {
                    source: CacheError::Poisoned,
                    ..
                })
            ),
            "{saved:?}"
        );
        if matches!(kind, Kind::Residual { .. }) {
            poisoned(cache.park());
        }
        if let Held::Residual(cache) = &mut life.held {
            let decoder = &model.decoder;
            let go_on = |_| std::ops::ControlFlow::Continue(());
            poisoned(cache.resume(|layer| decoder.at(layer), go_on).map(drop));
        }
        assert_eq!(seen(life.held.get(), model.layers()), before);
        let file = std::fs::read(&path).expect("it is there");
        assert_eq!(file, b"what was there");
        assert_eq!(
            std::fs::read_dir(folder.path()).expect("a folder").count(),
            1,
            "nothing is left beside it"
        );
        let cache = life.held.get_mut();
        cache.set_state(&state).expect("whatever happened before");
        let mut expected = expected.held;
        goes_on_alike(model, cache, expected.get_mut());
    }
}

#[test]
fn a_share_of_a_prompt_holds_when_chunks_come_in_a_draft() {
    let share = TokenBudget::of_prompt(0.5).expect("a share");
    let model = &models()[1];
    let make = || Tova::new(&model.decoder.shape(), TovaConfig::new(share)).expect("a budget");
    let (mut one, mut two) = (make(), make());
    let ids = tokens(3, 16);
    let calls = [
        (0..5, true),
        (5..10, true),
        (10..14, false),
        (14..16, false),
    ];
    one.begin_draft().expect("none is open");
    for (range, more) in calls {
        let input = Input::from(&ids[range]).more_follows(more);
        model.decoder.forward(input, &mut one).expect("a good call");
    }
    one.truncate_all(14).expect("within the draft");
    one.end_draft(Draft::Accept).expect("one is open");
    feed(&model.decoder, &mut two, &ids[..14]);
    assert_eq!(seen(&one, 3), seen(&two, 3));
    goes_on_alike(model, &mut one, &mut two);
}
