//! The table of the probe's results in `docs/exactness.md`.

use std::time::Instant;

use burn::tensor::{DType, Device};
use kv_direct::{exact::Conformance, model::DecoderConfig};

/// The columns behind a model's name and the number of checks.
const DTYPES: [DType; 4] = [DType::F32, DType::F64, DType::BF16, DType::F16];

/// Residual stream, heads, KV heads, width of a head, feed-forward layer, vocabulary, and whether heads are
/// normed. The first one is no real model.
const MODELS: [(&str, [usize; 6], bool); 7] = [
    ("a small one", [520, 4, 4, 32, 600, 97], true),
    ("SmolLM2-135M", [576, 9, 3, 64, 1536, 49_152], false),
    ("Gemma-3-270M", [640, 4, 1, 256, 2048, 262_144], true),
    ("Qwen2.5-0.5B", [896, 14, 2, 64, 4864, 151_936], false),
    ("Qwen3-0.6B", [1024, 16, 8, 128, 3072, 151_936], true),
    ("Llama-3.2-1B", [2048, 32, 8, 64, 8192, 128_256], false),
    ("Gemma-3-1B", [1152, 4, 1, 256, 6912, 262_144], true),
];

fn probe(sizes: [usize; 6], qk_norm: bool, dtype: DType) -> Conformance {
    let [hidden, heads, kv_heads, head_dim, inner, vocab] = sizes;
    let mut config = DecoderConfig::new(vocab, hidden, 1, heads, kv_heads);
    (config.head_dim, config.intermediate) = (head_dim, inner);
    config.qk_norm = qk_norm;
    Conformance::probe(&config.shape(dtype).kernels, &Device::flex(), dtype)
}

/// The cells of a model's row in the document: checks, and how many of them fail in each dtype.
fn row(name: &str) -> [usize; 5] {
    let document = include_str!("../../../docs/exactness.md");
    let start = format!("| {name} |");
    let line = document.lines().find_map(|line| line.strip_prefix(&start));
    let cells = line.expect(name).trim_end_matches('|').split('|');
    let cells: Vec<usize> = cells
        .map(|cell| cell.trim().parse().expect("a number"))
        .collect();
    cells.try_into().expect("a cell for every dtype")
}

fn assert_row((name, sizes, qk_norm): (&str, [usize; 6], bool)) {
    let [checks, failing @ ..] = row(name);
    for (dtype, expected) in DTYPES.into_iter().zip(failing) {
        let start = Instant::now();
        let found = probe(sizes, qk_norm, dtype);
        println!("{name}, {:.1} s, {found}", start.elapsed().as_secs_f64());
        // How many fail depends on the CPU. Whether any fails does not.
        let verdict = (found.checks().len(), found.is_exact());
        assert_eq!(verdict, (checks, expected == 0), "{name}: {found}");
    }
}

#[test]
fn a_small_model_gives_the_verdicts_of_the_document() {
    assert_row(MODELS[0]);
}

#[test]
#[ignore = "the whole table takes minutes"]
fn every_model_gives_the_verdicts_of_the_document() {
    MODELS.into_iter().for_each(assert_row);
}
