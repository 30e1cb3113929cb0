//! Weights held in bf16 and f16 give the bits of an f32 copy.

use std::convert::Infallible;

use burn::tensor::{DType, Device, bf16, f16};
use kv_direct::{
    model::{Decoder, DecoderConfig},
    policy::FullKv,
};

use crate::support::{
    feed::feed,
    models::{config, gemma, qwen2, qwen3},
    random::{tokens, weights},
};

fn held(config: &DecoderConfig, stored: DType, held: impl Fn(&str) -> DType) -> Decoder {
    let weights = weights(config);
    let rounded = |x: f32| match stored {
        DType::BF16 => bf16::from_f32(x).to_f32(),
        _ => f16::from_f32(x).to_f32(),
    };
    Decoder::from_stored_weights(config.clone(), &Device::flex(), held, |name, _| {
        let numbers: Vec<f32> = weights[name].iter().map(|&x| rounded(x)).collect();
        Ok::<_, Infallible>(numbers)
    })
    .expect("weights in shape")
}

fn bits(decoder: &Decoder) -> Vec<Vec<u32>> {
    let mut cache = FullKv::new(&decoder.shape());
    let text = tokens(3, 60);
    let steps = [0..50, 50..51, 51..55, 55..60];
    let steps = steps.map(|step| feed(decoder, &mut cache, &text[step]));
    steps.to_vec()
}

#[test]
fn have_the_bits_of_an_f32_copy() {
    // Untied, and tied.
    let mut untied = config(4, 2);
    untied.tied_head = false;
    for config in [untied, qwen2(), qwen3(), gemma()] {
        for dtype in [DType::BF16, DType::F16] {
            let copy = held(&config, dtype, |_| DType::F32);
            let narrow = held(&config, dtype, |_| dtype);
            assert!(bits(&narrow) == bits(&copy), "{dtype:?}");
            assert_eq!(narrow.fingerprint(), copy.fingerprint(), "the same numbers");
            // Keys and values of a block stand side by side: in different dtypes they are held in f32.
            let mixed = held(&config, dtype, |name| match name.ends_with("key") {
                true => dtype,
                false => DType::F32,
            });
            assert!(bits(&mixed) == bits(&copy), "{dtype:?}, mixed");
        }
    }
}
