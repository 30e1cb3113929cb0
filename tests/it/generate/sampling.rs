//! Sampling, on logits small enough to check by hand.

use kv_direct::generate::{Sampler, Sampling, SamplingError, argmax};
use proptest::prelude::*;

pub(super) fn at_temperature_one() -> Sampling {
    Sampling::new().with_temperature(1.0).expect("in range")
}

/// Logits of these probabilities.
fn logits<const N: usize>(probabilities: [f32; N]) -> [f32; N] {
    probabilities.map(f32::ln)
}

/// How often each id is drawn in `draws` draws.
fn counts(sampling: &Sampling, logits: &[f32], draws: usize) -> Vec<usize> {
    let mut sampler = Sampler::new(sampling.clone());
    let mut counts = vec![0; logits.len()];
    for _ in 0..draws {
        counts[sampler.choose(logits).expect("finite") as usize] += 1;
    }
    counts
}

/// Which ids are drawn at all; those tested for have a probability of 0.05 at least.
fn drawn(sampling: &Sampling, logits: &[f32]) -> Vec<u32> {
    let counts = counts(sampling, logits, 400);
    (0..).zip(counts).filter(|c| c.1 > 0).map(|c| c.0).collect()
}

#[test]
fn a_setting_out_of_range_cannot_be_made() {
    let fields = |made: [Result<Sampling, SamplingError>; 4], name: &str, bad: [f64; 4]| {
        for (made, bad) in made.into_iter().zip(bad) {
            let error = made.expect_err("out of range");
            let text = error.to_string();
            let SamplingError::OutOfRange { field, value, .. } = error else {
                panic!("{error:?}");
            };
            assert_eq!(field, name);
            assert_eq!(value.to_bits(), bad.to_bits());
            assert!(text.starts_with(&format!("{name} is {bad}; accepted is ")));
        }
    };
    let new = Sampling::new;
    let bad = [f64::NAN, -0.1, f64::INFINITY, f64::NEG_INFINITY];
    let made = bad.map(|t| new().with_temperature(t));
    fields(made, "temperature", bad);
    let bad = [f64::NAN, 0.0, -0.5, 1.1];
    fields(bad.map(|p| new().with_top_p(p)), "top_p", bad);
    let bad = [f64::NAN, -0.1, 1.1, f64::INFINITY];
    fields(bad.map(|p| new().with_min_p(p)), "min_p", bad);
    let bad = [f64::NAN, 0.0, -1.0, f64::INFINITY];
    let made = bad.map(|p| new().with_repetition_penalty(p));
    fields(made, "repetition_penalty", bad);
    assert_eq!(
        new().with_top_k(0).expect_err("nothing left").to_string(),
        "top_k is 0; accepted is 1 or more"
    );
    assert!(new().with_temperature(0.0).is_ok());
    assert!(new().with_top_p(1.0).is_ok());
    assert!(new().with_min_p(1.0).is_ok());
}

#[test]
fn draws_have_the_probabilities_of_the_logits() {
    let probabilities = [0.5, 0.25, 0.15, 0.1];
    let found = counts(
        &at_temperature_one().with_seed(3),
        &logits(probabilities),
        20_000,
    );
    for (count, probability) in found.into_iter().zip(probabilities) {
        let expected = 20_000.0 * probability;
        // Four standard deviations.
        let off = 4.0 * (expected * (1.0 - probability)).sqrt();
        assert!(
            (count as f32 - expected).abs() < off,
            "{count}, not {expected}"
        );
    }
}

#[test]
fn temperature_divides_the_logits() {
    // At temperature 0.5 odds of 1 : 3 become 1 : 9.
    let sampling = at_temperature_one()
        .with_temperature(0.5)
        .expect("in range");
    let found = counts(&sampling, &logits([0.25, 0.75]), 20_000);
    assert!((1850..2150).contains(&found[0]), "{found:?}");
    // At 2 they become 1 : √3.
    let sampling = at_temperature_one()
        .with_temperature(2.0)
        .expect("in range");
    let found = counts(&sampling, &logits([0.25, 0.75]), 20_000);
    assert!((7050..7590).contains(&found[0]), "{found:?}");
}

#[test]
fn temperature_zero_takes_the_largest_whatever_the_seed() {
    let logits = [1.0, 3.0, -2.0, 3.0];
    for seed in 0..50 {
        let mut sampler = Sampler::new(Sampling::new().with_seed(seed));
        assert_eq!(sampler.choose(&logits), Some(1));
        let penalised = Sampling::new().with_repetition_penalty(1.5);
        let mut sampler = Sampler::new(penalised.expect("in range").with_seed(seed));
        let ids: Vec<_> = (0..4).map(|_| sampler.choose(&logits)).collect();
        // 3 and 3, then 2 and 3, then 2 and 2: the lower of equals.
        assert_eq!(ids, [Some(1), Some(3), Some(1), Some(1)]);
    }
}

#[test]
fn extreme_temperatures_neither_fail_nor_overflow() {
    let logits = [0.0, 1.0, 0.5, f32::MAX, f32::MIN];
    let cold = at_temperature_one()
        .with_temperature(1e-30)
        .expect("in range");
    assert_eq!(drawn(&cold, &logits), [3]);
    assert_eq!(drawn(&cold, &logits[..3]), [1]);
    let least = at_temperature_one()
        .with_temperature(f64::from_bits(1))
        .expect("in range");
    assert_eq!(drawn(&least, &logits), [3]);
    // At 1e30 all that differ by less than that are equally probable.
    let melted = at_temperature_one()
        .with_temperature(1e30)
        .expect("in range");
    for count in counts(&melted, &logits[..3], 3000) {
        assert!((880..1120).contains(&count), "{count}");
    }
    let most = at_temperature_one()
        .with_temperature(f64::MAX)
        .expect("in range");
    assert_eq!(drawn(&most, &logits), [0, 1, 2, 3, 4]);
}

#[test]
fn equal_logits_are_equally_probable() {
    for count in counts(&at_temperature_one(), &[7.5; 5], 10_000) {
        assert!((1840..2160).contains(&count), "{count}");
    }
}

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

#[test]
fn logits_that_are_not_finite_are_refused_at_every_temperature() {
    for sampling in [Sampling::new(), at_temperature_one()] {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut sampler = Sampler::new(sampling.clone());
            assert_eq!(sampler.choose(&[1.0, bad, 2.0]), None);
        }
        assert_eq!(Sampler::new(sampling).choose(&[]), None);
    }
}

#[test]
fn a_seed_gives_the_same_ids_in_every_version() {
    let logits: Vec<f32> = (0..97_i16).map(|i| f32::from(i * 37 % 97) / 20.0).collect();
    let sampling = at_temperature_one()
        .with_top_p(0.9)
        .expect("in range")
        .with_seed(42);
    let draw = |sampling: &Sampling| -> Vec<u32> {
        let mut sampler = Sampler::new(sampling.clone());
        (0..8)
            .map(|_| sampler.choose(&logits).expect("finite"))
            .collect()
    };
    assert_eq!(draw(&sampling), SEED_42);
    assert_ne!(draw(&sampling.clone().with_seed(43)), SEED_42);
}

const SEED_42: [u32; 8] = [18, 94, 31, 81, 76, 81, 23, 70];

proptest! {
    #[test]
    fn a_choice_is_an_id_that_the_settings_leave(
        logits in prop::collection::vec(-1e30f32..1e30, 1..40),
        temperature in prop::sample::select(vec![0.0, 1e-30, 0.7, 1e29, 1e300]),
        k in 1usize..50, p in 1e-12f64..=1.0, min in 0.0f64..=1.0,
        penalty in prop::sample::select(vec![1e-300, 0.5, 1.0, 1.3, 1e300]),
        seed: u64,
    ) {
        let sampling = Sampling::new().with_temperature(temperature).unwrap().with_seed(seed)
            .with_top_k(k).unwrap().with_top_p(p).unwrap().with_min_p(min).unwrap()
            .with_repetition_penalty(penalty).unwrap();
        let mut sampler = Sampler::new(sampling.clone());
        for _ in 0..3 {
            let id = sampler.choose(&logits).unwrap();
            prop_assert!((id as usize) < logits.len());
        }
        let single = sampling.with_top_k(1).unwrap();
        prop_assert_eq!(Sampler::new(single).choose(&logits), argmax(&logits));
    }
}
