//! Lossy policies against an uncached f64 forward that sees what their rules leave, by family, budget,
//! cutting and batch row.

use crate::support::CacheExt as _;
use kv_direct::{
    cache::{CacheBackend, CacheError, LayerIndex},
    model::Input,
    policy::{FullKv, Group, Pooling},
};

use crate::{
    driver::{Calls, Model, Run, assert_obeys, backend, run, run_on},
    families,
    random::tokens,
    simulator::{
        Amount::{self, Rows, Share},
        Cuts, Held, Policy,
    },
    support::bits,
};

/// A prompt of 26 in one call, then one by one.
fn plain() -> Calls {
    let mut calls = vec![(vec![26], false)];
    calls.resize(13, (vec![1], false));
    calls
}

/// A prompt in uneven chunks, then a turn of several tokens between single ones.
fn chunked() -> Calls {
    let prompt = [(7, true), (1, true), (13, true), (5, false)];
    let turns = [
        (1, false),
        (6, false),
        (1, false),
        (3, true),
        (2, false),
        (1, false),
    ];
    let calls = prompt.into_iter().chain(turns);
    calls.map(|(tokens, more)| (vec![tokens], more)).collect()
}

/// Calls of several tokens that do not say that more follows.
fn unannounced() -> Calls {
    [9, 1, 12, 4, 1, 1, 7, 3]
        .map(|tokens| (vec![tokens], false))
        .into()
}

/// Rows of different length, each silent in some call.
fn ragged() -> Calls {
    vec![
        (vec![9, 3, 20], true),
        (vec![8, 0, 1], true),
        (vec![3, 11, 2], false),
        (vec![1, 1, 1], false),
        (vec![0, 4, 1], false),
        (vec![5, 1, 0], false),
        (vec![1, 1, 1], false),
    ]
}

/// Buffers come in pieces of 512 slots: a cut within one, across the edge of two, and back.
#[test]
fn a_cut_beyond_one_piece_of_slots_is_as_any_other() {
    let model = Model::new("llama 4/2", families::config(4, 2));
    let calls: Calls = [(500, true), (30, false), (1, false), (9, false), (1, false)]
        .map(|(tokens, more)| (vec![tokens], more))
        .into();
    let h2o = |budget, recent| Policy::H2o {
        budget: Rows(budget),
        recent: Rows(recent),
        sinks: 4,
        group: Group::Mean,
    };
    let tova = Policy::Tova {
        budget: Rows(514),
        protect_last: false,
    };
    let streaming = Policy::Streaming {
        sinks: 4,
        recent: Rows(100),
        reindexed: true,
    };
    let mut cuts = Cuts::default();
    for policy in [
        streaming,
        h2o(514, 20),
        h2o(60, 20),
        tova,
        snap(Share(0.98), 40),
    ] {
        let mut cache = backend(policy, &model.decoder.shape()).expect("fits");
        let run = run(&model, &mut *cache, &calls, 1);
        cuts = cuts.and(assert_obeys(&model, policy, &calls, &run));
    }
    println!("{cuts:?}");
    assert!(cuts.doubtful * 2 <= cuts.made, "rounding decides: {cuts:?}");
}

/// Every policy on every model with every cutting; rounding may decide few cuts.
#[track_caller]
fn assert_all_obey(policies: &[Policy]) {
    let mut cuts = Cuts::default();
    let mut seed = 100;
    for model in Model::all() {
        for &policy in policies {
            if model.slides()
                && matches!(
                    policy,
                    Policy::Streaming {
                        reindexed: true,
                        ..
                    }
                )
            {
                continue;
            }
            for calls in [plain(), chunked(), unannounced(), ragged()] {
                seed += 10;
                let mut cache = backend(policy, &model.decoder.shape()).expect("fits");
                let run = run(&model, &mut *cache, &calls, seed);
                let more = assert_obeys(&model, policy, &calls, &run);
                cuts = cuts.and(more);
            }
        }
    }
    println!("{cuts:?}");
    assert!(
        cuts.doubtful * 20 <= cuts.made,
        "rounding decides: {cuts:?}"
    );
}

#[test]
fn full_kv_and_windows_hold_the_newest() {
    let sizes = [1, 2, 7, 25, 26, 40, 100].map(|size| Policy::Window { size });
    assert_all_obey(&[&[Policy::Full], &sizes[..]].concat());
}

#[test]
fn streaming_llm_holds_sinks_and_newest_at_original_positions() {
    let recents = [
        (4, Rows(12)),
        (0, Rows(5)),
        (1, Rows(1)),
        (30, Rows(3)),
        (2, Share(0.3)),
    ];
    assert_all_obey(&recents.map(|(sinks, recent)| Policy::Streaming {
        sinks,
        recent,
        reindexed: false,
    }));
}

#[test]
fn streaming_llm_counts_positions_in_the_cache() {
    let config = [
        (4, Rows(12)),
        (0, Rows(5)),
        (1, Rows(1)),
        (30, Rows(3)),
        (2, Share(0.3)),
    ];
    assert_all_obey(&config.map(|(sinks, recent)| Policy::Streaming {
        sinks,
        recent,
        reindexed: true,
    }));
}

#[test]
fn h2o_holds_what_gathered_most_and_the_newest() {
    let h2o = |budget, recent, sinks, group| Policy::H2o {
        budget,
        recent,
        sinks,
        group,
    };
    assert_all_obey(&[
        h2o(Rows(16), Rows(8), 0, Group::Mean),
        h2o(Rows(9), Rows(3), 2, Group::Max),
        h2o(Rows(12), Rows(0), 0, Group::Sum),
        h2o(Rows(1), Rows(0), 0, Group::Max),
        h2o(Rows(1), Rows(1), 0, Group::Mean),
        h2o(Rows(6), Rows(2), 4, Group::Mean),
        h2o(Share(0.5), Share(0.25), 1, Group::Mean),
        h2o(Rows(100), Rows(10), 0, Group::Mean),
    ]);
}

#[test]
fn tova_holds_what_the_newest_query_reads() {
    let budgets = [Rows(16), Rows(1), Rows(2), Rows(7), Share(0.4), Rows(100)];
    let of = |protect_last| {
        budgets.map(|budget| Policy::Tova {
            budget,
            protect_last,
        })
    };
    assert_all_obey(&[of(false), of(true)].concat());
}

#[test]
fn tova_may_drop_its_newest_row_at_once_unless_it_is_protected() {
    let model = Model::new("llama 4/2", families::config(4, 2));
    for protect_last in [false, true] {
        let policy = Policy::Tova {
            budget: Rows(8),
            protect_last,
        };
        let mut cache = backend(policy, &model.decoder.shape()).expect("fits");
        let run = run(&model, &mut *cache, &plain(), 1);
        assert_obeys(&model, policy, &plain(), &run);
        let newest_held = |(call, held): (usize, &Held)| {
            held.iter()
                .flatten()
                .all(|held| held.contains(&(25 + call)))
        };
        let always = run.held[0].iter().enumerate().all(newest_held);
        assert_eq!(always, protect_last);
    }
}

#[test]
fn budgets_that_hold_nothing_are_refused() {
    let shape = Model::new("llama 4/2", families::config(4, 2))
        .decoder
        .shape();
    let h2o = |budget, recent, sinks| Policy::H2o {
        budget: Rows(budget),
        recent: Rows(recent),
        sinks,
        group: Group::Mean,
    };
    let streaming = |recent| Policy::Streaming {
        sinks: 4,
        recent: Rows(recent),
        reindexed: true,
    };
    let tova = |budget| Policy::Tova {
        budget: Rows(budget),
        protect_last: true,
    };
    for (refused, least) in [
        (Policy::Window { size: 0 }, Policy::Window { size: 1 }),
        (streaming(0), streaming(1)),
        (h2o(0, 0, 0), h2o(1, 0, 0)),
        (h2o(4, 3, 2), h2o(5, 3, 2)),
        (tova(0), tova(1)),
        (snap(Rows(3), 3), snap(Rows(4), 3)),
        (snap(Rows(3), 0), snap(Rows(3), 1)),
    ] {
        assert!(backend(refused, &shape).is_err(), "{refused:?}");
        assert!(backend(least, &shape).is_ok(), "{least:?}");
    }
}

#[test]
fn snap_kv_holds_what_the_end_of_the_prompt_reads_and_all_that_follows() {
    let of = |budget, window, pooling, kernel, group| Policy::Snap {
        budget,
        window,
        pooling,
        kernel,
        group,
    };
    assert_all_obey(&[
        of(Rows(12), 4, Pooling::Average, 5, Group::Mean),
        of(Rows(12), 4, Pooling::Max, 7, Group::Mean),
        of(Rows(10), 9, Pooling::Average, 3, Group::Max),
        of(Rows(8), 1, Pooling::Max, 3, Group::Max),
        of(Rows(9), 2, Pooling::Average, 1, Group::Sum),
        of(Rows(2), 1, Pooling::Max, 5, Group::Sum),
        of(Rows(24), 20, Pooling::Average, 51, Group::Max),
        of(Share(0.5), 3, Pooling::Max, 5, Group::Mean),
        of(Rows(100), 8, Pooling::Average, 5, Group::Mean),
    ]);
}

fn snap(budget: Amount, window: usize) -> Policy {
    Policy::Snap {
        budget,
        window,
        pooling: Pooling::Average,
        kernel: 3,
        group: Group::Mean,
    }
}

#[test]
fn a_prompt_is_cut_once_however_many_calls_pass_its_row_by() {
    let model = Model::new("llama 4/2", families::config(4, 2));
    let calls = |passing: usize| -> Calls {
        let mut calls = vec![(vec![7, 0], true), (vec![8, 0], false)];
        calls.resize(2 + passing, (vec![0, 3], false));
        calls.push((vec![2, 1], false));
        calls
    };
    for passing in [0, 1, 3] {
        for policy in [snap(Rows(6), 3), snap(Share(0.5), 3)] {
            let mut cache = backend(policy, &model.decoder.shape()).expect("fits");
            let run = run(&model, &mut *cache, &calls(passing), 1);
            assert_obeys(&model, policy, &calls(passing), &run);
            let cut = &run.held[0][1];
            let later = &run.held[0][2 + passing];
            for (cut, later) in cut.iter().flatten().zip(later.iter().flatten()) {
                assert_eq!(cut.len() + 2, later.len());
                assert!(later.starts_with(cut));
            }
        }
    }
}

/// What decides the cut of a row whose prompt ends in a call that brings it nothing is its last query.
#[test]
fn a_prompt_may_end_while_its_row_is_silent() {
    let tova = |protect_last| Policy::Tova {
        budget: Share(0.4),
        protect_last,
    };
    let h2o = Policy::H2o {
        budget: Share(0.4),
        recent: Share(0.2),
        sinks: 1,
        group: Group::Mean,
    };
    let calls: Calls = vec![
        (vec![0, 4, 9], true),
        (vec![12, 0, 3], true),
        (vec![0, 3, 1], false),
        (vec![1, 1, 1], false),
        (vec![0, 6, 1], false),
    ];
    for model in Model::all() {
        for policy in [
            tova(false),
            tova(true),
            h2o,
            snap(Rows(6), 3),
            snap(Share(0.5), 3),
        ] {
            let mut cache = backend(policy, &model.decoder.shape()).expect("fits");
            let run = run(&model, &mut *cache, &calls, 5);
            assert_obeys(&model, policy, &calls, &run);
        }
    }
}

#[test]
fn what_was_taken_back_before_a_cut_has_no_say_in_it() {
    let model = Model::new("llama 4/2", families::config(4, 2));
    let policies = [
        Policy::Tova {
            budget: Share(0.4),
            protect_last: false,
        },
        Policy::Streaming {
            sinks: 2,
            recent: Share(0.3),
            reindexed: true,
        },
        Policy::Window { size: 12 },
    ];
    let ids = tokens(3, 40);
    let call = |cache: &mut Box<dyn CacheBackend>, from: usize, to: usize, more| {
        let input = Input::from(&ids[from..to]).more_follows(more);
        let logits = model.decoder.forward(input, cache).expect("a good call");
        let kept: Vec<_> = (0..3)
            .map(|layer| cache.cached(LayerIndex::new(layer)))
            .collect();
        (bits(&logits), kept)
    };
    for policy in policies {
        let new = || backend(policy, &model.decoder.shape()).expect("fits");
        let (mut straight, mut detour) = (new(), new());
        call(&mut straight, 0, 6, true);
        call(&mut detour, 0, 6, true);
        call(&mut detour, 20, 25, true);
        detour.truncate_all(6).expect("nothing was dropped");
        for (from, to, more) in [
            (6, 8, true),
            (8, 15, false),
            (15, 16, false),
            (16, 19, false),
        ] {
            let expected = call(&mut straight, from, to, more);
            assert!(
                call(&mut detour, from, to, more) == expected,
                "{policy:?}, {from}"
            );
        }
    }
}

/// What the queries before the last ones gave is gone: those that would vote then are not known.
#[test]
fn a_prompt_that_goes_on_cannot_be_taken_back_before_its_cut() {
    let model = Model::new("llama 4/2", families::config(4, 2));
    let ids = tokens(3, 20);
    let mut cache = backend(snap(Rows(9), 5), &model.decoder.shape()).expect("fits");
    let call = |cache: &mut Box<dyn CacheBackend>, from: usize, to: usize, more| {
        let input = Input::from(&ids[from..to]).more_follows(more);
        bits(&model.decoder.forward(input, cache).expect("a good call"))
    };
    call(&mut cache, 0, 10, true);
    let mut untouched = cache.fork();
    let refused = cache.truncate_all(6).expect_err("more chunks follow");
    assert!(
        matches!(
            refused,
            CacheError::Irreversible {
                sequence: 0,
                to: 6,
                oldest: 10
            }
        ),
        "{refused:?}"
    );
    for (from, to, more) in [(10, 13, false), (13, 14, false)] {
        assert!(call(&mut cache, from, to, more) == call(&mut untouched, from, to, more));
    }
    assert_eq!(
        cache.cached(LayerIndex::new(1)),
        untouched.cached(LayerIndex::new(1))
    );
    cache.truncate_all(13).expect("what came after the prompt");
}

#[test]
fn a_budget_that_never_binds_changes_no_bit() {
    let h2o = |budget| Policy::H2o {
        budget,
        recent: Rows(3),
        sinks: 2,
        group: Group::Max,
    };
    let tova = |budget| Policy::Tova {
        budget,
        protect_last: false,
    };
    let streaming = |reindexed| Policy::Streaming {
        sinks: 4,
        recent: Rows(40),
        reindexed,
    };
    let window = Policy::Window { size: 40 };
    let all = [
        window,
        streaming(false),
        streaming(true),
        h2o(Rows(40)),
        tova(Rows(40)),
        snap(Rows(40), 39),
        snap(Share(1.0), 3),
    ];
    for model in Model::all() {
        let shape = model.decoder.shape();
        for calls in [plain(), chunked(), unannounced(), ragged()] {
            let expected = run(&model, &mut FullKv::new(&shape), &calls, 9);
            for policy in all {
                let Ok(mut cache) = backend(policy, &shape) else {
                    assert!(model.slides() && policy == streaming(true));
                    continue;
                };
                let found = run(&model, &mut *cache, &calls, 9);
                let bits = |run: &Run| -> Vec<u32> {
                    let logits = run.logits.iter().flatten();
                    logits.map(|logit| logit.to_bits()).collect()
                };
                assert!(
                    bits(&found) == bits(&expected),
                    "{}, {policy:?}",
                    model.name
                );
                assert_eq!(found.held, expected.held, "{}, {policy:?}", model.name);
            }
        }
    }
}

/// What a cache saw before `clear` has no part in what it does after, nor has one that was forked off.
#[test]
fn a_cleared_cache_starts_anew_and_a_fork_goes_its_own_way() {
    for model in [
        Model::new("llama 4/2", families::config(4, 2)),
        Model::new("gemma", families::gemma()),
    ] {
        for policy in one_of_each() {
            let Ok(mut cache) = backend(policy, &model.decoder.shape()) else {
                assert!(model.slides());
                continue;
            };
            run(&model, &mut *cache, &ragged(), 1);
            cache.clear();
            let calls = chunked();
            let (before, after) = calls.split_at(2);
            let mut first = run(&model, &mut *cache, before, 2);
            let mut fork = cache.fork();
            run(&model, &mut *fork, &chunked(), 3);
            let rest = run_on(&model, &mut *cache, after, vec![tokens(7, 40)]);
            first.extend(0, &rest);
            assert_obeys(&model, policy, &calls, &first);
        }
    }
}

fn one_of_each() -> Vec<Policy> {
    let streaming = |reindexed| Policy::Streaming {
        sinks: 2,
        recent: Rows(6),
        reindexed,
    };
    let h2o = |budget| Policy::H2o {
        budget,
        recent: Rows(3),
        sinks: 1,
        group: Group::Mean,
    };
    let tova = |budget| Policy::Tova {
        budget,
        protect_last: false,
    };
    vec![
        Policy::Window { size: 6 },
        streaming(false),
        streaming(true),
        h2o(Rows(8)),
        h2o(Share(0.4)),
        tova(Rows(8)),
        tova(Share(0.4)),
        snap(Rows(8), 3),
        snap(Share(0.4), 3),
    ]
}

/// Between the budget and one row less, at the end of the prompt.
#[test]
fn a_budget_binds_from_one_row_beyond_it() {
    let model = Model::new("llama 4/2", families::config(4, 2));
    for prompt in 7..=9 {
        let calls: Calls = vec![(vec![prompt], false), (vec![1], false), (vec![5], false)];
        for policy in one_of_each() {
            let mut cache = backend(policy, &model.decoder.shape()).expect("fits");
            let run = run(&model, &mut *cache, &calls, 1);
            assert_obeys(&model, policy, &calls, &run);
        }
    }
}
