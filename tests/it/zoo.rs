//! One of every backend, its budget as asked.

use kv_direct::{
    cache::CacheBackend,
    model::Decoder,
    policy::{
        FullKv, H2o, H2oConfig, Indexing, SnapKv, SnapKvConfig, StreamingLlm, StreamingLlmConfig,
        Tova, TovaConfig, Window,
    },
    residual::{Plan, ResidualCheckpoint, ResidualConfig},
};

use crate::support::{PlanKind, residual};

/// A `ResidualCheckpoint` that keeps keys and values of its last layer.
fn top_kept(decoder: &Decoder, hot: usize) -> ResidualCheckpoint {
    let shape = decoder.shape();
    let config = ResidualConfig::new(Plan::keep_top(&shape, 1).expect("a layer").with_hot(hot));
    ResidualCheckpoint::new(&shape, decoder.conformance(), config).expect("the probe passed")
}

/// By name: `budget` rows, or what is nearest to it; `usize::MAX` exact rows where a cache is parked.
pub fn zoo(decoder: &Decoder, budget: usize) -> Vec<(&'static str, Box<dyn CacheBackend>)> {
    let shape = decoder.shape();
    let streaming = |indexing| {
        let config = StreamingLlmConfig::new(budget - 2).with_sinks(2);
        StreamingLlm::new(&shape, config.with_indexing(indexing))
    };
    let mut all: Vec<(&'static str, Box<dyn CacheBackend>)> = vec![
        ("full_kv", Box::new(FullKv::new(&shape))),
        (
            "residual",
            Box::new(residual(decoder, budget, PlanKind::Tokens)),
        ),
        (
            "residual parked",
            Box::new(residual(decoder, usize::MAX, PlanKind::Tokens)),
        ),
        (
            "residual over residuals",
            Box::new(residual(decoder, budget, PlanKind::Residuals)),
        ),
        (
            "residual, the top kept",
            Box::new(top_kept(decoder, budget)),
        ),
        (
            "window",
            Box::new(Window::new(&shape, budget).expect("a budget")),
        ),
        (
            "streaming_llm",
            Box::new(streaming(Indexing::Original).expect("recent rows")),
        ),
        (
            "h2o",
            Box::new(H2o::new(&shape, H2oConfig::new(budget, budget / 2)).expect("half of it")),
        ),
        (
            "tova",
            Box::new(Tova::new(&shape, TovaConfig::new(budget)).expect("a budget")),
        ),
        (
            "snap_kv",
            Box::new(SnapKv::new(&shape, SnapKvConfig::new(budget, 2)).expect("above the window")),
        ),
    ];
    if let Ok(re_indexed) = streaming(Indexing::CacheIndex) {
        all.push(("streaming_llm re-indexed", Box::new(re_indexed)));
    }
    all
}
