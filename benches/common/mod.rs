//! What the benches share: the model, a prompt, and the middle of several times.

use std::{convert::Infallible, env, hint::black_box, path::PathBuf, time::Duration};

use burn::tensor::Device;
use kv_direct::{
    cache::CacheBackend,
    model::{Decoder, DecoderConfig, Input},
    pretrained::load,
};

const MODEL: &str = "smollm2-135m-instruct";

/// The real model where it is to be had, else the small one.
pub(crate) fn model() -> (&'static str, Decoder) {
    let Some(models) = env::var_os("KV_DIRECT_MODELS") else {
        println!("KV_DIRECT_MODELS is not set: {MODEL} is SKIPPED, a small random decoder instead");
        return ("random", random_decoder());
    };
    let folder = PathBuf::from(models).join(MODEL);
    let model = load(&folder, &Device::flex());
    (MODEL, model.expect("a whole model folder").decoder)
}

pub(crate) fn random_decoder() -> Decoder {
    let mut config = DecoderConfig::new(1024, 256, 4, 4, 2);
    (config.tied_head, config.max_positions) = (true, 8192);
    let mut state = 1u64;
    let mut noise = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
        (state >> 40) as f32 / (1 << 24) as f32 * 0.2 - 0.1
    };
    let weights = |_: &str, shape: &[usize]| {
        let elements: usize = shape.iter().product();
        Ok::<_, Infallible>((0..elements).map(|_| noise()).collect::<Vec<_>>())
    };
    Decoder::from_weights(config, &Device::flex(), weights).expect("the configuration fits")
}

/// Takes in `tokens` arbitrary tokens.
pub(crate) fn prefill(decoder: &Decoder, cache: &mut dyn CacheBackend, tokens: usize) {
    let vocab = decoder.config().vocab;
    let prompt: Vec<u32> = (0..tokens).map(|i| (i * 37 % vocab) as u32).collect();
    let prompt = Input::from(&prompt[..]).last_only();
    let logits = decoder.forward(prompt, cache).expect("it fits");
    black_box(logits.into_data());
}

/// In seconds.
pub(crate) fn median(times: &[Duration]) -> f64 {
    let mut times = times.to_vec();
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64()
}
