//! The table of real models in `docs/memory.md`.

use std::num::NonZeroUsize;

use burn::tensor::DType;
use kv_direct::{model::DecoderConfig, residual::Plan};

/// Layers, residual stream, heads, KV heads, width of a head, feed-forward layer; and the window, where every
/// sixth layer is a full-attention layer.
type Sizes = ([usize; 6], Option<usize>);

const MODELS: [(&str, Sizes); 9] = [
    ("SmolLM2-135M", ([30, 576, 9, 3, 64, 1536], None)),
    ("Qwen2.5-0.5B", ([24, 896, 14, 2, 64, 4864], None)),
    ("Qwen3-0.6B", ([28, 1024, 16, 8, 128, 3072], None)),
    ("Llama-3.2-1B", ([16, 2048, 32, 8, 64, 8192], None)),
    ("Llama-3.1-8B", ([32, 4096, 32, 8, 128, 14336], None)),
    ("Llama-2-7B", ([32, 4096, 32, 32, 128, 11008], None)),
    ("Gemma-3-270M", ([18, 640, 4, 1, 256, 2048], Some(512))),
    ("Gemma-3-1B", ([26, 1152, 4, 1, 256, 6912], Some(512))),
    ("Gemma-3-4B", ([34, 2560, 8, 4, 256, 10240], Some(1024))),
];

fn config(([layers, hidden, heads, kv_heads, head_dim, inner], window): Sizes) -> DecoderConfig {
    let mut config = DecoderConfig::new(32_000, hidden, layers, heads, kv_heads);
    (config.head_dim, config.intermediate) = (head_dim, inner);
    for (index, layer) in config.layers.iter_mut().enumerate() {
        layer.window = window
            .and_then(NonZeroUsize::new)
            .filter(|_| index % 6 != 5);
    }
    config
}

/// The cells of a table row without their commas.
fn cells(line: &str) -> Vec<String> {
    let cells = line.trim_matches('|').split('|');
    cells.map(|cell| cell.trim().replace(',', "")).collect()
}

#[test]
fn real_models_cost_what_the_document_says() {
    let document = include_str!("../../../docs/memory.md");
    for (name, sizes) in MODELS {
        let config = config(sizes);
        let shape = config.shape(DType::BF16);
        let old = shape.keys_values_per_old_token();
        let residuals = Plan::residuals(&shape).bytes_per_old_token(&shape);
        let full: Vec<usize> = (0..shape.layers())
            .filter(|&l| shape.windows[l].is_none())
            .collect();
        let first_kept = full[full.len().div_ceil(2)];
        let half = Plan::retain_top(&shape, shape.layers() - first_kept).expect("so many layers");
        let projections = 2 * (shape.kernels.kv_heads * shape.kernels.head_dim);
        let block = 2 * config.heads * config.head_dim + projections + 3 * config.intermediate;
        let expected = [
            name.to_owned(),
            shape.keys_values_per_token().to_string(),
            old.to_string(),
            residuals.to_string(),
            format!("{:.2}", residuals as f64 / old as f64),
            half.bytes_per_old_token(&shape).to_string(),
            format!("{:.0}", block as f64 / projections as f64),
        ];
        let line = document
            .lines()
            .find(|line| line.starts_with(&format!("| {name} |")));
        assert_eq!(cells(line.expect(name)), expected);
    }
}
