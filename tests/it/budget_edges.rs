//! Edges of budgets: what is held from longer texts, drafts over the end of a piece, and what is resumed where
//! nothing is shown.

use std::{num::NonZeroUsize, ops::ControlFlow};

use kv_direct::{
    cache::{CacheBackend, CacheError, Draft},
    model::{Decoder, DecoderConfig},
    planner::{Planner, Throughput},
    residual::{Plan, ResidualCheckpoint, ResidualConfig},
};

use crate::support::{feed, random, tokens};

fn cache(decoder: &Decoder, plan: Plan, budget: usize) -> ResidualCheckpoint {
    let config = ResidualConfig::new(plan)
        .even_if_larger()
        .with_byte_budget(budget);
    ResidualCheckpoint::new(&decoder.shape(), decoder.conformance(), config).expect("a plan")
}

fn windows(window: usize) -> Decoder {
    let mut config = DecoderConfig::new(97, 64, 4, 4, 4);
    config.max_positions = 8192;
    for layer in [0, 2] {
        config.layers[layer].window = NonZeroUsize::new(window);
    }
    random(&config)
}

fn held(cache: &ResidualCheckpoint, budget: usize, what: &str) {
    let memory = cache.memory();
    let most = memory.total() + memory.scratch_peak;
    assert!(
        most <= budget,
        "{what}: {most} of {budget} bytes, {memory:?}"
    );
}

#[test]
fn a_draft_over_the_end_of_a_piece_leaves_no_buffers_behind() {
    let decoder = random(&DecoderConfig::new(97, 64, 8, 4, 4));
    let shape = decoder.shape();
    let plan = Plan::tokens(&shape).with_hot(16).with_chunk(16);
    for extra in [2, 3, 4, 5, 6] {
        let budget = plan.cost(&shape, 520).expect("a cost").peak()
            + extra * shape.keys_values_per_token() * 64;
        let mut cache = cache(&decoder, plan.clone(), budget);
        feed(&decoder, &mut cache, &tokens(1, 510)[..]);
        cache.begin_draft().expect("no draft");
        for (to, call) in [(510, 4), (511, 1), (511, 3)] {
            cache.truncate(&[to]).expect("of the draft");
            feed(&decoder, &mut cache, &tokens(2, call)[..]);
            held(&cache, budget, "in the draft");
        }
        cache.end_draft(Draft::Discard).expect("a draft");
        feed(&decoder, &mut cache, &[1][..]);
        held(&cache, budget, "after it");
    }
}

#[test]
fn what_longer_rows_held_goes_with_them() {
    let decoder = windows(40);
    let shape = decoder.shape();
    let plan = Plan::residuals(&shape).with_hot(8).with_chunk(16);
    let budget = 3 * plan.cost(&shape, 1_100).expect("a cost").peak();
    let mut cache = cache(&decoder, plan, budget);
    let rows = kv_direct::cache::TokenIds::from(vec![tokens(1, 1_000), tokens(2, 10)]);
    feed(&decoder, &mut cache, rows);
    cache.select_sequences(&[1]).expect("the second row");
    let bytes = shape.layers() / 2 * 16 * shape.hidden * 4;
    let memory = cache.memory();
    assert!(memory.residuals <= bytes, "{memory:?}");
    feed(&decoder, &mut cache, &tokens(3, 700)[..]);
    for rows in [&[0, 0][..], &[0, 0, 1]] {
        match cache.select_sequences(rows) {
            Ok(()) | Err(CacheError::StepBytes { .. }) => held(&cache, budget, "rows repeated"),
            Err(error) => panic!("{error}"),
        }
    }
}

/// A state of a long text goes into a cache whose layers hold all of a short one.
#[test]
fn a_state_goes_into_a_cache_that_held_another_text() {
    let decoder = random(&DecoderConfig::new(97, 64, 6, 4, 4));
    let shape = decoder.shape();
    let plan = Plan::tokens(&shape).with_hot(100).with_chunk(16);
    let budget = plan.cost(&shape, 1_000).expect("a cost").peak();
    let mut long = cache(&decoder, plan.clone(), budget);
    for call in tokens(1, 900).chunks(50) {
        feed(&decoder, &mut long, call);
    }
    let state = long.state().expect("no draft");
    let mut short = cache(&decoder, plan, budget);
    feed(&decoder, &mut short, &tokens(2, 20)[..]);
    short.set_state(&state).expect("of the same kind");
    // The list of ids has less slack.
    let [found, expected] = [&short, &long].map(|cache| cache.memory().total());
    assert!(
        (expected - 4 * 512..=expected).contains(&found),
        "{found}, {expected}"
    );
    let [found, expected] = [&mut short, &mut long].map(|cache| feed(&decoder, cache, &[5][..]));
    assert!(found == expected);
    held(&short, budget, "after the state");
}

#[test]
fn a_resume_of_nothing_brings_back_nothing() {
    let decoder = windows(1);
    let plan = Plan::tokens(&decoder.shape()).with_hot(usize::MAX);
    let mut ours = cache(&decoder, plan, usize::MAX);
    feed(&decoder, &mut ours, &tokens(1, 30)[..]);
    let mut again = ours.fork();
    ours.park().expect("it rebuilds");
    let done = ours.resume(|layer| decoder.at(layer), |_| ControlFlow::Continue(()));
    assert!(
        done.expect("a window of 1 shows nothing before")
            .is_continue()
    );
    assert!(feed(&decoder, &mut ours, &[3][..]) == feed(&decoder, again.as_mut(), &[3][..]));

    let decoder = windows(7);
    let plan = Plan::tokens(&decoder.shape()).with_hot(usize::MAX);
    let mut ours = cache(&decoder, plan, usize::MAX);
    feed(&decoder, &mut ours, vec![vec![1, 2, 3], vec![]]);
    ours.park().expect("it rebuilds");
    ours.select_sequences(&[1]).expect("the empty row");
    let done = ours.resume(|layer| decoder.at(layer), |_| ControlFlow::Continue(()));
    assert!(done.expect("nothing was parked").is_continue());
    feed(&decoder, &mut ours, &[3][..]);
}

#[test]
fn sizes_without_sense_are_bounded_or_refused() {
    let shape = DecoderConfig::new(97, 64, 4, 4, 4).shape(burn::tensor::DType::F32);
    assert_eq!(Plan::tokens(&shape).with_chunk(usize::MAX).chunk(), 4096);
    assert_eq!(Plan::tokens(&shape).with_chunk(0).chunk(), 1);
    let rows = |rows: &str| format!("read 1e9; {rows} tokens: projection 1, block 1, attention 1");
    for wrong in [
        &rows("0"),
        &rows("5000"),
        "",
        "read -1",
        "read 1e9",
        "read nan; 1 rows: x",
    ] {
        let refused = wrong.parse::<Throughput>();
        assert!(
            matches!(refused, Err(CacheError::Throughput { .. })),
            "{wrong:?}"
        );
    }
    let mut speeds: Throughput = rows("16").parse().expect("speeds");
    speeds.chunks.clear();
    let planner = Planner::new(&shape, &speeds, usize::MAX)
        .expect("sizes are known")
        .with_sequences(0)
        .with_steps_of(0);
    let all = planner.plan(planner.everything()).expect("everything fits");
    assert_eq!(all.retain(0), kv_direct::residual::Retain::KeysValues);
    assert!(
        planner.plan(planner.smallest()).is_ok(),
        "however slow that is"
    );
    assert!(planner.plan(0).is_err());
}
