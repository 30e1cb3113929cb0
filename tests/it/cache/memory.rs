//! Bytes and positions that a cache holds, by formula and by part.

use std::path::Path;

use burn::tensor::Device;
use kv_direct::{
    cache::{CacheBackend, LayerIndex},
    exact::PANEL,
    model::{Decoder, DecoderConfig},
    policy::{FullKv, H2o, H2oConfig, Window},
    pretrained,
};

use crate::support::{
    caches::{PlanKind, backends, residual},
    feed::feed,
    models::{random_decoder, sliding, tiny},
    random::tokens,
    tokenizer_folder::TINY,
};

const LAYERS: usize = 3;

const KV: usize = 2 * 16;

const HIDDEN: usize = 64;

/// Keys and values of one token in all layers, f32.
const TOKEN: usize = 2 * KV * LAYERS * 4;

/// Bytes of a slot in the lists of positions.
const POSITION: usize = 8;

/// Bytes of a slot in one layer.
const SLOT: usize = TOKEN / LAYERS + POSITION;

#[test]
fn full_kv_holds_every_entry_and_an_eighth_of_slack() {
    let decoder = tiny(2);
    let mut cache = FullKv::new(&decoder.shape());
    assert_eq!(decoder.shape().keys_values_per_token(), TOKEN);
    let mut before = 0;
    for (count, tokens_in, slots) in [
        (30, 30, 32),
        (2, 32, 32),
        (480, 512, 576),
        (1, 513, 576),
        (64, 577, 672),
    ] {
        feed(&decoder, &mut cache, &tokens(1, count)[..]);
        let report = cache.memory();
        assert_eq!(report.keys_values, tokens_in * TOKEN);
        assert_eq!(report.total(), slots * LAYERS * SLOT);
        assert_eq!((report.tokens, report.residuals), (0, 0));
        // Buffers grow layer by layer: the old ones of a layer are held beside its new ones.
        let grown = if slots > before { before * SLOT } else { 0 };
        assert_eq!(report.scratch_peak, grown);
        before = slots;
    }
}

#[test]
fn a_window_frees_what_a_long_prompt_needed() {
    let decoder = tiny(2);
    let mut cache = Window::new(&decoder.shape(), 20).expect("a budget");
    for (count, slots) in [(700, 768), (1, PANEL), (1, PANEL), (600, 704)] {
        feed(&decoder, &mut cache, &tokens(1, count)[..]);
        let report = cache.memory();
        assert_eq!(report.keys_values, 20 * TOKEN);
        assert_eq!(
            report.total(),
            LAYERS * PANEL * SLOT,
            "one panel, after {count}"
        );
        // Every layer holds the prompt until it is committed. On top come the keys of one layer, from which those that
        // stay are gathered.
        let keys = if slots > PANEL {
            slots / 2 * TOKEN / LAYERS
        } else {
            0
        };
        let held = LAYERS * (slots - PANEL) * SLOT + keys;
        assert_eq!(report.scratch_peak, held, "after {count}");
    }
}

/// The cache is at most this much larger than its sequences would be alone.
const TOGETHER: f64 = 1.3;

#[test]
fn a_long_sequence_costs_its_neighbours_nothing() {
    let plain = tiny(2);
    let windows = sliding(40);
    let observing = H2oConfig::new(600, 100);
    let mut caches: Vec<(&Decoder, Box<dyn CacheBackend>)> = vec![
        (&plain, Box::new(FullKv::new(&plain.shape()))),
        (
            &plain,
            Box::new(H2o::new(&plain.shape(), observing).expect("a budget")),
        ),
        (&windows, Box::new(FullKv::new(&windows.shape()))),
        (
            &windows,
            Box::new(Window::new(&windows.shape(), 100).expect("a budget")),
        ),
    ];
    for (decoder, cache) in &mut caches {
        let texts: Vec<Vec<u32>> = (0..16)
            .map(|i| tokens(i, if i == 7 { 2_000 } else { 10 }))
            .collect();
        let mut alone = 0;
        for text in &texts {
            let mut cache = cache.fork();
            feed(decoder, &mut cache, &text[..]);
            alone += cache.memory().total();
        }
        feed(decoder, &mut *cache, texts);
        let together = cache.memory().total();
        assert!(
            together as f64 <= TOGETHER * alone as f64,
            "{cache:?}: {together} bytes, {alone} alone"
        );
    }
}

#[test]
fn a_plan_of_tokens_holds_hot_tokens_and_ids() {
    let decoder = tiny(2);
    for hot in [0, 10, 40] {
        let mut cache = residual(&decoder, hot, PlanKind::Tokens);
        let mut total = 0;
        for count in [7, 60, 1, 1, 31, 1] {
            feed(&decoder, &mut cache, &tokens(1, count)[..]);
            total += count;
            let (report, held) = (cache.memory(), hot.min(total));
            assert_eq!(report.keys_values, held * TOKEN);
            assert_eq!(report.tokens, 4 * total);
            assert_eq!(report.residuals, 0);
            if total > hot {
                // The hot tokens may begin anywhere in a panel.
                let panels = |slots: usize| slots.next_multiple_of(PANEL) * LAYERS * SLOT;
                let most = if hot == 0 { 0 } else { panels(hot + PANEL - 1) };
                let ids = 4 * total..=4 * (total + total / 8 + PANEL);
                assert!(
                    (panels(hot) + ids.start()..=most + ids.end()).contains(&report.total()),
                    "no slack but that of the last panel and of the list of ids"
                );
            }
        }
    }
}

#[test]
fn scratch_of_a_replay_depends_on_neither_layers_nor_hot_entries() {
    let peaks = [(3, 10), (6, 10), (3, 200), (6, 200)].map(|(layers, hot)| {
        let decoder = random_decoder(&DecoderConfig::new(97, 64, layers, 4, 2));
        let mut cache = residual(&decoder, hot, PlanKind::Tokens);
        feed(&decoder, &mut cache, &tokens(1, 300)[..]);
        feed(&decoder, &mut cache, &[1][..]);
        cache.memory().scratch_peak
    });
    // A chunk of 64 tokens, as the model is small: its residual and its successor. The feed-forward layer, four times as
    // wide, has the normed rows, gate and up, and their product: more than attention holds, which keeps no scores.
    let block = 2 * 64 * HIDDEN * 4 + 64 * (HIDDEN + 3 * 4 * HIDDEN) * 4;
    // The residuals of 290 old tokens, which fill ten panels of one layer; 100 fill four.
    let residual = HIDDEN * 4;
    let [many, few] = [
        290 * residual + 10 * PANEL * SLOT,
        100 * residual + 4 * PANEL * SLOT,
    ];
    assert_eq!(peaks, [many, many, few, few].map(|replay| replay + block));
}

/// The model of `examples/compare`, and its default sizes.
#[test]
fn a_replay_holds_less_than_the_full_cache_of_a_small_model() {
    let decoder = pretrained::load(Path::new(TINY), &Device::flex()).expect("a model folder");
    let decoder = decoder.decoder;
    let peak = |cache: &mut dyn CacheBackend| {
        feed(&decoder, cache, &tokens(1, 512)[..]);
        let steps = (0..50).map(|_| {
            feed(&decoder, cache, &[1][..]);
            let report = cache.memory();
            report.total() + report.scratch_peak
        });
        steps.max()
    };
    let full = peak(&mut FullKv::new(&decoder.shape()));
    let rebuilt = peak(&mut residual(&decoder, 32, PlanKind::Tokens));
    assert!(rebuilt < full, "{rebuilt:?} bytes, {full:?} in full");
}

#[test]
fn a_plan_of_residuals_holds_one_vector_a_token_and_layer() {
    let decoder = tiny(4);
    let mut cache = residual(&decoder, 10, PlanKind::Residuals);
    for count in [50, 1, 20] {
        feed(&decoder, &mut cache, &tokens(1, count)[..]);
    }
    let report = cache.memory();
    assert_eq!(report.keys_values, 10 * 2 * TOKEN);
    assert_eq!(report.residuals, 71 * HIDDEN * LAYERS * 4);
    assert_eq!(report.tokens, 0);
    let chunks = usize::next_multiple_of(71, 64);
    // Positions 61 to 70 are in two panels.
    let held = 2 * PANEL * (2 * TOKEN + LAYERS * POSITION) + chunks * HIDDEN * LAYERS * 4;
    assert_eq!(report.total(), held);
}

#[test]
fn cached_positions_are_those_of_the_policy() {
    let decoder = tiny(2);
    for (name, mut cache) in backends(&decoder) {
        feed(&decoder, &mut cache, &tokens(1, 10)[..]);
        feed(&decoder, &mut cache, &tokens(3, 2)[..]);
        let cached = cache.cached(LayerIndex::new(2));
        let from = if name == "Window" { 6 } else { 0 };
        assert_eq!(
            cached.sequence(0),
            [(from..12).collect::<Vec<_>>()],
            "{name}"
        );
        assert_eq!(
            cache.cached(LayerIndex::new(3)).sequences(),
            0,
            "there is no layer 3"
        );
    }
}
