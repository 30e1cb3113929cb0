//! Lossy policies against their originals: kept positions, logits, keys and values step by step.

use kv_direct::cache::{
    CacheBackend, Group, H2o, H2oConfig, Indexing, ModelShape, Pooling, SnapKv, SnapKvConfig,
    StreamingLlm, StreamingLlmConfig, Tova, TovaConfig,
};

use crate::golden::Case;

/// The golden cases of lossy policies, and the backend each is about.
fn cases(shape: &ModelShape) -> Vec<(&'static str, Box<dyn CacheBackend>)> {
    let h2o = |group| H2o::new(shape, H2oConfig::new(16, 8).with_group(group)).expect("fits");
    let streaming = |indexing| {
        let config = StreamingLlmConfig::new(12).with_indexing(indexing);
        StreamingLlm::new(shape, config)
    };
    let snap = |pooling, kernel| {
        let config = SnapKvConfig::new(20, 8).with_pooling(pooling, kernel);
        SnapKv::new(shape, config).expect("fits")
    };
    let mut cases: Vec<(&'static str, Box<dyn CacheBackend>)> = vec![
        ("orig-h2o_8_8_mean", Box::new(h2o(Group::Mean))),
        ("orig-h2o_8_8_max", Box::new(h2o(Group::Max))),
        (
            "orig-streaming_4_12_orig_pos",
            Box::new(streaming(Indexing::Original).expect("fits")),
        ),
        (
            "orig-tova16",
            Box::new(Tova::new(shape, TovaConfig::new(16)).expect("fits")),
        ),
        (
            "orig-snapkv_w8_c20_avg5",
            Box::new(snap(Pooling::Average, 5)),
        ),
        ("orig-snapkv_w8_c20_max7", Box::new(snap(Pooling::Max, 7))),
    ];
    if let Ok(cache) = streaming(Indexing::CacheIndex) {
        cases.push(("orig-streaming_4_12_reindex", Box::new(cache)));
    }
    cases
}

#[test]
fn every_policy_keeps_what_its_original_keeps() {
    for model in ["llama", "llama_mha", "qwen3", "gemma3"] {
        let shape = Case::read(model, "orig-full").decoder.shape();
        for (case, cache) in cases(&shape) {
            println!("{model}, {case}");
            Case::read(model, case).holds(cache);
        }
    }
}
