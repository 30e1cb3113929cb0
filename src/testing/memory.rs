//! The law of what a report says.

use std::num::NonZeroUsize;

use burn::tensor::Device;

use super::{
    contract::{Contract, TIGHT},
    models::{chunked, mixed, models, ragged, text},
    test_run::{TestRun, list},
};
use crate::{
    cache::{CacheBackend, ModelShape},
    exact::KV_BLOCK,
    memory::MemoryReport,
};

/// The report says what is held, as far as that can be seen from outside:
/// * `keys_values` is the rows kept times the bytes of a row in layers that show all keys; in a layer
///   with a window those of its window and at most of the last call on top. Not so for
///   [rebuilt rows](Contract::with_rebuilt_rows);
/// * `total` and `scratch_peak` together cover every answer that is larger than the call itself, rounded
///   up to whole pieces;
/// * a batch of two equal rows holds twice the `keys_values` of one;
/// * a new cache and a cleared one hold nothing, in any part.
///
/// What a backend holds beside its rows and answers, and does not report, no law can see.
///
/// # Panics
/// If the law is broken.
pub fn memory_is_what_is_held(contract: &Contract, device: &Device) {
    let models = models(device);
    let law = "memory is what is held";
    for model in models
        .iter()
        .filter(|m| contract.serves(&m.decoder.shape()))
    {
        let long = text(33, 0, &[[530], [1], [3]]);
        for text in [&long, &chunked(32), &ragged(33)] {
            let mut run = TestRun::new(law, contract, model, TIGHT);
            let empty = MemoryReport::default();
            run.require(run.cache.memory() == empty, "a new cache holds something");
            for call in text {
                let before = run.lengths.clone();
                run.feed(call);
                if !contract.rebuilds {
                    rows_are_counted(&run, &before, &call.lengths());
                }
                answers_are_counted(&run, &call.lengths());
            }
            run.cache.clear();
            let report = run.cache.memory();
            run.require(
                report == empty,
                format_args!("a cleared cache holds {report:?}"),
            );
        }
        let mut one = TestRun::new(law, contract, model, TIGHT);
        let mut two = TestRun::new(law, contract, model, TIGHT);
        for call in mixed(34) {
            let mut twice = call.clone();
            twice.rows.push(call.rows[0].clone());
            one.feed(&call);
            two.feed(&twice);
            let [one, found] = [&one, &two].map(|run| run.cache.memory().keys_values);
            two.require(
                found == 2 * one,
                format_args!(
                    "two equal rows hold {found} bytes of keys and values, one holds {one}"
                ),
            );
        }
    }
}

/// Bytes of a key and a value of one KV head.
pub(super) fn row_bytes(shape: &ModelShape) -> usize {
    2 * shape.kernels.head_dim * shape.dtype.size()
}

/// Rows that a layer with a window may hold after a call: what its first query saw, and its own.
pub(super) fn window_rows(window: NonZeroUsize, before: usize, call: usize) -> usize {
    before.min(window.get() - 1) + call
}

fn rows_are_counted(run: &TestRun<'_>, before: &[usize], call: &[usize]) {
    let shape = run.shape();
    let (mut least, mut most) = (0, 0);
    for (layer, window) in shape.windows.iter().enumerate() {
        let kept = run.cached(layer);
        for (row, &new) in call.iter().enumerate() {
            for head in 0..shape.kernels.kv_heads {
                let rows = list(&kept, row, head).len();
                least += rows;
                most += window.map_or(rows, |window| {
                    let before = before.get(row).copied().unwrap_or(0);
                    window_rows(window, before, new)
                });
            }
        }
    }
    let expected = least * row_bytes(&shape)..=most * row_bytes(&shape);
    let found = run.cache.memory().keys_values;
    run.require(
        expected.contains(&found),
        format_args!("{found} bytes of keys and values are reported, {expected:?} are kept"),
    );
}

fn answers_are_counted(run: &TestRun<'_>, call: &[usize]) {
    let shape = run.shape();
    let longest = call.iter().copied().max().unwrap_or(0);
    let slots = longest.next_multiple_of(KV_BLOCK) * call.len();
    let own = slots * shape.kernels.kv_heads * row_bytes(&shape);
    let report = run.cache.memory();
    let counted = report.total() + report.scratch_peak + own;
    for (layer, shown) in run.shown().iter().enumerate() {
        let bytes = shown.bytes;
        run.require(
            bytes <= counted,
            format_args!("layer {layer} answered {bytes} bytes, {counted} are reported, the call's own included"),
        );
    }
}
