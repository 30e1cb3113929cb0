//! Bytes: what a cache holds, by formula and by part.

use kv_direct::{
    cache::{CacheBackend, Floor, FullKv, Window},
    exact::PIECE,
};

use crate::support::{feed, probe, residual, tiny, tokens};

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
        let (report, slots) = (cache.memory(), usize::next_multiple_of(tokens_in, PIECE));
        assert_eq!(report.keys_values, tokens_in * ROW);
        assert_eq!(report.total(), slots * (ROW + LAYERS * ENTRY));
        assert_eq!(
            (report.tokens, report.residuals, report.scratch_peak),
            (0, 0, 0)
        );
    }
}

#[test]
fn a_window_gives_back_what_a_long_prompt_needed() {
    let decoder = tiny(2);
    let mut cache = Window::new(&decoder.shape(), 20).expect("a budget");
    for calls in [700, 1, 1, 600] {
        feed(&decoder, &mut cache, &tokens(1, calls)[..]);
        assert_eq!(cache.memory().keys_values, 20 * ROW);
        assert_eq!(
            cache.memory().total(),
            PIECE * (ROW + LAYERS * ENTRY),
            "one piece, after {calls}"
        );
    }
}

#[test]
fn a_residual_checkpoint_holds_its_hot_rows_and_four_bytes_a_token() {
    let decoder = tiny(2);
    let probe = probe(&decoder);
    for hot in [0, 10, 40] {
        let mut cache = residual(&decoder, hot, Floor::Tokens, &probe);
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
                    (4 * total..=8 * total + 32).contains(&ids),
                    "no slack but that of the list of ids"
                );
            }
        }
    }
}

#[test]
fn the_scratch_of_a_replay_does_not_depend_on_the_number_of_layers() {
    let decoder = tiny(2);
    let probe = probe(&decoder);
    let mut cache = residual(&decoder, 10, Floor::Tokens, &probe);
    feed(&decoder, &mut cache, &tokens(1, 300)[..]);
    feed(&decoder, &mut cache, &[1][..]);
    // 290 old rows, replayed in five chunks of 64; the rows of a layer stand in one piece.
    let rows = 5 * 64 * HIDDEN * 4;
    let layer = 2 * KV * PIECE * 4 + PIECE * ENTRY;
    let queries = 2 * 64 * 64 * 4;
    let scores = 64 * PIECE * 4 * (4 + 1);
    let stream = 2 * 64 * HIDDEN * 4;
    assert_eq!(
        cache.memory().scratch_peak,
        rows + layer + queries + scores + stream
    );
}

#[test]
fn residuals_hold_one_vector_a_token_and_layer() {
    let decoder = tiny(4);
    let probe = probe(&decoder);
    let mut cache = residual(&decoder, 10, Floor::Residuals, &probe);
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
