//! Lossy policies against their originals: kept positions, logits, keys and values step by step.

use crate::support::CacheExt as _;
use burn::tensor::Tensor;
use kv_direct::{
    cache::{CacheBackend, CacheError, LayerIndex, ModelShape, Observed, Step, TokenIds},
    model::Input,
    policy::{
        Group, H2o, H2oConfig, Indexing, Pooling, SnapKv, SnapKvConfig, StreamingLlm,
        StreamingLlmConfig, TokenBudget, Tova, TovaConfig,
    },
};

use crate::{
    golden::Case,
    support::{feed, tiny, tokens},
};

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

/// NVIDIA's presses cut a prompt of 40 tokens to 20 rows and leave it at that.
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
fn of_a_prompt_the_same_is_kept_as_by_the_presses_of_kvpress() {
    for model in ["llama", "llama_mha", "qwen3"] {
        let shape = Case::read(model, "orig-full").decoder.shape();
        for (case, cache) in presses(&shape) {
            println!("{model}, {case}");
            Case::read(model, case).holds(cache);
        }
    }
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

#[test]
fn a_prompt_taken_back_in_part_is_over_and_what_comes_next_is_kept() {
    let decoder = tiny(2);
    let mut cache = SnapKv::new(&decoder.shape(), SnapKvConfig::new(8, 4)).expect("fits");
    feed(&decoder, &mut cache, &tokens(1, 6)[..]);
    cache.truncate_all(4).expect("nothing was dropped");
    feed(&decoder, &mut cache, &tokens(2, 20)[..]);
    let kept = cache.cached(LayerIndex::new(0));
    assert_eq!(kept.sequence(0), [(0..24).collect::<Vec<_>>()]);
}

#[test]
fn a_prompt_of_which_more_follows_cannot_be_taken_back_where_its_last_queries_choose() {
    let decoder = tiny(2);
    let mut cache = SnapKv::new(&decoder.shape(), SnapKvConfig::new(8, 4)).expect("fits");
    let open = Input::from(TokenIds::from(&tokens(1, 6)[..])).more_follows(true);
    decoder.forward(open, &mut cache).expect("a good call");
    let refused = cache.truncate_all(5);
    assert!(
        matches!(
            refused,
            Err(CacheError::Irreversible {
                sequence: 0,
                to: 5,
                oldest: 6
            })
        ),
        "{refused:?}"
    );
    cache
        .truncate_all(6)
        .expect("the end is where the prompt stands");
}

#[test]
fn a_row_that_brings_nothing_after_its_prompt_is_not_cut_again() {
    let decoder = tiny(2);
    let mut cache = SnapKv::new(&decoder.shape(), SnapKvConfig::new(8, 4)).expect("fits");
    feed(&decoder, &mut cache, vec![tokens(1, 15), tokens(2, 1)]);
    let cut = cache.cached(LayerIndex::new(0)).sequence(0).to_vec();
    assert_eq!(cut[0].len(), 8);
    feed(&decoder, &mut cache, vec![vec![], tokens(2, 13)]);
    assert_eq!(cache.cached(LayerIndex::new(0)).sequence(0), cut);
}

#[test]
fn what_a_policy_holds_for_the_end_of_a_prompt_goes_with_it() {
    let decoder = tiny(2);
    let share = |ratio| TokenBudget::of_prompt(ratio).expect("a share");
    let mut caches: Vec<Box<dyn CacheBackend>> = vec![
        Box::new(SnapKv::new(&decoder.shape(), SnapKvConfig::new(64, 8)).expect("fits")),
        Box::new(Tova::new(&decoder.shape(), TovaConfig::new(share(1.0))).expect("fits")),
    ];
    for cache in &mut caches {
        let chunk = |seed| vec![tokens(seed, 20), tokens(seed + 1, 12)];
        let input = Input::from(chunk(1)).more_follows(true);
        decoder.forward(input, cache).expect("a chunk");
        assert!(cache.memory().scores > 0, "{cache:?} waits for the end");
        decoder.forward(chunk(5), cache).expect("the last chunk");
        assert_eq!(
            cache.memory().scores,
            0,
            "{cache:?}: within the budget, nothing is cut"
        );
    }
}

#[test]
fn a_window_wider_than_any_prompt_protects_all_of_it() {
    let decoder = tiny(2);
    let config = SnapKvConfig::new(TokenBudget::of_prompt(0.5).expect("a share"), usize::MAX);
    let mut cache = SnapKv::new(&decoder.shape(), config).expect("fits");
    feed(&decoder, &mut cache, &tokens(1, 20)[..]);
    assert_eq!(
        cache.cached(LayerIndex::new(0)).sequence(0),
        [(0..20).collect::<Vec<_>>()]
    );
}

#[test]
fn attention_is_observed_at_the_layer_whose_turn_it_was_and_nowhere_else() {
    let decoder = tiny(2);
    let mut cache = H2o::new(&decoder.shape(), H2oConfig::new(8, 4)).expect("fits");
    let sums = || Observed::ColumnSums(Tensor::zeros([1, 4, 512], decoder.device()));
    let early = cache.observe(LayerIndex::new(0), sums());
    assert!(
        matches!(
            early,
            Err(CacheError::LayerOrder {
                expected: None,
                found: 0
            })
        ),
        "{early:?}"
    );
    feed(&decoder, &mut cache, &tokens(1, 20)[..]);
    let kept = cache.cached(LayerIndex::new(0));
    assert!(
        cache.observe(LayerIndex::new(0), sums()).is_err(),
        "no step is open"
    );
    assert_eq!(cache.cached(LayerIndex::new(0)), kept);
    let step = Step::new(vec![vec![1]].into(), &[20]).expect("a step");
    cache.begin(&step).expect("the next step");
    assert!(
        cache.observe(LayerIndex::new(2), sums()).is_err(),
        "no layer had its turn"
    );
    assert!(matches!(cache.commit(), Err(CacheError::Poisoned)));
}
