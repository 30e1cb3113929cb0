//! Lossy policies against an uncached f64 forward that sees what their rules leave: what is held after
//! every call and the logits of every token, by family, budget, cutting and batch row.

use std::cell::Cell;

use kv_direct::{
    cache::{
        Budget, CacheBackend, CacheError, FullKv, Group, H2o, H2oConfig, Indexing, LayerIndex,
        ModelShape, Pooling, SnapKv, SnapKvConfig, StreamingLlm, StreamingLlmConfig, TokenIds,
        Tova, TovaConfig, Window,
    },
    model::{Decoder, DecoderConfig, Input},
};

use proptest::{
    prelude::*,
    sample::select,
    test_runner::{RngAlgorithm, TestRng, TestRunner},
};

use crate::{
    families::{self, TOLERANCE},
    random::{VOCAB, apart, decoder, tokens, weights},
    reference::Reference,
    simulator::{Amount, Call, Cuts, Held, Policy, Simulation, prompt},
    support::bits,
};

struct Model {
    name: &'static str,
    config: DecoderConfig,
    decoder: Decoder,
    reference: Reference,
    windows: Vec<Option<usize>>,
}

impl Model {
    fn new(name: &'static str, config: DecoderConfig) -> Self {
        let weights = weights(&config);
        let windows = config.layers.iter();
        Self {
            name,
            decoder: decoder(&config, &weights),
            reference: Reference::new(&config, &weights),
            windows: windows.map(|layer| layer.window.map(|w| w.get())).collect(),
            config,
        }
    }

    fn all() -> Vec<Self> {
        vec![
            Self::new("llama 4/2", families::config(4, 2)),
            Self::new("llama 4/4", families::config(4, 4)),
            Self::new("llama 4/1", families::config(4, 1)),
            Self::new("qwen2", families::qwen2()),
            Self::new("qwen3", families::qwen3()),
            Self::new("gemma", families::gemma()),
        ]
    }

    fn slides(&self) -> bool {
        self.windows.iter().any(Option::is_some)
    }
}

fn budget(amount: Amount) -> Budget {
    match amount {
        Amount::Rows(rows) => rows.into(),
        Amount::Share(share) => Budget::of_prompt(share).expect("a share"),
    }
}

/// The crate's backend for a policy.
fn backend(policy: Policy, shape: &ModelShape) -> Result<Box<dyn CacheBackend>, CacheError> {
    Ok(match policy {
        Policy::Full => Box::new(FullKv::new(shape)),
        Policy::Window { size } => Box::new(Window::new(shape, size)?),
        Policy::Streaming {
            sinks,
            recent,
            reindexed,
        } => {
            let indexing = if reindexed {
                Indexing::CacheIndex
            } else {
                Indexing::Original
            };
            let config = StreamingLlmConfig::new(budget(recent)).with_sinks(sinks);
            Box::new(StreamingLlm::new(shape, config.with_indexing(indexing))?)
        }
        Policy::H2o {
            budget: rows,
            recent,
            sinks,
            group,
        } => {
            let config = H2oConfig::new(budget(rows), budget(recent)).with_sinks(sinks);
            Box::new(H2o::new(shape, config.with_group(group))?)
        }
        Policy::Tova {
            budget: rows,
            protect_last,
        } => {
            let config = TovaConfig::new(budget(rows)).with_protected_last(protect_last);
            Box::new(Tova::new(shape, config)?)
        }
        Policy::Snap {
            budget: rows,
            window,
            pooling,
            kernel,
            group,
        } => {
            let config = SnapKvConfig::new(budget(rows), window).with_pooling(pooling, kernel);
            Box::new(SnapKv::new(shape, config.with_group(group))?)
        }
    })
}

/// Calls of a batch: how many tokens each row brings, and whether more of the prompt follows.
type Calls = Vec<(Vec<usize>, bool)>;

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

/// What the crate did in all calls: by row its logits, and by row and call what was held.
struct Run {
    tokens: Vec<Vec<u32>>,
    logits: Vec<Vec<f32>>,
    held: Vec<Vec<Held>>,
}

fn run(
    model: &Model,
    cache: &mut dyn CacheBackend,
    calls: &[(Vec<usize>, bool)],
    seed: u64,
) -> Run {
    let lengths = (0..calls[0].0.len()).map(|row| calls.iter().map(|call| call.0[row]).sum());
    let ids = lengths
        .enumerate()
        .map(|(row, length)| tokens(seed + row as u64, length));
    run_on(model, cache, calls, ids.collect())
}

/// As [`run`], on these tokens, of which there may be more than the calls take.
fn run_on(
    model: &Model,
    cache: &mut dyn CacheBackend,
    calls: &[(Vec<usize>, bool)],
    mut tokens: Vec<Vec<u32>>,
) -> Run {
    let rows = tokens.len();
    for (row, tokens) in tokens.iter_mut().enumerate() {
        tokens.truncate(calls.iter().map(|call| call.0[row]).sum());
    }
    let mut run = Run {
        tokens: tokens.clone(),
        logits: vec![vec![]; rows],
        held: vec![vec![]; rows],
    };
    let mut rest: Vec<&[u32]> = tokens.iter().map(Vec::as_slice).collect();
    for (lengths, more_follows) in calls {
        let take = |(rest, &n): (&mut &[u32], _)| rest.split_off(..n).expect("enough").to_vec();
        let call: TokenIds = rest.iter_mut().zip(lengths).map(take).collect();
        let longest = call.longest();
        let input = Input::from(call).more_follows(*more_follows);
        let logits = model.decoder.forward(input, &mut *cache);
        let logits = logits.expect("a good call").into_data();
        let logits: Vec<f32> = logits.try_to_vec().expect("f32");
        for (row, logits) in logits.chunks_exact(longest * VOCAB).enumerate() {
            run.logits[row].extend_from_slice(&logits[..lengths[row] * VOCAB]);
            let held = (0..model.windows.len()).map(|layer| {
                let kept = cache.kept(LayerIndex::new(layer));
                let lists = kept.row(row);
                let of_head = |head| lists.get(head).unwrap_or(&lists[0]).clone();
                (0..model.config.kv_heads).map(of_head).collect()
            });
            run.held[row].push(held.collect());
        }
    }
    run
}

impl Run {
    /// What a row did in later calls.
    fn extend(&mut self, row: usize, more: &Self) {
        self.tokens[row].extend_from_slice(&more.tokens[row]);
        self.logits[row].extend_from_slice(&more.logits[row]);
        self.held[row].extend_from_slice(&more.held[row]);
    }
}

fn of_row(calls: &[(Vec<usize>, bool)], row: usize) -> Vec<Call> {
    let of_row = |(lengths, more_follows): &(Vec<usize>, bool)| Call {
        tokens: lengths[row],
        more_follows: *more_follows,
    };
    calls.iter().map(of_row).collect()
}

/// Compares a run with the oracle, row by row.
#[track_caller]
fn assert_obeys(model: &Model, policy: Policy, calls: &[(Vec<usize>, bool)], run: &Run) -> Cuts {
    let mut cuts = Cuts::default();
    for row in 0..run.tokens.len() {
        let of_row = of_row(calls, row);
        cuts = cuts.and(assert_row_obeys(model, policy, &of_row, run, row, 0));
    }
    cuts
}

/// Compares a row with the oracle, what it held from a call on.
#[track_caller]
fn assert_row_obeys(
    model: &Model,
    policy: Policy,
    calls: &[Call],
    run: &Run,
    row: usize,
    from: usize,
) -> Cuts {
    let what = format!("{}, {policy:?}, {calls:?}, row {row}", model.name);
    let heads = [model.config.heads, model.config.kv_heads];
    let theirs = &run.held[row];
    let mut simulation = Simulation::new(policy, calls, &model.windows, heads, theirs);
    let expected = model.reference.logits_of(&run.tokens[row], &mut simulation);
    for (call, held) in simulation.held().iter().enumerate().skip(from) {
        for (layer, held) in held.iter().enumerate() {
            assert_eq!(
                theirs[call][layer], *held,
                "held in layer {layer} after call {call}: {what}"
            );
        }
    }
    let delta = apart(&run.logits[row], expected.into_iter().flatten());
    // An angle in f32 is off in proportion to its position.
    let tolerance = if run.tokens[row].len() > 256 {
        2.0
    } else {
        1.0
    } * TOLERANCE;
    assert!(delta <= tolerance, "logits are {delta:e} off: {what}");
    simulation.cuts
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

use Amount::{Rows, Share};

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
        snap(Rows(7), 4),
        snap(Share(0.5), 6),
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
            .map(|layer| cache.kept(LayerIndex::new(layer)))
            .collect();
        (bits(&logits), kept)
    };
    for policy in policies {
        let new = || backend(policy, &model.decoder.shape()).expect("fits");
        let (mut straight, mut detour) = (new(), new());
        call(&mut straight, 0, 6, true);
        call(&mut detour, 0, 6, true);
        call(&mut detour, 20, 25, true);
        detour.truncate(6).expect("nothing was dropped");
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

/// The window reaches back before what was taken back: to the last two rows of the first call.
#[test]
fn a_query_that_was_taken_back_does_not_vote() {
    let model = Model::new("llama 4/2", families::config(4, 2));
    let ids = tokens(3, 20);
    let kept = |detour: &[u32]| {
        let mut cache = backend(snap(Rows(9), 5), &model.decoder.shape()).expect("fits");
        for (ids, more) in [(&ids[..10], true), (detour, true), (&ids[10..13], false)] {
            if !ids.is_empty() {
                let input = Input::from(ids).more_follows(more);
                model.decoder.forward(input, &mut cache).expect("a call");
            }
            if more {
                cache.truncate(10).expect("nothing was dropped");
            }
        }
        let layers = (0..3).map(|layer| cache.kept(LayerIndex::new(layer)));
        layers.collect::<Vec<_>>()
    };
    for detour in [[4, 5, 6], [60, 61, 62], [7, 70, 77]] {
        assert_eq!(kept(&detour), kept(&[]), "after {detour:?}");
    }
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

/// The same cases in every run.
fn runner(cases: u32) -> TestRunner {
    let config = ProptestConfig {
        cases,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha))
}

fn any_policy() -> impl Strategy<Value = Policy> {
    let amount = |least: usize| {
        prop_oneof![
            3 => (least..=30).prop_map(Rows),
            1 => (0.05f64..=1.0).prop_map(Share),
        ]
    };
    let group = || select(vec![Group::Mean, Group::Sum, Group::Max]);
    let streaming = (0usize..8, amount(1), any::<bool>());
    let h2o = (amount(1), 0.0..=1.0, 0.0..=1.0, group());
    let snap = (
        amount(2),
        0.0..=1.0,
        select(vec![Pooling::Average, Pooling::Max]),
        select(vec![1usize, 3, 5, 7, 31]),
        group(),
    );
    prop_oneof![
        (1usize..30).prop_map(|size| Policy::Window { size }),
        streaming.prop_map(|(sinks, recent, reindexed)| Policy::Streaming {
            sinks,
            recent,
            reindexed,
        }),
        h2o.prop_map(|(budget, recent, sinks, group)| {
            let part = |share: f64, of: usize| (share * of as f64).round() as usize;
            let (recent, sinks) = match budget {
                Rows(rows) => {
                    let recent = part(recent, rows);
                    (Rows(recent), part(sinks, rows - recent))
                }
                Share(share) => (Share((share * recent).max(0.01)), part(sinks, 6)),
            };
            Policy::H2o {
                budget,
                recent,
                sinks,
                group,
            }
        }),
        (amount(1), any::<bool>()).prop_map(|(budget, protect_last)| Policy::Tova {
            budget,
            protect_last,
        }),
        snap.prop_map(|(budget, window, pooling, kernel, group)| Policy::Snap {
            budget,
            window: match budget {
                Rows(rows) => ((window * rows as f64) as usize).clamp(1, rows - 1),
                Share(_) => 1 + (window * 9.0) as usize,
            },
            pooling,
            kernel,
            group,
        }),
    ]
}

/// Calls of one to three rows, 50 tokens a row at most, none without a token.
fn any_calls() -> impl Strategy<Value = Calls> {
    let length = || prop_oneof![2 => Just(0usize), 4 => Just(1), 3 => 2usize..=5, 2 => 6usize..=24];
    let calls = move |rows| {
        let call = (prop::collection::vec(length(), rows), any::<bool>());
        prop::collection::vec(call, 1..12)
    };
    (1usize..=3).prop_flat_map(calls).prop_map(|calls| {
        let mut totals = vec![0; calls[0].0.len()];
        let mut fitting = Calls::new();
        for (mut lengths, more_follows) in calls {
            for (total, length) in totals.iter_mut().zip(&mut lengths) {
                *length = (*length).min(50 - *total);
                *total += *length;
            }
            if lengths.iter().any(|&n| n > 0) {
                fitting.push((lengths, more_follows));
            }
        }
        if fitting.is_empty() {
            fitting.push((vec![1; totals.len()], false));
        }
        fitting
    })
}

#[test]
fn any_policy_holds_what_it_says_however_tokens_are_cut() {
    let models = Model::all();
    let mut runner = runner(48);
    let strategy = (0..models.len(), any_policy(), any_calls(), 0u64..1000);
    let cuts = Cell::new(Cuts::default());
    runner
        .run(&strategy, |(model, policy, calls, seed)| {
            let model = &models[model];
            let reindexed = matches!(
                policy,
                Policy::Streaming {
                    reindexed: true,
                    ..
                }
            );
            prop_assume!(!(reindexed && model.slides()));
            let mut cache = backend(policy, &model.decoder.shape()).expect("fits");
            let run = run(model, &mut *cache, &calls, seed);
            cuts.set(cuts.get().and(assert_obeys(model, policy, &calls, &run)));
            Ok(())
        })
        .unwrap_or_else(|failure| panic!("{failure}"));
    let cuts = cuts.get();
    println!("{cuts:?}");
    assert!(
        cuts.doubtful * 20 <= cuts.made,
        "rounding decides: {cuts:?}"
    );
}

/// Where a truncation is accepted the tokens from there on might never have been: a prompt that was
/// over goes on if it lost some.
#[test]
fn what_is_taken_back_leaves_no_trace() {
    let models = Model::all();
    let (asked, accepted) = (Cell::new(0), Cell::new(0));
    let parts = (0.0..1.0, 0.0..1.0);
    let strategy = (
        0..models.len(),
        any_policy(),
        any_calls(),
        parts,
        0u64..1000,
    );
    runner(64)
        .run(&strategy, |(model, policy, calls, (at, to), seed)| {
            let model = &models[model];
            let Ok(mut cache) = backend(policy, &model.decoder.shape()) else {
                return Ok(());
            };
            let at = 1 + (at * (calls.len() - 1) as f64) as usize;
            let (before, after) = calls.split_at(at);
            let mut whole = run(model, &mut *cache, before, seed);
            let longest = whole.tokens.iter().map(Vec::len).max().expect("a row");
            let to = 1 + (to * longest as f64) as usize;
            asked.set(asked.get() + 1);
            if cache.truncate(to).is_err() {
                return Ok(());
            }
            accepted.set(accepted.get() + 1);
            let ids = (0..whole.tokens.len()).map(|row| tokens(seed + 70 + row as u64, 50));
            let rest = run_on(model, &mut *cache, after, ids.collect());
            for row in 0..whole.tokens.len() {
                let length = whole.tokens[row].len();
                let mut of_row = of_row(&calls, row);
                let prompt = prompt(&of_row[..at]).map(|(_, length)| length);
                let goes_on = length > to && prompt.is_none_or(|prompt| prompt > to);
                let mut total = 0;
                for call in &mut of_row[..at] {
                    total += call.tokens;
                    call.tokens -= total.saturating_sub(to).min(call.tokens);
                    call.more_follows |= goes_on && total > 0;
                }
                // Queries that were taken back have no vote, and such cuts go by fewer of them.
                let mut fresh = 0;
                let ends = of_row[at..].iter().any(|call| {
                    fresh += call.tokens;
                    !call.more_follows
                });
                let fewer = match policy {
                    Policy::Snap { window, .. } => fresh < window,
                    Policy::Tova { .. } => fresh == 0,
                    _ => false,
                };
                if goes_on && ends && fewer {
                    continue;
                }
                whole.tokens[row].truncate(to);
                whole.logits[row].truncate(to * VOCAB);
                whole.extend(row, &rest);
                assert_row_obeys(model, policy, &of_row, &whole, row, at);
            }
            Ok(())
        })
        .unwrap_or_else(|failure| panic!("{failure}"));
    let [accepted, asked] = [accepted.get(), asked.get()];
    assert!(accepted * 4 > asked, "{accepted} of {asked} were accepted");
}
