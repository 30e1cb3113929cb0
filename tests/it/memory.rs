//! Bytes: what a cache holds, by formula and by part.

use kv_direct::{
    cache::CacheBackend,
    exact::KV_BLOCK,
    model::DecoderConfig,
    policy::{FullKv, Window},
};

use crate::support::{PlanKind, feed, random, residual, tiny, tokens};

const LAYERS: usize = 3;
const KV: usize = 2 * 16;
const HIDDEN: usize = 64;
/// Keys and values of one token in all layers, f32.
const ROW: usize = 2 * KV * LAYERS * 4;
/// A slot's entry in the lists that say what slots hold.
const ENTRY: usize = 8;

#[test]
fn full_kv_holds_every_row_and_whole_pieces() {
    let decoder = tiny(2);
    let mut cache = FullKv::new(&decoder.shape());
    assert_eq!(decoder.shape().keys_values_per_token(), ROW);
    for (calls, tokens_in) in [(30, 30), (482, 512), (1, 513)] {
        feed(&decoder, &mut cache, &tokens(1, calls)[..]);
        let (report, slots) = (cache.memory(), usize::next_multiple_of(tokens_in, KV_BLOCK));
        assert_eq!(report.keys_values, tokens_in * ROW);
        assert_eq!(report.total(), slots * (ROW + LAYERS * ENTRY));
        assert_eq!((report.tokens, report.residuals), (0, 0));
        // Buffers grow layer by layer: one layer's old piece is held beside its new ones.
        let grown = if tokens_in == 513 {
            KV_BLOCK * (ROW / LAYERS + ENTRY)
        } else {
            0
        };
        assert_eq!(report.scratch_peak, grown);
    }
}

#[test]
fn a_window_gives_back_what_a_long_prompt_needed() {
    let decoder = tiny(2);
    let mut cache = Window::new(&decoder.shape(), 20).expect("a budget");
    let piece = KV_BLOCK * (ROW + LAYERS * ENTRY);
    for calls in [700, 1, 1, 600] {
        feed(&decoder, &mut cache, &tokens(1, calls)[..]);
        let report = cache.memory();
        assert_eq!(report.keys_values, 20 * ROW);
        assert_eq!(report.total(), piece, "one piece, after {calls}");
        // Two pieces in every layer while the prompt was there; on top of them the rows of a layer on
        // their way into one piece, or a layer's old piece while it grew to two.
        let held = match calls {
            700 => piece + 20 * ROW / LAYERS,
            600 => piece + piece / LAYERS,
            _ => 0,
        };
        assert_eq!(report.scratch_peak, held, "after {calls}");
    }
}

#[test]
fn a_residual_checkpoint_holds_its_hot_rows_and_four_bytes_a_token() {
    let decoder = tiny(2);
    for hot in [0, 10, 40] {
        let mut cache = residual(&decoder, hot, PlanKind::Tokens);
        let mut total = 0;
        for calls in [7, 60, 1, 1, 31, 1] {
            feed(&decoder, &mut cache, &tokens(1, calls)[..]);
            total += calls;
            let (report, held) = (cache.memory(), hot.min(total));
            assert_eq!(report.keys_values, held * ROW);
            assert_eq!(report.tokens, 4 * total);
            assert_eq!(report.residuals, 0);
            if total > hot {
                let ids = report.total() - hot * (ROW + LAYERS * ENTRY);
                assert!(
                    (4 * total..=4 * total.next_multiple_of(KV_BLOCK)).contains(&ids),
                    "no slack but that of the list of ids"
                );
            }
        }
    }
}

#[test]
fn the_scratch_of_a_replay_does_not_depend_on_the_number_of_layers() {
    let peaks = [3, 6].map(|layers| {
        let decoder = random(&DecoderConfig::new(97, 64, layers, 4, 2));
        let mut cache = residual(&decoder, 10, PlanKind::Tokens);
        feed(&decoder, &mut cache, &tokens(1, 300)[..]);
        feed(&decoder, &mut cache, &[1][..]);
        cache.memory().scratch_peak
    });
    // 290 old rows, replayed in three chunks of 128; the rows of a layer stand in one piece.
    let rows = 3 * 128 * HIDDEN * 4;
    let layer = 2 * KV * KV_BLOCK * 4 + KV_BLOCK * ENTRY;
    // A chunk's residual, its norm, queries and output, and the scores of 128 queries, held twice while they are made.
    let block = 4 * 128 * HIDDEN * 4 + 128 * KV_BLOCK * 4 * 2 * 4;
    assert_eq!(peaks, [rows + layer + block; 2]);
}

#[test]
fn residuals_hold_one_vector_a_token_and_layer() {
    let decoder = tiny(4);
    let mut cache = residual(&decoder, 10, PlanKind::Residuals);
    for calls in [50, 1, 20] {
        feed(&decoder, &mut cache, &tokens(1, calls)[..]);
    }
    let report = cache.memory();
    assert_eq!(report.keys_values, 10 * 2 * ROW);
    assert_eq!(report.residuals, 71 * HIDDEN * LAYERS * 4);
    assert_eq!(report.tokens, 0);
    let chunks = usize::next_multiple_of(71, 64);
    let held = 10 * (2 * ROW + LAYERS * ENTRY) + chunks * HIDDEN * LAYERS * 4;
    assert_eq!(report.total(), held);
}
