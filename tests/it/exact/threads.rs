//! No bit depends on the number of threads: processes with different numbers are compared.

use std::hash::{DefaultHasher, Hash, Hasher};

use burn::tensor::DType;
use kv_direct::{model::DecoderConfig, policy::FullKv};

use crate::support::{
    engine::Engine, feed::feed, models::random_decoder, process::alone, random::tokens,
};

#[test]
#[ignore = "prints for a process with its own number of threads: the other test starts it"]
fn prints_the_bits_of_this_process() {
    let first = bits();
    assert_eq!(bits(), first, "bits repeat within the process");
    println!("bits: {first:016x}");
}

/// Hashes all logits of a text in several steps: of the decoder, and of an engine in other dtypes.
fn bits() -> u64 {
    let mut bits = DefaultHasher::new();
    // Large enough for products on many threads, also those of a single row.
    let mut config = DecoderConfig::new(97, 640, 2, 4, 2);
    config.intermediate = 1100;
    let (decoder, ids) = (random_decoder(&config), tokens(9, 72));
    let steps = [0..60, 60..61, 61..62, 62..71, 71..72];
    let mut cache = FullKv::new(&decoder.shape());
    for step in steps.clone() {
        feed(&decoder, &mut cache, &ids[step]).hash(&mut bits);
    }
    for dtype in [DType::F64, DType::BF16] {
        let engine = Engine::new(dtype, 1);
        let mut cache = FullKv::new(&engine.shape());
        for step in steps.clone() {
            engine.feed(&mut cache, &ids[step]).hash(&mut bits);
        }
    }
    bits.finish()
}

#[test]
fn no_bit_depends_on_their_number() {
    let bits = |threads: &str| {
        let mut process = alone(module_path!(), "prints_the_bits_of_this_process");
        let output = process.env("RAYON_NUM_THREADS", threads).output();
        let output = output.expect("this program can be started");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let line = text.lines().find(|line| line.contains("bits: "));
        line.unwrap_or_else(|| panic!("{threads} threads: {text}"))
            .to_owned()
    };
    let one = bits("1");
    for threads in ["2", "3", "5"] {
        assert_eq!(bits(threads), one, "{threads} threads");
    }
}
