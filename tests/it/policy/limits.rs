//! Token budgets: where they bind, and which are refused.

use kv_direct::{
    cache::CacheError,
    policy::{FullKv, Group, Window},
};

use crate::support::{
    driver::{Model, Run, Steps, assert_obeys, backend, run},
    models::{self, tiny},
    policies::{chunked, one_of_each, plain, ragged, snap, unannounced},
    simulator::{
        Amount::{Entries, Share},
        Policy,
    },
};

#[test]
fn budgets_that_hold_nothing_are_refused() {
    let shape = Model::new("llama 4/2", models::config(4, 2))
        .decoder
        .shape();
    let h2o = |budget, recent, sinks| Policy::H2o {
        budget: Entries(budget),
        recent: Entries(recent),
        sinks,
        group: Group::Mean,
    };
    let streaming = |recent| Policy::Streaming {
        sinks: 4,
        recent: Entries(recent),
        reindexed: true,
    };
    let tova = |budget| Policy::Tova {
        budget: Entries(budget),
        protect_last: true,
    };
    for (refused, least) in [
        (Policy::Window { size: 0 }, Policy::Window { size: 1 }),
        (streaming(0), streaming(1)),
        (h2o(0, 0, 0), h2o(1, 0, 0)),
        (h2o(4, 3, 2), h2o(5, 3, 2)),
        (tova(0), tova(1)),
        (snap(Entries(3), 3), snap(Entries(4), 3)),
        (snap(Entries(3), 0), snap(Entries(3), 1)),
    ] {
        assert!(backend(refused, &shape).is_err(), "{refused:?}");
        assert!(backend(least, &shape).is_ok(), "{least:?}");
    }
}

#[test]
fn a_budget_that_never_binds_changes_no_bit() {
    let h2o = |budget| Policy::H2o {
        budget,
        recent: Entries(3),
        sinks: 2,
        group: Group::Max,
    };
    let tova = |budget| Policy::Tova {
        budget,
        protect_last: false,
    };
    let streaming = |reindexed| Policy::Streaming {
        sinks: 4,
        recent: Entries(40),
        reindexed,
    };
    let window = Policy::Window { size: 40 };
    let all = [
        window,
        streaming(false),
        streaming(true),
        h2o(Entries(40)),
        tova(Entries(40)),
        snap(Entries(40), 39),
        snap(Share(1.0), 3),
    ];
    for model in Model::all() {
        let shape = model.decoder.shape();
        for steps in [plain(), chunked(), unannounced(), ragged()] {
            let expected = run(&model, &mut FullKv::new(&shape), &steps, 9);
            for policy in all {
                let Ok(mut cache) = backend(policy, &shape) else {
                    assert!(model.slides() && policy == streaming(true));
                    continue;
                };
                let found = run(&model, &mut *cache, &steps, 9);
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

/// Prompts of one token less than the budget, of as many, and of one more.
#[test]
fn a_budget_binds_from_one_entry_beyond_it() {
    let model = Model::new("llama 4/2", models::config(4, 2));
    for prompt in 7..=9 {
        let steps: Steps = vec![(vec![prompt], false), (vec![1], false), (vec![5], false)];
        for policy in one_of_each() {
            let mut cache = backend(policy, &model.decoder.shape()).expect("fits");
            let run = run(&model, &mut *cache, &steps, 1);
            assert_obeys(&model, policy, &steps, &run);
        }
    }
}

#[test]
fn a_window_of_zero_is_refused() {
    let shape = tiny(2).shape();
    assert!(matches!(
        Window::new(&shape, 0),
        Err(CacheError::Budget {
            found: 0,
            smallest: 1
        })
    ));
}
