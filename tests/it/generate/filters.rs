//! What top-k, top-p, min-p and the repetition penalty leave, and in which order they apply.

use kv_direct::generate::{Sampler, Sampling};

use crate::support::draws::{at_temperature_one, drawn, logits};

#[test]
fn top_k_leaves_the_largest_and_of_equal_ones_the_lowest() {
    let logits = logits([0.2, 0.3, 0.2, 0.2, 0.1]);
    let top = |k| {
        drawn(
            &at_temperature_one().with_top_k(k).expect("in range"),
            &logits,
        )
    };
    assert_eq!(top(1), [1]);
    assert_eq!(top(2), [0, 1]);
    assert_eq!(top(3), [0, 1, 2]);
    assert_eq!(top(5), [0, 1, 2, 3, 4]);
    assert_eq!(top(usize::MAX), top(5));
}

#[test]
fn top_p_leaves_the_smallest_set_that_reaches_it() {
    // Sums 0.5, 0.75, 0.875, 1: all exact.
    let logits = [3.0, 2.0, 1.0, 1.0].map(|power: f32| power * std::f32::consts::LN_2);
    let top = |p| {
        drawn(
            &at_temperature_one().with_top_p(p).expect("in range"),
            &logits,
        )
    };
    assert_eq!(top(1e-9), [0]);
    assert_eq!(top(0.49), [0]);
    assert_eq!(top(0.51), [0, 1]);
    assert_eq!(top(0.74), [0, 1]);
    assert_eq!(top(0.76), [0, 1, 2]);
    assert_eq!(top(0.88), [0, 1, 2, 3]);
    assert_eq!(top(1.0), [0, 1, 2, 3]);
}

#[test]
fn a_set_that_just_reaches_top_p_is_enough() {
    let top = |p| {
        drawn(
            &at_temperature_one().with_top_p(p).expect("in range"),
            &[1.0; 4],
        )
    };
    assert_eq!(top(0.25), [0]);
    assert_eq!(top(0.5), [0, 1]);
    assert_eq!(top(0.75), [0, 1, 2]);
}

#[test]
fn min_p_is_relative_to_the_most_probable() {
    let logits = logits([0.5, 0.3, 0.12, 0.08]);
    let least = |p| {
        drawn(
            &at_temperature_one().with_min_p(p).expect("in range"),
            &logits,
        )
    };
    assert_eq!(least(0.0), [0, 1, 2, 3]);
    assert_eq!(least(0.2), [0, 1, 2]);
    assert_eq!(least(0.5), [0, 1]);
    assert_eq!(least(1.0), [0]);
    let equal = at_temperature_one().with_min_p(1.0).expect("in range");
    assert_eq!(drawn(&equal, &[2.0, 2.0, 1.0]), [0, 1]);
}

#[test]
fn the_penalty_divides_positive_and_multiplies_negative_logits() {
    let two = Sampling::new().with_repetition_penalty(2.0);
    let two = two.expect("in range");
    let choose = |seen: &[u32], logits: &[f32]| {
        let mut sampler = Sampler::new(two.clone());
        sampler.see(seen);
        sampler.choose(logits)
    };
    assert_eq!(choose(&[0], &[3.0, 1.4]), Some(0));
    assert_eq!(choose(&[0], &[3.0, 1.6]), Some(1));
    assert_eq!(choose(&[0], &[-1.0, -1.9]), Some(1));
    assert_eq!(choose(&[0], &[-1.0, -2.1]), Some(0));
    // Once, however often an id was seen.
    assert_eq!(choose(&[0, 0, 0], &[3.0, 1.4]), Some(0));
    let half = Sampling::new().with_repetition_penalty(0.5);
    let mut sampler = Sampler::new(half.expect("in range"));
    sampler.see(&[1]);
    assert_eq!(sampler.choose(&[1.0, 0.6]), Some(1));
}

#[test]
fn the_penalty_comes_before_temperature_and_top_k() {
    // Penalised 4 becomes 1: without it id 0 would be the only one left.
    let sampling = at_temperature_one()
        .with_top_k(1)
        .and_then(|s| s.with_temperature(0.1));
    let sampling = sampling.and_then(|s| s.with_repetition_penalty(4.0));
    let mut sampler = Sampler::new(sampling.expect("in range"));
    sampler.see(&[0]);
    assert_eq!(sampler.choose(&[4.0, 2.0, 1.5]), Some(1));
}

#[test]
fn temperature_comes_before_top_p_and_min_p() {
    // Odds of 4 : 2 : 1 are 16 : 4 : 1 at temperature 0.5.
    let logits = [4.0, 2.0, 1.0].map(f32::ln);
    let cold = at_temperature_one()
        .with_temperature(0.5)
        .expect("in range");
    let top = cold.clone().with_top_p(0.7).expect("in range");
    assert_eq!(drawn(&top, &logits), [0]);
    assert_eq!(
        drawn(
            &at_temperature_one().with_top_p(0.7).expect("in range"),
            &logits
        ),
        [0, 1]
    );
    let least = cold.with_min_p(0.2).expect("in range");
    assert_eq!(drawn(&least, &logits), [0, 1]);
    assert_eq!(
        drawn(
            &at_temperature_one().with_min_p(0.2).expect("in range"),
            &logits
        ),
        [0, 1, 2]
    );
}

#[test]
fn top_p_counts_what_top_k_left() {
    // Of 4 : 3 : 3 two are left, 4 : 3, and 4/7 reaches 0.55, where 0.4 would not.
    let sampling = at_temperature_one()
        .with_top_k(2)
        .and_then(|s| s.with_top_p(0.55));
    let sampling = sampling.expect("in range");
    assert_eq!(drawn(&sampling, &logits([0.4, 0.3, 0.3])), [0]);
}

#[test]
fn seen_ids_outside_the_vocabulary_do_nothing() {
    let sampling = Sampling::new().with_repetition_penalty(2.0);
    let mut sampler = Sampler::new(sampling.expect("in range"));
    sampler.see(&[2, 97, u32::MAX]);
    assert_eq!(sampler.choose(&[1.0, 2.0]), Some(1));
}
