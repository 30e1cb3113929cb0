//! What the benches share: the model, a prompt, times and the machine's limits.
#![allow(dead_code, reason = "a bench takes what it needs of it")]

pub(crate) mod interleaved;
pub(crate) mod limits;
pub(crate) mod work;

use std::{
    convert::Infallible,
    env,
    hint::black_box,
    path::PathBuf,
    time::{Duration, Instant},
};

use burn::tensor::Device;
use kv_direct::{
    cache::CacheBackend,
    generate::Generation,
    model::{Decoder, DecoderConfig, Input},
    pretrained::load,
    residual::{ResidualCheckpoint, ResidualConfig},
};

const MODEL: &str = "smollm2-135m-instruct";

/// The real model where it is to be had, else the small one.
pub(crate) fn model() -> (&'static str, Decoder) {
    real_model("a small random decoder").unwrap_or_else(|| ("random", random_decoder()))
}

/// The real model, or the message that `instead` takes its place.
pub(crate) fn real_model(instead: &str) -> Option<(&'static str, Decoder)> {
    let Some(models) = env::var_os("KV_DIRECT_MODELS") else {
        println!("KV_DIRECT_MODELS is not set: {MODEL} is SKIPPED, {instead} instead");
        return None;
    };
    let folder = PathBuf::from(models).join(MODEL);
    let model = load(&folder, &Device::flex());
    Some((MODEL, model.expect("a whole model folder").decoder))
}

/// The real model where it is to be had, else random weights of its shape. In test mode the small decoder.
pub(crate) fn smollm2() -> (&'static str, Decoder) {
    if !measuring() {
        return ("random", random_decoder());
    }
    real_model("random weights of its shape").unwrap_or_else(|| {
        let mut config = DecoderConfig::new(49_152, 576, 30, 9, 3);
        (config.intermediate, config.max_positions) = (1536, 8192);
        config.tied_head = true;
        ("SmolLM2's shape", noise(config))
    })
}

/// Whether `cargo bench` runs this. `cargo test` runs everything once, to see that it works.
pub(crate) fn measuring() -> bool {
    env::args().any(|arg| arg == "--bench")
}

/// All sizes to measure, or the first where nothing is measured.
pub(crate) fn sizes(all: &[usize]) -> &[usize] {
    if measuring() { all } else { &all[..1] }
}

/// Whether the command line asks for benches of this name. Others would process prompts for minutes.
pub(crate) fn wanted(name: &str) -> bool {
    let mut filters = env::args().skip(1).filter(|arg| !arg.starts_with('-'));
    filters.all(|filter| name.contains(&filter) || filter.contains(name))
}

pub(crate) fn random_decoder() -> Decoder {
    let mut config = DecoderConfig::new(1024, 256, 4, 4, 2);
    (config.tied_head, config.max_positions) = (true, 8192);
    noise(config)
}

/// A decoder whose weights are small noise.
pub(crate) fn noise(config: DecoderConfig) -> Decoder {
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

/// Processes `tokens` arbitrary tokens in one step.
pub(crate) fn prefill(decoder: &Decoder, cache: &mut dyn CacheBackend, tokens: usize) {
    let vocab = decoder.config().vocab;
    let prompt: Vec<u32> = (0..tokens).map(|i| (i * 37 % vocab) as u32).collect();
    let prompt = Input::from(&prompt[..]).last_only();
    let logits = decoder.forward(prompt, cache).expect("it fits");
    black_box(logits.into_data());
}

/// The time of a step of one token, the choice of the next token included.
pub(crate) fn step(decoder: &Decoder, cache: &mut dyn CacheBackend) -> Duration {
    let start = Instant::now();
    let generation = Generation::new(decoder, cache, &[7]);
    let next = generation.expect("a token").next();
    let time = start.elapsed();
    black_box(next.expect("a step").expect("finite logits"));
    time
}

/// The time of the same step. The cache held `tokens` tokens, and then holds them again.
pub(crate) fn undone_step(
    decoder: &Decoder,
    cache: &mut dyn CacheBackend,
    tokens: usize,
) -> Duration {
    let time = step(decoder, cache);
    cache.truncate(&[tokens]).expect("the last step");
    time
}

pub(crate) fn residual(decoder: &Decoder, config: impl Into<ResidualConfig>) -> ResidualCheckpoint {
    ResidualCheckpoint::new(&decoder.shape(), decoder.conformance(), config).expect("flex is exact")
}
