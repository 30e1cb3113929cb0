//! Policies against their originals: cached positions, logits, keys and values step by step.

use kv_direct::{
    cache::{CacheBackend, ModelShape},
    policy::{
        FullKv, Group, H2o, H2oConfig, Indexing, Pooling, SnapKv, SnapKvConfig, StreamingLlm,
        StreamingLlmConfig, Tova, TovaConfig, Window,
    },
};

use crate::support::golden::Case;

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

/// NVIDIA's presses cut a prompt of 40 tokens to 20 entries, once.
fn presses(shape: &ModelShape) -> Vec<(&'static str, Box<dyn CacheBackend>)> {
    let streaming = |indexing| {
        let config = StreamingLlmConfig::new(16).with_indexing(indexing);
        StreamingLlm::new(shape, config).expect("fits")
    };
    let tova = TovaConfig::new(20).with_protected_last(true);
    vec![
        (
            "kvpress-snapkv_w8_k5",
            Box::new(SnapKv::new(shape, SnapKvConfig::new(20, 8)).expect("fits")),
        ),
        (
            "kvpress-tova",
            Box::new(Tova::new(shape, tova).expect("fits")),
        ),
        (
            "kvpress-streaming_sink4",
            Box::new(streaming(Indexing::Original)),
        ),
        (
            "kvpress-streaming_sink4_rerotated",
            Box::new(streaming(Indexing::CacheIndex)),
        ),
    ]
}

#[test]
fn prompts_are_cut_as_by_the_presses_of_kvpress() {
    for model in ["llama", "llama_mha", "qwen3"] {
        let shape = Case::read(model, "orig-full").decoder.shape();
        for (case, cache) in presses(&shape) {
            println!("{model}, {case}");
            Case::read(model, case).holds(cache);
        }
    }
}

#[test]
fn every_policy_holds_what_its_original_holds() {
    for model in ["llama", "llama_mha", "qwen3", "gemma3"] {
        let shape = Case::read(model, "orig-full").decoder.shape();
        for (case, cache) in cases(&shape) {
            println!("{model}, {case}");
            Case::read(model, case).holds(cache);
        }
    }
}

const MODELS: [&str; 4] = ["llama", "llama_mha", "qwen3", "gemma3"];

#[test]
fn full_kv_equals_transformers() {
    for model in MODELS {
        let case = Case::read(model, "orig-full");
        case.holds(FullKv::new(&case.decoder.shape()));
    }
}

#[test]
fn a_window_evicts_after_the_step() {
    for model in MODELS {
        let case = Case::read(model, "orig-window16");
        case.holds(Window::new(&case.decoder.shape(), 16).expect("a budget"));
    }
}
