//! Golden files: sessions that every later version must read, and still writes byte for byte.
//!
//! `KV_DIRECT_GOLDEN=write cargo test --test it session::golden` writes them anew. Do so only with another version of
//! the format.

use std::{env, fs, path::PathBuf};

use burn::tensor::{DType, Device};
use kv_direct::{
    cache::{CacheBackend, TokenIds},
    model::{Decoder, DecoderConfig, Input},
    policy::{
        FullKv, Group, H2o, H2oConfig, Pooling, SnapKv, SnapKvConfig, StreamingLlm,
        StreamingLlmConfig, TokenBudget, Tova, TovaConfig, Window,
    },
    residual::{Plan, ResidualConfig},
    session,
};

use crate::support::{
    caches::checkpoint,
    feed::bits,
    models::{random_decoder, with_windows},
    random::{VOCAB, tokens},
};

/// A session with a golden file of this name.
struct Session {
    name: &'static str,
    decoder: Decoder,
    cache: Box<dyn CacheBackend>,
    /// Tokens that each sequence gets in each step before it is saved.
    steps: Vec<Vec<usize>>,
    /// Whether more of the prompt follows when it is saved.
    open: bool,
    parked: bool,
}

impl Session {
    fn new(name: &'static str, decoder: Decoder, cache: impl CacheBackend + 'static) -> Self {
        Self {
            name,
            decoder,
            cache: Box::new(cache),
            steps: [&[12][..], &[1], &[1], &[1], &[3], &[1], &[1]]
                .map(<[usize]>::to_vec)
                .into(),
            open: false,
            parked: false,
        }
    }

    /// With two sequences of other lengths.
    fn of_two(mut self) -> Self {
        self.steps = [[9, 4], [1, 1], [0, 2], [1, 1], [3, 0]]
            .map(|step| step.to_vec())
            .into();
        self
    }

    fn path(&self) -> PathBuf {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/session/golden");
        PathBuf::from(folder).join(format!("{}.safetensors", self.name))
    }

    fn feed(&self, cache: &mut dyn CacheBackend, seed: u64, counts: &[usize]) -> Vec<u32> {
        let sequences = (0..).zip(counts);
        let step = sequences.map(|(sequence, &count)| tokens(100 * sequence + seed, count));
        let step = Input::from(step.collect::<TokenIds>()).more_follows(self.open);
        bits(&self.decoder.forward(step, cache).expect("a valid step"))
    }

    /// A cache that ran the text until it is saved.
    fn run(&self) -> Box<dyn CacheBackend> {
        let mut cache = self.cache.fork();
        for (seed, step) in (1..).zip(&self.steps) {
            self.feed(&mut *cache, seed, step);
        }
        if self.parked {
            cache.park().expect("entries can be rebuilt");
        }
        cache
    }
}

/// A sliding-window layer below two full-attention layers; heads are 8 wide.
fn slides() -> Decoder {
    random_decoder(&with_windows(
        DecoderConfig::new(VOCAB, 32, 3, 4, 2),
        &[0],
        5,
    ))
}

fn sessions() -> Vec<Session> {
    let full = || random_decoder(&DecoderConfig::new(VOCAB, 32, 2, 4, 2));
    let residual = |name, decoder: Decoder, plan: Plan| {
        let config = ResidualConfig::new(plan).even_if_larger();
        let cache = checkpoint(&decoder, config);
        Session::new(name, decoder, cache)
    };
    let (decoder, shape) = (slides, slides().shape());
    let snap_kv = |name| {
        let config = SnapKvConfig::new(6, 3).with_pooling(Pooling::Max, 3);
        let cache = SnapKv::new(&shape, config.with_group(Group::Max));
        Session::new(name, decoder(), cache.expect("above the window"))
    };
    let h2o = |budget: TokenBudget, recent: TokenBudget| {
        H2o::new(&shape, H2oConfig::new(budget, recent)).expect("a budget")
    };
    let share = |ratio| TokenBudget::of_prompt(ratio).expect("a share");
    let tova = Tova::new(&shape, TovaConfig::new(6)).expect("a budget");
    let window = || Window::new(&shape, 6).expect("a budget");
    let narrow = || full().with_cache_dtype(DType::BF16);
    let top = Plan::retain_top(&shape, 1).expect("three layers");
    let re_indexed = StreamingLlmConfig::new(4).with_sinks(2);
    let streaming = StreamingLlm::new(&full().shape(), re_indexed).expect("recent tokens");
    let mut all = vec![
        Session::new("full_kv", decoder(), FullKv::new(&shape)),
        residual("residual_ids", decoder(), Plan::tokens(&shape).with_hot(4)),
        residual(
            "residual_parked",
            decoder(),
            Plan::tokens(&shape).with_hot(usize::MAX),
        ),
        residual(
            "residual_residuals",
            decoder(),
            Plan::residuals(&shape).with_hot(4).with_chunk(8),
        ),
        residual("residual_partial", decoder(), top.with_hot(4)),
        Session::new("h2o", decoder(), h2o(6.into(), 2.into())),
        Session::new("h2o_share", decoder(), h2o(share(0.5), share(0.25))),
        Session::new("streaming_llm", full(), streaming),
        snap_kv("snap_kv"),
        snap_kv("snap_kv_prompt"),
        Session::new("tova", decoder(), tova),
        Session::new("window", decoder(), window()),
        Session::new("window_of_two", decoder(), window()).of_two(),
        Session::new("bf16_of_two", narrow(), FullKv::new(&narrow().shape())).of_two(),
    ];
    for session in &mut all {
        session.open = session.name == "snap_kv_prompt";
        session.parked = session.name == "residual_parked";
    }
    all
}

/// The goldens have the default rounding. With another one, they are read all the same.
fn default_rounding() -> bool {
    env::var("KV_DIRECT_ROUNDING").as_deref() != Ok("separate")
}

#[test]
fn every_golden_file_is_read_and_continues_with_the_same_bits() {
    for mut session in sessions() {
        let mut uninterrupted = session.run();
        let model = session.decoder.fingerprint();
        if env::var("KV_DIRECT_GOLDEN").as_deref() == Ok("write") {
            session::save(&session.path(), &uninterrupted, &model).expect("a state");
        }
        let mut read = session.cache.fork();
        session::load(&session.path(), &mut read, &model, &Device::flex()).expect(session.name);
        assert_eq!(read.lengths(), uninterrupted.lengths(), "{}", session.name);
        session.open = false;
        for (seed, count) in [(50, 2), (51, 1), (52, 3)] {
            let counts = vec![count; read.lengths().len()];
            let found = session.feed(&mut *read, seed, &counts);
            let expected = session.feed(&mut *uninterrupted, seed, &counts);
            assert!(
                found == expected || !default_rounding(),
                "{}: other logits",
                session.name
            );
        }
    }
}

#[test]
fn every_golden_file_is_still_written_byte_for_byte() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("session.safetensors");
    for session in sessions() {
        let model = session.decoder.fingerprint();
        let golden = fs::read(session.path()).expect(session.name);
        let mut cache = session.cache.fork();
        session::load(&session.path(), &mut cache, &model, &Device::flex()).expect(session.name);
        session::save(&path, &cache, &model).expect("a state");
        let again = fs::read(&path).expect("a file");
        assert!(again == golden, "{}, read and written", session.name);
        if default_rounding() {
            session::save(&path, &session.run(), &model).expect("a state");
            let new = fs::read(&path).expect("a file");
            assert!(new == golden, "{}, written anew", session.name);
        }
    }
}
