//! Edges of a byte budget: longer sequences, drafts across a block, states of another text.

use kv_direct::{
    cache::{CacheBackend, CacheError, Draft},
    exact::PANEL,
    model::{Decoder, DecoderConfig},
    residual::{Plan, ResidualCheckpoint, ResidualConfig},
};

use crate::support::{
    caches::checkpoint,
    feed::feed,
    models::{random_decoder, with_windows},
    random::tokens,
};

fn cache(decoder: &Decoder, plan: Plan, budget: usize) -> ResidualCheckpoint {
    let config = ResidualConfig::new(plan)
        .even_if_larger()
        .with_byte_budget(budget);
    checkpoint(decoder, config)
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
fn a_draft_across_a_block_leaves_no_buffers_behind() {
    let decoder = random_decoder(&DecoderConfig::new(97, 64, 8, 4, 4));
    let shape = decoder.shape();
    let plan = Plan::tokens(&shape).with_hot(16).with_chunk(16);
    for extra in [2, 3, 4, 5, 6] {
        let budget = plan.cost(&shape, 520).expect("a cost").peak()
            + extra * shape.keys_values_per_token() * 64;
        let mut cache = cache(&decoder, plan.clone(), budget);
        feed(&decoder, &mut cache, &tokens(1, 510)[..]);
        cache.begin_draft().expect("no draft");
        for (to, step) in [(510, 4), (511, 1), (511, 3)] {
            cache.truncate(&[to]).expect("of the draft");
            feed(&decoder, &mut cache, &tokens(2, step)[..]);
            held(&cache, budget, "in the draft");
        }
        cache.end_draft(Draft::Discard).expect("a draft");
        feed(&decoder, &mut cache, &[1][..]);
        held(&cache, budget, "after it");
    }
}

#[test]
fn buffers_of_longer_sequences_go_with_them() {
    let decoder = random_decoder(&with_windows(
        DecoderConfig::new(97, 64, 4, 4, 4),
        &[0, 2],
        40,
    ));
    let shape = decoder.shape();
    let plan = Plan::residuals(&shape).with_hot(8).with_chunk(16);
    let budget = 4 * plan.cost(&shape, 1_100).expect("a cost").peak();
    let mut cache = cache(&decoder, plan, budget);
    let sequences = kv_direct::cache::TokenIds::from(vec![tokens(1, 1_000), tokens(2, 10)]);
    feed(&decoder, &mut cache, sequences);
    cache.select_sequences(&[1]).expect("the second sequence");
    let bytes = shape.layers() / 2 * 16 * shape.hidden * 4;
    let memory = cache.memory();
    assert!(memory.residuals <= bytes, "{memory:?}");
    feed(&decoder, &mut cache, &tokens(3, 700)[..]);
    for sequences in [&[0, 0][..], &[0, 0, 1]] {
        match cache.select_sequences(sequences) {
            Ok(()) | Err(CacheError::StepBytes { .. }) => {
                held(&cache, budget, "sequences repeated")
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// The layers of the receiving cache hold all of a short text.
#[test]
fn a_state_replaces_what_another_text_left() {
    let decoder = random_decoder(&DecoderConfig::new(97, 64, 6, 4, 4));
    let shape = decoder.shape();
    let plan = Plan::tokens(&shape).with_hot(100).with_chunk(16);
    let budget = plan.cost(&shape, 1_000).expect("a cost").peak();
    let mut long = cache(&decoder, plan.clone(), budget);
    for step in tokens(1, 900).chunks(50) {
        feed(&decoder, &mut long, step);
    }
    let state = long.state().expect("no draft");
    let mut short = cache(&decoder, plan, budget);
    feed(&decoder, &mut short, &tokens(2, 20)[..]);
    short.set_state(&state).expect("of the same kind");
    // The list of ids has less slack, and so has each layer: at most a panel.
    let [found, expected] = [&short, &long].map(|cache| cache.memory().total());
    let slot = shape.keys_values_per_token() + shape.layers() * size_of::<usize>();
    let slack = 4 * 512 + PANEL * slot;
    assert!(
        (expected - slack..=expected).contains(&found),
        "{found}, {expected}"
    );
    let [found, expected] = [&mut short, &mut long].map(|cache| feed(&decoder, cache, &[5][..]));
    assert!(found == expected);
    held(&short, budget, "after the state");
}
