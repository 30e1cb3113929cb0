//! The fingerprint of a model.

use burn::tensor::Device;
use kv_direct::model::{Decoder, DecoderConfig};

use crate::support::models::random_decoder;

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
