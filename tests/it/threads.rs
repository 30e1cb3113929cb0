//! No bit depends on the number of threads: processes with different numbers are compared.

use std::hash::{DefaultHasher, Hash, Hasher};

use burn::tensor::DType;
use kv_direct::{model::DecoderConfig, policy::FullKv};

use crate::{
    alone::alone,
    engine::Engine,
    support::{feed, random, tokens},
};

/// A hash of all logits of a text in several calls: of the decoder, and of an engine in other dtypes.
#[test]
#[ignore = "answers for a process with its own number of threads: the other test starts it"]
fn bits_of_this_process() {
    let mut bits = DefaultHasher::new();
    // Large enough for products on many threads, those of a single row too.
    let mut config = DecoderConfig::new(97, 640, 2, 4, 2);
    config.intermediate = 1100;
    let (decoder, ids) = (random(&config), tokens(9, 72));
    let calls = [0..60, 60..61, 61..62, 62..71, 71..72];
    let mut cache = FullKv::new(&decoder.shape());
    for call in calls.clone() {
        feed(&decoder, &mut cache, &ids[call]).hash(&mut bits);
    }
    for dtype in [DType::F64, DType::BF16] {
        let engine = Engine::new(dtype, 1);
        let mut cache = FullKv::new(&engine.shape());
        for call in calls.clone() {
            engine.feed(&mut cache, &ids[call]).hash(&mut bits);
        }
    }
    println!("bits: {:016x}", bits.finish());
}

#[test]
fn no_bit_depends_on_the_number_of_threads() {
    let bits = |threads: &str| {
        let mut process = alone("threads::bits_of_this_process");
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
