//! The fingerprint of a model.

use burn::tensor::Device;
use kv_direct::model::{Decoder, DecoderConfig};

use crate::support::models::{LLAMA3, YARN, config, gemma, qwen2, qwen3, random_decoder, scaled};

/// Session files contain fingerprints, so those of a family never change.
#[test]
fn it_is_that_of_all_files() {
    let families = [
        config(4, 2),
        scaled(LLAMA3),
        scaled(YARN),
        qwen2(),
        qwen3(),
        gemma(),
    ];
    let found = families.map(|config| random_decoder(&config).fingerprint().to_string());
    let expected = [
        "2a10fb8bd5cbd93f82a411c144b1355a",
        "ac6efe9499992a731d1528411fcee1a2",
        "a12ff925e794108c9113e0a510c834eb",
        "ce4e1cab7cbc0ea717581c3bea4573af",
        "c48c48b7b3e7e72557e6156a00294362",
        "acbf86879386d660973d12c8309684ef",
    ];
    assert_eq!(found[..], expected);
}

#[test]
fn one_field_or_one_bit_of_a_weight_changes_it() {
    let mut config = DecoderConfig::new(97, 64, 3, 4, 2);
    let one = random_decoder(&config).fingerprint();
    assert_eq!(one, random_decoder(&config).fingerprint(), "the same model");
    config.norm_epsilon *= 2.0;
    assert_ne!(
        one,
        random_decoder(&config).fingerprint(),
        "another configuration"
    );
    let weights = |bump: f32| {
        Decoder::from_weights(
            DecoderConfig::new(97, 64, 3, 4, 2),
            &Device::flex(),
            |name, shape| {
                let mut weight = vec![0.01_f32; shape.iter().product()];
                if name == "layers.2.down" {
                    weight[5] += bump;
                }
                Ok::<_, std::convert::Infallible>(weight)
            },
        )
        .expect("weights in shape")
        .fingerprint()
    };
    assert_eq!(weights(0.0), weights(0.0));
    assert_ne!(weights(0.0), weights(1e-8), "one bit of one weight");
}
