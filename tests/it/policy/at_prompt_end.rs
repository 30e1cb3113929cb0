//! What decides the eviction at the end of a prompt.

use kv_direct::{
    cache::{CacheBackend, CacheError, LayerIndex, TokenIds},
    model::Input,
    policy::{Group, SnapKv, SnapKvConfig, TokenBudget, Tova, TovaConfig},
};

use crate::support::{
    caches::CacheExt as _,
    driver::{Model, Steps, assert_obeys, backend, run},
    feed::{bits, feed},
    kinds::{decoders, every_run, h2o, tova},
    models::{self, tiny},
    policies::snap,
    random::tokens,
    simulator::{
        Amount::{self, Entries, Share},
        Policy,
    },
    test_run::TestRun,
};

#[test]
fn a_prompt_is_cut_once_however_long_it_is_idle() {
    let model = Model::new("llama 4/2", models::config(4, 2));
    let steps = |passing: usize| -> Steps {
        let mut steps = vec![(vec![7, 0], true), (vec![8, 0], false)];
        steps.resize(2 + passing, (vec![0, 3], false));
        steps.push((vec![2, 1], false));
        steps
    };
    for passing in [0, 1, 3] {
        for policy in [snap(Entries(6), 3), snap(Share(0.5), 3)] {
            let mut cache = backend(policy, &model.decoder.shape()).expect("fits");
            let run = run(&model, &mut *cache, &steps(passing), 1);
            assert_obeys(&model, policy, &steps(passing), &run);
            let cut = &run.held[0][1];
            let later = &run.held[0][2 + passing];
            for (cut, later) in cut.iter().flatten().zip(later.iter().flatten()) {
                assert_eq!(cut.len() + 2, later.len());
                assert!(later.starts_with(cut));
            }
        }
    }
}

/// A prompt may end in a step that brings its sequence nothing. Its last query then decides what is evicted.
#[test]
fn a_prompt_may_end_while_its_sequence_is_idle() {
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
    let steps: Steps = vec![
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
            snap(Entries(6), 3),
            snap(Share(0.5), 3),
        ] {
            let mut cache = backend(policy, &model.decoder.shape()).expect("fits");
            let run = run(&model, &mut *cache, &steps, 5);
            assert_obeys(&model, policy, &steps, &run);
        }
    }
}

#[test]
fn tokens_truncated_before_a_cut_do_not_decide_it() {
    let model = Model::new("llama 4/2", models::config(4, 2));
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
    let step = |cache: &mut Box<dyn CacheBackend>, from: usize, to: usize, more| {
        let input = Input::from(&ids[from..to]).more_follows(more);
        let logits = model.decoder.forward(input, cache).expect("a valid step");
        let cached: Vec<_> = (0..3)
            .map(|layer| cache.cached(LayerIndex::new(layer)))
            .collect();
        (bits(&logits), cached)
    };
    for policy in policies {
        let new = || backend(policy, &model.decoder.shape()).expect("fits");
        let (mut straight, mut detour) = (new(), new());
        step(&mut straight, 0, 6, true);
        step(&mut detour, 0, 6, true);
        step(&mut detour, 20, 25, true);
        detour.truncate_all(6).expect("nothing was dropped");
        for (from, to, more) in [
            (6, 8, true),
            (8, 15, false),
            (15, 16, false),
            (16, 19, false),
        ] {
            let expected = step(&mut straight, from, to, more);
            assert!(
                step(&mut detour, from, to, more) == expected,
                "{policy:?}, {from}"
            );
        }
    }
}

/// The scores of the queries before the last ones are gone. Those that would decide after a truncation are
/// not known.
#[test]
fn an_unfinished_prompt_continues_after_a_refused_truncation() {
    let model = Model::new("llama 4/2", models::config(4, 2));
    let ids = tokens(3, 20);
    let mut cache = backend(snap(Entries(9), 5), &model.decoder.shape()).expect("fits");
    let step = |cache: &mut Box<dyn CacheBackend>, from: usize, to: usize, more| {
        let input = Input::from(&ids[from..to]).more_follows(more);
        bits(&model.decoder.forward(input, cache).expect("a valid step"))
    };
    step(&mut cache, 0, 10, true);
    let mut untouched = cache.fork();
    let refused = cache.truncate_all(6).expect_err("more chunks follow");
    assert!(
        matches!(
            refused,
            CacheError::Irreversible {
                sequence: 0,
                to: 6,
                shortest: 10
            }
        ),
        "{refused:?}"
    );
    for (from, to, more) in [(10, 13, false), (13, 14, false)] {
        assert!(step(&mut cache, from, to, more) == step(&mut untouched, from, to, more));
    }
    assert_eq!(
        cache.cached(LayerIndex::new(1)),
        untouched.cached(LayerIndex::new(1))
    );
    cache.truncate_all(13).expect("what came after the prompt");
}

#[test]
fn a_shortened_prompt_is_cut_as_if_never_longer() {
    for mut run in every_run() {
        run.feed(&[9, 12], true, 1);
        run.truncate(&[7, 12]);
        run.feed(&[1, 1], false, 2);
        run.finish();
    }
}

/// The scores of a truncated query do not count; the next query decides.
#[test]
fn the_next_query_decides_after_the_newest_was_truncated() {
    let mut run = TestRun::new(&decoders()[1], tova(Amount::Share(0.5)));
    run.feed(&[9, 12], true, 1);
    run.truncate(&[7, 12]);
    let cache = run.held.get_mut();
    let held = |cache: &dyn CacheBackend| cache.cached(LayerIndex::new(0)).sequence(0)[0].len();
    feed(run.decoder, cache, vec![vec![], vec![1]]);
    assert_eq!(held(cache), 7, "no query of it is known");
    feed(run.decoder, cache, vec![vec![1], vec![1]]);
    assert_eq!(held(cache), 3, "half of a prompt of 7");
}

/// Sums of probabilities cannot be taken apart again.
#[test]
fn h2o_refuses_to_truncate_its_scores() {
    let mut run = TestRun::new(&decoders()[1], h2o(Amount::Entries(40)));
    run.feed(&[9, 12], false, 1);
    run.refused("a part of them", |cache| {
        let refused = cache.truncate(&[8, 12]);
        matches!(refused, Err(CacheError::Irreversible { .. }))
    });
}

#[test]
fn a_truncated_prompt_is_over_and_new_tokens_stay() {
    let decoder = tiny(2);
    let mut cache = SnapKv::new(&decoder.shape(), SnapKvConfig::new(8, 4)).expect("fits");
    feed(&decoder, &mut cache, &tokens(1, 6)[..]);
    cache.truncate_all(4).expect("nothing was dropped");
    feed(&decoder, &mut cache, &tokens(2, 20)[..]);
    let cached = cache.cached(LayerIndex::new(0));
    assert_eq!(cached.sequence(0), [(0..24).collect::<Vec<_>>()]);
}

#[test]
fn snap_kv_refuses_to_truncate_an_unfinished_prompt() {
    let decoder = tiny(2);
    let mut cache = SnapKv::new(&decoder.shape(), SnapKvConfig::new(8, 4)).expect("fits");
    let open = Input::from(TokenIds::from(&tokens(1, 6)[..])).more_follows(true);
    decoder.forward(open, &mut cache).expect("a valid step");
    let refused = cache.truncate_all(5);
    assert!(
        matches!(
            refused,
            Err(CacheError::Irreversible {
                sequence: 0,
                to: 5,
                shortest: 6
            })
        ),
        "{refused:?}"
    );
    cache.truncate_all(6).expect("the length it has");
}

#[test]
fn an_idle_sequence_is_not_cut_again() {
    let decoder = tiny(2);
    let mut cache = SnapKv::new(&decoder.shape(), SnapKvConfig::new(8, 4)).expect("fits");
    feed(&decoder, &mut cache, vec![tokens(1, 15), tokens(2, 1)]);
    let cut = cache.cached(LayerIndex::new(0)).sequence(0).to_vec();
    assert_eq!(cut[0].len(), 8);
    feed(&decoder, &mut cache, vec![vec![], tokens(2, 13)]);
    assert_eq!(cache.cached(LayerIndex::new(0)).sequence(0), cut);
}

#[test]
fn scores_for_the_end_of_a_prompt_are_dropped_with_it() {
    let decoder = tiny(2);
    let share = |ratio| TokenBudget::of_prompt(ratio).expect("a share");
    let mut caches: Vec<Box<dyn CacheBackend>> = vec![
        Box::new(SnapKv::new(&decoder.shape(), SnapKvConfig::new(64, 8)).expect("fits")),
        Box::new(Tova::new(&decoder.shape(), TovaConfig::new(share(1.0))).expect("fits")),
    ];
    for cache in &mut caches {
        let chunk = |seed| vec![tokens(seed, 20), tokens(seed + 1, 12)];
        let input = Input::from(chunk(1)).more_follows(true);
        decoder.forward(input, cache).expect("a chunk");
        assert!(cache.memory().scores > 0, "{cache:?} waits for the end");
        decoder.forward(chunk(5), cache).expect("the last chunk");
        assert_eq!(
            cache.memory().scores,
            0,
            "{cache:?}: within the budget, nothing is cut"
        );
    }
}

#[test]
fn a_window_wider_than_any_prompt_protects_all_of_it() {
    let decoder = tiny(2);
    let config = SnapKvConfig::new(TokenBudget::of_prompt(0.5).expect("a share"), usize::MAX);
    let mut cache = SnapKv::new(&decoder.shape(), config).expect("fits");
    feed(&decoder, &mut cache, &tokens(1, 20)[..]);
    assert_eq!(
        cache.cached(LayerIndex::new(0)).sequence(0),
        [(0..20).collect::<Vec<_>>()]
    );
}
