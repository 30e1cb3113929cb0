//! Frequencies of scaled rotations.

use kv_direct::model::{RopeConfig, yarn_attention_factor};

use crate::support::models::llama3;

#[test]
fn llama3_frequencies_and_yarn_factors_equal_known_values() {
    let close = |found: f64, expected: f64| {
        assert!(
            (found / expected - 1.0).abs() < 1e-8,
            "{found} for {expected}"
        );
    };
    let frequencies = |factor, head_dim| {
        let plain = RopeConfig::new(5e5).frequencies(head_dim);
        let scaled = RopeConfig::new(5e5).with_scaling(llama3(factor));
        (plain, scaled.frequencies(head_dim))
    };
    let (plain, scaled) = frequencies(32.0, 64);
    assert_eq!(plain[..15], scaled[..15]);
    for (pair, expected) in [
        (14, 3.21144599e-3),
        (15, 1.29054793e-3),
        (16, 4.29556797e-4),
        (17, 9.70828780e-5),
        (18, 1.94616382e-5),
        (31, 9.41830673e-8),
    ] {
        close(scaled[pair], expected);
    }
    for pair in 18..32 {
        close(scaled[pair] * 32.0, plain[pair]);
    }
    let (plain, scaled) = frequencies(8.0, 128);
    assert_eq!(plain[..29], scaled[..29]);
    for (pair, expected) in [
        (29, 2.16657076e-3),
        (34, 1.78507813e-4),
        (35, 9.55621235e-5),
    ] {
        close(scaled[pair], expected);
    }
    for pair in 35..64 {
        close(scaled[pair] * 8.0, plain[pair]);
    }
    for (factor, expected) in [(2.0, 1.0693147), (4.0, 1.1386294), (8.0, 1.2079442)] {
        assert!((yarn_attention_factor(factor) - expected).abs() < 5e-8);
    }
}
