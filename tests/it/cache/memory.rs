//! Bytes and positions that a cache holds, by formula and by part.

use kv_direct::{
    cache::{CacheBackend, LayerIndex},
    exact::KV_BLOCK,
    model::DecoderConfig,
    policy::{FullKv, Window},
};

use crate::support::{
    caches::{PlanKind, backends, residual},
    feed::feed,
    models::{random_decoder, tiny},
    random::tokens,
};

const LAYERS: usize = 3;

const KV: usize = 2 * 16;

const HIDDEN: usize = 64;

/// Keys and values of one token in all layers, f32.
const TOKEN: usize = 2 * KV * LAYERS * 4;

/// Bytes of a slot in the lists of positions.
const POSITION: usize = 8;

#[test]
fn full_kv_holds_every_entry_in_whole_kv_blocks() {
    let decoder = tiny(2);
    let mut cache = FullKv::new(&decoder.shape());
    assert_eq!(decoder.shape().keys_values_per_token(), TOKEN);
    for (count, tokens_in) in [(30, 30), (482, 512), (1, 513)] {
        feed(&decoder, &mut cache, &tokens(1, count)[..]);
        let (report, slots) = (cache.memory(), usize::next_multiple_of(tokens_in, KV_BLOCK));
        assert_eq!(report.keys_values, tokens_in * TOKEN);
        assert_eq!(report.total(), slots * (TOKEN + LAYERS * POSITION));
        assert_eq!((report.tokens, report.residuals), (0, 0));
        // Buffers grow layer by layer: one layer's old KV block is held beside its new ones.
        let grown = if tokens_in == 513 {
            KV_BLOCK * (TOKEN / LAYERS + POSITION)
        } else {
            0
        };
        assert_eq!(report.scratch_peak, grown);
    }
}

#[test]
fn a_window_frees_what_a_long_prompt_needed() {
    let decoder = tiny(2);
    let mut cache = Window::new(&decoder.shape(), 20).expect("a budget");
    let block = KV_BLOCK * (TOKEN + LAYERS * POSITION);
    for count in [700, 1, 1, 600] {
        feed(&decoder, &mut cache, &tokens(1, count)[..]);
        let report = cache.memory();
        assert_eq!(report.keys_values, 20 * TOKEN);
        assert_eq!(report.total(), block, "one block, after {count}");
        // Every layer has two KV blocks while it holds the prompt. On top come the entries of one layer that
        // are copied into one block, or a layer's old block while it grows to two.
        let held = match count {
            700 => block + 20 * TOKEN / LAYERS,
            600 => block + block / LAYERS,
            _ => 0,
        };
        assert_eq!(report.scratch_peak, held, "after {count}");
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
                let ids = report.total() - hot * (TOKEN + LAYERS * POSITION);
                assert!(
                    (4 * total..=4 * total.next_multiple_of(KV_BLOCK)).contains(&ids),
                    "no slack but that of the list of ids"
                );
            }
        }
    }
}

#[test]
fn scratch_of_a_replay_does_not_depend_on_the_layers() {
    let peaks = [3, 6].map(|layers| {
        let decoder = random_decoder(&DecoderConfig::new(97, 64, layers, 4, 2));
        let mut cache = residual(&decoder, 10, PlanKind::Tokens);
        feed(&decoder, &mut cache, &tokens(1, 300)[..]);
        feed(&decoder, &mut cache, &[1][..]);
        cache.memory().scratch_peak
    });
    // 290 old tokens, replayed in three chunks of 128. The entries of a layer fill one KV block.
    let residuals = 3 * 128 * HIDDEN * 4;
    let layer = 2 * KV * KV_BLOCK * 4 + KV_BLOCK * POSITION;
    // A chunk's residual, its norm, queries and output, and the scores of 128 queries. Scores are held twice
    // while they are made.
    let block = 4 * 128 * HIDDEN * 4 + 128 * KV_BLOCK * 4 * 2 * 4;
    assert_eq!(peaks, [residuals + layer + block; 2]);
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
    let held = 10 * (2 * TOKEN + LAYERS * POSITION) + chunks * HIDDEN * LAYERS * 4;
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
