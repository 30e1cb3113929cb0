//! Sampling, on logits small enough to check by hand.

use kv_direct::generate::{Sampler, Sampling, SamplingError, argmax};
use proptest::prelude::*;

use crate::support::draws::{at_temperature_one, counts, drawn, logits};

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
fn logits_that_are_not_finite_are_refused_at_every_temperature() {
    for sampling in [Sampling::new(), at_temperature_one()] {
        for bad in [f32::NAN, f32::INFINITY, -f32::NAN] {
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

#[test]
fn banned_ids_are_never_chosen() {
    let logits = [1.0, 3.0, 2.0, f32::NEG_INFINITY];
    let warm = || Sampling::new().with_temperature(1.0).expect("in range");
    for sampling in [
        Sampling::new(),
        warm(),
        warm().with_top_k(1).expect("in range"),
    ] {
        let mut sampler = Sampler::new(sampling.clone().with_banned([1, 99]));
        let chosen: Vec<u32> = (0..200)
            .map(|_| sampler.choose(&logits).expect("two are left"))
            .collect();
        assert!(chosen.iter().all(|id| [0, 2].contains(id)), "{chosen:?}");
        assert!(chosen.contains(&2));
        let mut none = Sampler::new(sampling.with_banned(0..3));
        assert_eq!(none.choose(&logits), None);
        assert_eq!(none.choose(&[f32::INFINITY, 0.0]), None);
    }
    assert_eq!(argmax(&[f32::NEG_INFINITY]), None);
    assert_eq!(argmax(&[f32::MIN, f32::NEG_INFINITY]), Some(0));
}
