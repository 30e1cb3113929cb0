//! Each policy against an uncached f64 forward that sees what its rules leave.

use kv_direct::{
    cache::CacheBackend,
    policy::{Group, Pooling},
};

use crate::support::{
    driver::{Model, Steps, assert_obeys, backend, run, run_on},
    models,
    policies::{chunked, one_of_each, plain, ragged, snap, unannounced},
    random::tokens,
    simulator::{
        Amount::{Entries, Share},
        Cuts, Held, Policy,
    },
};

/// Attention works in blocks of 256 slots. An eviction may stay within one, cross from one to another, and return.
#[test]
fn eviction_is_the_same_beyond_one_block() {
    let model = Model::new("llama 4/2", models::config(4, 2));
    let steps: Steps = [(500, true), (30, false), (1, false), (9, false), (1, false)]
        .map(|(tokens, more)| (vec![tokens], more))
        .into();
    let h2o = |budget, recent| Policy::H2o {
        budget: Entries(budget),
        recent: Entries(recent),
        sinks: 4,
        group: Group::Mean,
    };
    let tova = Policy::Tova {
        budget: Entries(514),
        protect_last: false,
    };
    let streaming = Policy::Streaming {
        sinks: 4,
        recent: Entries(100),
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
        let run = run(&model, &mut *cache, &steps, 1);
        cuts = cuts.and(assert_obeys(&model, policy, &steps, &run));
    }
    println!("{cuts:?}");
    assert!(cuts.doubtful * 2 <= cuts.made, "rounding decides: {cuts:?}");
}

/// Every policy on every model with every split. Rounding may decide few evictions.
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
            for steps in [plain(), chunked(), unannounced(), ragged()] {
                seed += 10;
                let mut cache = backend(policy, &model.decoder.shape()).expect("fits");
                let run = run(&model, &mut *cache, &steps, seed);
                let more = assert_obeys(&model, policy, &steps, &run);
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
fn full_kv_and_windows_hold_the_newest_tokens() {
    let sizes = [1, 2, 7, 25, 26, 40, 100].map(|size| Policy::Window { size });
    assert_all_obey(&[&[Policy::Full], &sizes[..]].concat());
}

#[test]
fn streaming_llm_holds_sinks_and_newest_at_original_positions() {
    let recents = [
        (4, Entries(12)),
        (0, Entries(5)),
        (1, Entries(1)),
        (30, Entries(3)),
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
        (4, Entries(12)),
        (0, Entries(5)),
        (1, Entries(1)),
        (30, Entries(3)),
        (2, Share(0.3)),
    ];
    assert_all_obey(&config.map(|(sinks, recent)| Policy::Streaming {
        sinks,
        recent,
        reindexed: true,
    }));
}

#[test]
fn h2o_holds_the_highest_sums_and_the_newest_tokens() {
    let h2o = |budget, recent, sinks, group| Policy::H2o {
        budget,
        recent,
        sinks,
        group,
    };
    assert_all_obey(&[
        h2o(Entries(16), Entries(8), 0, Group::Mean),
        h2o(Entries(9), Entries(3), 2, Group::Max),
        h2o(Entries(12), Entries(0), 0, Group::Sum),
        h2o(Entries(1), Entries(0), 0, Group::Max),
        h2o(Entries(1), Entries(1), 0, Group::Mean),
        h2o(Entries(6), Entries(2), 4, Group::Mean),
        h2o(Share(0.5), Share(0.25), 1, Group::Mean),
        h2o(Entries(100), Entries(10), 0, Group::Mean),
    ]);
}

#[test]
fn tova_holds_what_the_newest_query_attends_to() {
    let budgets = [
        Entries(16),
        Entries(1),
        Entries(2),
        Entries(7),
        Share(0.4),
        Entries(100),
    ];
    let of = |protect_last| {
        budgets.map(|budget| Policy::Tova {
            budget,
            protect_last,
        })
    };
    assert_all_obey(&[of(false), of(true)].concat());
}

#[test]
fn tova_may_evict_its_newest_entry_unless_protected() {
    let model = Model::new("llama 4/2", models::config(4, 2));
    for protect_last in [false, true] {
        let policy = Policy::Tova {
            budget: Entries(8),
            protect_last,
        };
        let mut cache = backend(policy, &model.decoder.shape()).expect("fits");
        let run = run(&model, &mut *cache, &plain(), 1);
        assert_obeys(&model, policy, &plain(), &run);
        let newest_held = |(step, held): (usize, &Held)| {
            held.iter()
                .flatten()
                .all(|held| held.contains(&(25 + step)))
        };
        let always = run.held[0].iter().enumerate().all(newest_held);
        assert_eq!(always, protect_last);
    }
}

#[test]
fn snap_kv_holds_what_the_end_of_the_prompt_attends_to() {
    let of = |budget, window, pooling, kernel, group| Policy::Snap {
        budget,
        window,
        pooling,
        kernel,
        group,
    };
    assert_all_obey(&[
        of(Entries(12), 4, Pooling::Average, 5, Group::Mean),
        of(Entries(12), 4, Pooling::Max, 7, Group::Mean),
        of(Entries(10), 9, Pooling::Average, 3, Group::Max),
        of(Entries(8), 1, Pooling::Max, 3, Group::Max),
        of(Entries(9), 2, Pooling::Average, 1, Group::Sum),
        of(Entries(2), 1, Pooling::Max, 5, Group::Sum),
        of(Entries(24), 20, Pooling::Average, 51, Group::Max),
        of(Share(0.5), 3, Pooling::Max, 5, Group::Mean),
        of(Entries(100), 8, Pooling::Average, 5, Group::Mean),
    ]);
}

/// Tokens from before `clear`, and those of a fork, have no effect on later steps.
#[test]
fn clearing_and_forking_leave_no_trace() {
    for model in [
        Model::new("llama 4/2", models::config(4, 2)),
        Model::new("gemma", models::gemma()),
    ] {
        for policy in one_of_each() {
            let Ok(mut cache) = backend(policy, &model.decoder.shape()) else {
                assert!(model.slides());
                continue;
            };
            run(&model, &mut *cache, &ragged(), 1);
            cache.clear();
            let steps = chunked();
            let (before, after) = steps.split_at(2);
            let mut first = run(&model, &mut *cache, before, 2);
            let mut fork = cache.fork();
            run(&model, &mut *fork, &chunked(), 3);
            let rest = run_on(&model, &mut *cache, after, vec![tokens(7, 40)]);
            first.extend(0, &rest);
            assert_obeys(&model, policy, &steps, &first);
        }
    }
}
