//! Keys and values cached in bf16 and f16: half the bytes, exact against `FullKv` in the same dtype.

use burn::tensor::DType;
use kv_direct::{
    cache::{CacheBackend, LayerIndex},
    model::DecoderConfig,
    policy::FullKv,
    residual::{Plan, ResidualConfig},
};

use crate::support::{
    caches::{backends, checkpoint},
    feed::{apart, feed, floats},
    models::{config, gemma, qwen2, qwen3, random_decoder},
    random::tokens,
};

fn families() -> [DecoderConfig; 4] {
    [config(4, 2), qwen2(), qwen3(), gemma()]
}

#[test]
fn rebuilt_entries_have_the_bits_of_stored_ones() {
    for config in families() {
        for dtype in [DType::BF16, DType::F16] {
            let decoder = random_decoder(&config).with_cache_dtype(dtype);
            let shape = decoder.shape();
            for plan in [Plan::tokens(&shape), Plan::residuals(&shape)] {
                let config = ResidualConfig::new(plan.with_hot(5)).even_if_larger();
                let mut cache = checkpoint(&decoder, config);
                let mut full = FullKv::new(&shape);
                for step in [&tokens(1, 40)[..], &tokens(2, 3), &[3], &[4]] {
                    let expected = feed(&decoder, &mut full, step);
                    assert!(feed(&decoder, &mut cache, step) == expected, "{dtype:?}");
                }
            }
        }
    }
}

#[test]
fn every_backend_holds_half_the_bytes_and_takes_up_its_state() {
    let decoder = random_decoder(&config(4, 2));
    let narrow = random_decoder(&config(4, 2)).with_cache_dtype(DType::BF16);
    let prompt = tokens(5, 50);
    for ((name, mut wide), (_, mut cache)) in backends(&decoder).into_iter().zip(backends(&narrow))
    {
        feed(&decoder, &mut *wide, &prompt[..]);
        feed(&narrow, &mut *cache, &prompt[..]);
        let [wide, held] = [wide.memory(), cache.memory()].map(|memory| memory.keys_values);
        // A policy may keep other entries, but as many.
        assert_eq!(wide, 2 * held, "{name}");
        let mut other = backends(&narrow)
            .into_iter()
            .find(|(other, _)| *other == name);
        let (_, other) = other.as_mut().expect("the same backend");
        other
            .set_state(&cache.state().expect("outside of a step"))
            .expect("the same model");
        assert_eq!(
            other.cached(LayerIndex::new(0)),
            cache.cached(LayerIndex::new(0))
        );
        let next = feed(&narrow, &mut *cache, &[7][..]);
        assert!(feed(&narrow, &mut **other, &[7][..]) == next, "{name}");
    }
}

/// bf16 has 8 bits: keys and values are off by up to 0.4 %.
#[test]
fn rounding_moves_logits_a_little() {
    let decoder = random_decoder(&config(4, 2));
    let logits = |decoder: &kv_direct::model::Decoder| {
        let mut cache = FullKv::new(&decoder.shape());
        let logits = decoder.forward(&tokens(9, 30)[..], &mut cache);
        floats(&logits.expect("a valid step"))
    };
    let exact = logits(&decoder);
    let narrow = logits(&random_decoder(&config(4, 2)).with_cache_dtype(DType::BF16));
    let apart = apart(&narrow, exact.iter().map(|&x| f64::from(x)));
    assert!(1e-4 < apart && apart < 0.1, "{apart}");
}
