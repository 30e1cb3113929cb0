//! Configurations, weights and residuals that do not fit.

use burn::tensor::Device;
use kv_direct::{
    cache::{CacheBackend, Step},
    model::{BuildError, ConfigError, Decoder, DecoderConfig, ForwardError},
    policy::FullKv,
};

use crate::support::models::tiny;

#[test]
fn residuals_of_another_shape_and_missing_layers_are_refused() {
    let decoder = tiny(2);
    let mut cache = FullKv::new(&decoder.shape());
    let step = Step::new(vec![vec![4, 2]].into(), &[0]).expect("tokens");
    let residual = decoder.embed(step.tokens()).expect("ids of the vocabulary");
    cache.begin(&step).expect("a fresh cache");
    let beyond = decoder.run(2..4, residual.clone(), &step, &mut cache);
    assert!(
        matches!(beyond, Err(ForwardError::Layers { layers: 3, .. })),
        "{beyond:?}"
    );
    let short = decoder.run(0..3, residual.clone().slice_dim(1, 0..1), &step, &mut cache);
    let expected = "the residual has shape [1, 1, 64], the step asks for [1, 2, 64]";
    assert_eq!(short.expect_err("one token of two").to_string(), expected);
    decoder
        .run(0..3, residual, &step, &mut cache)
        .expect("nothing has happened yet");
}

#[test]
fn a_source_of_too_few_or_too_many_elements_is_refused() {
    let config = DecoderConfig::new(97, 64, 2, 4, 2);
    let build = |wrong: &str, more: isize| {
        let built = Decoder::from_weights(config.clone(), &Device::flex(), |name, shape| {
            let length = shape.iter().product::<usize>();
            let more = if name == wrong { more } else { 0 };
            let length = length.checked_add_signed(more).expect("a length");
            Ok::<_, std::convert::Infallible>(vec![0.5; length])
        });
        built.map(|_| ()).expect_err("a wrong number of elements")
    };
    for (wrong, size) in config.weights().expect("a good configuration") {
        let size: usize = size.iter().product();
        for more in [-1, 1, 70, -(size.cast_signed())] {
            let error = build(&wrong, more);
            let expected = size.checked_add_signed(more).expect("a length");
            assert!(
                matches!(&error, BuildError::Elements { name, found, .. }
                    if *name == wrong && *found == expected),
                "{error}"
            );
        }
    }
    let endless = Decoder::from_weights(config, &Device::flex(), |_, _| {
        Ok::<_, std::convert::Infallible>(std::iter::repeat(0.5))
    });
    assert!(matches!(endless, Err(BuildError::Elements { .. })));
}

#[test]
fn configurations_that_contradict_themselves_are_refused() {
    let mut config = DecoderConfig::new(97, 64, 3, 4, 2);
    config.head_dim = 15;
    assert_eq!(
        config.validate(),
        Err(ConfigError::OddHead { head_dim: 15 })
    );
    assert_eq!(
        DecoderConfig::new(97, 64, 0, 4, 2).validate(),
        Err(ConfigError::Zero { field: "layers" })
    );
    assert_eq!(
        DecoderConfig::new(97, 64, 3, 0, 2).validate(),
        Err(ConfigError::Zero { field: "heads" })
    );
    let mut config = DecoderConfig::new(97, 64, 3, 4, 2);
    config.final_softcap = Some(0.0);
    let expected = ConfigError::NotPositive {
        field: "final_softcap",
        value: 0.0,
    };
    assert_eq!(config.validate(), Err(expected));
}
