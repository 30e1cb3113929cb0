//! Laws of what is kept between steps.

use burn::tensor::Device;

use super::{
    contract::{Contract, TIGHT},
    memory::{row_bytes, window_rows},
    models::{chunked, mixed, models, ragged, text},
    test_run::{TestRun, list},
};
use crate::cache::CacheBackend;

/// What `kept` answers are positions: rising strictly, below the row's `position`, one list for all KV
/// heads or one for each, none where there is no layer. Each was shown in the step before, and the next
/// step shows exactly those beside its own rows. A layer with a window keeps what the window shows, and
/// a lossless backend every row. `position` counts the tokens fed.
///
/// # Panics
/// If the law is broken.
pub fn kept_is_what_the_next_call_reads(contract: &Contract, device: &Device) {
    let models = models(device);
    for model in models
        .iter()
        .filter(|m| contract.serves(&m.decoder.shape()))
    {
        for text in [mixed(11), chunked(12), ragged(13)] {
            let mut run = TestRun::new("kept is what the next call reads", contract, model, TIGHT);
            for call in &text {
                let before: Vec<_> = (0..run.layers()).map(|layer| run.cached(layer)).collect();
                let starts = run.lengths.clone();
                run.feed(call);
                check(&run, contract);
                if starts.is_empty() {
                    continue;
                }
                for (layer, (kept, shown)) in before.iter().zip(run.shown()).enumerate() {
                    for (row, &start) in starts.iter().enumerate() {
                        for head in 0..run.shape().kernels.kv_heads {
                            let old = shown.rows.range((row, head, 0)..(row, head, start));
                            let old: Vec<usize> =
                                old.map(|((.., position), _)| *position).collect();
                            let kept = list(kept, row, head);
                            run.require(
                                old == kept,
                                format_args!("layer {layer}, row {row}, KV head {head}: kept was {kept:?}, shown is {old:?}"),
                            );
                        }
                    }
                }
            }
        }
    }
}

/// What can be said of `kept` after a step.
fn check(run: &TestRun<'_>, contract: &Contract) {
    let shape = run.shape();
    let kv_heads = shape.kernels.kv_heads;
    let found = run.cache.lengths();
    run.require(
        found == run.lengths,
        format_args!("the lengths are {found:?}, not {:?}", run.lengths),
    );
    run.require(
        run.cached(shape.layers()).sequences() == 0,
        "a layer that does not exist caches positions",
    );
    for (layer, shown) in run.shown().iter().enumerate() {
        let kept = run.cached(layer);
        let at = |row| format!("layer {layer}, row {row}");
        run.require(
            kept.sequences() == run.lengths.len(),
            format_args!("layer {layer} keeps {} batch rows", kept.sequences()),
        );
        for (row, &length) in run.lengths.iter().enumerate() {
            let lists = kept.sequence(row);
            run.require(
                lists.len() == 1 || lists.len() == kv_heads,
                format_args!("{}: {} lists for {kv_heads} KV heads", at(row), lists.len()),
            );
            for head in 0..kv_heads {
                let list = list(&kept, row, head);
                run.require(
                    list.is_sorted_by(|a, b| a < b),
                    format_args!("{}: {list:?} does not rise strictly", at(row)),
                );
                run.require(
                    list.last().is_none_or(|&last| last < length),
                    format_args!("{}: {list:?} has positions no token has", at(row)),
                );
                let readable = |position: &&usize| {
                    let place = (row, head, **position);
                    !shown.rows.contains_key(&place)
                };
                let unread = list.iter().find(readable);
                run.require(
                    unread.is_none(),
                    format_args!("{}: {unread:?} is kept and was not shown", at(row)),
                );
                let from = match shape.windows[layer] {
                    Some(window) => (length + 1).saturating_sub(window.get()),
                    None if contract.lossless => 0,
                    None => continue,
                };
                run.require(
                    list.iter().copied().eq(from..length),
                    format_args!("{}: {list:?} is not all from {from} on", at(row)),
                );
            }
        }
    }
}

/// Once a step is over the rows kept in a layer that shows all keys are no more than the budget, in every
/// KV head, and so are the rows that `keys_values` stands for; a layer with a window holds its window and
/// the last call. That holds for a prompt of several hundred rows, for single tokens and for chunks. As
/// long as the budget does not grow, what is held does not grow from step to step in models without
/// windows.
///
/// # Panics
/// If the law is broken.
pub fn the_budget_holds_once_a_step_is_over(contract: &Contract, device: &Device) {
    let models = models(device);
    let long = text(23, 0, &[[530], [1], [1], [20], [1], [1]]);
    // The first row's prompt ends before the second's.
    let open = text(24, 1, &[[13, 12], [0, 5], [1, 1]]);
    for model in models
        .iter()
        .filter(|m| contract.serves(&m.decoder.shape()))
    {
        for text in [&long, &chunked(22), &ragged(23), &open] {
            let law = "the budget holds once a step is over";
            let mut run = TestRun::new(law, contract, model, TIGHT);
            let (mut last, mut grew) = ((Vec::new(), usize::MAX), false);
            for call in text {
                let before = run.lengths.clone();
                run.feed(call);
                let most = most(&run, contract);
                within(&run, contract, &most, &before, &call.lengths());
                let steady = most.len() == 1
                    && run.shape().windows.iter().all(Option::is_none)
                    && most == last.0;
                let total = run.cache.memory().total();
                let grows = steady && !contract.lossless && total > last.1;
                run.require(
                    !(grows && grew),
                    format_args!("{total} bytes are held, more than before, step after step"),
                );
                grew = grows;
                last = (most, total);
            }
        }
    }
}

/// Rows that each batch row may hold in a layer that shows all keys.
fn most(run: &TestRun<'_>, contract: &Contract) -> Vec<usize> {
    let rows = run.lengths.iter().zip(&run.prompts);
    rows.map(|(&length, &prompt)| contract.rows(TIGHT, prompt, length))
        .collect()
}

fn within(
    run: &TestRun<'_>,
    contract: &Contract,
    most: &[usize],
    before: &[usize],
    call: &[usize],
) {
    let shape = run.shape();
    let mut bytes = 0;
    for (layer, window) in shape.windows.iter().enumerate() {
        for (row, &most) in most.iter().enumerate() {
            let Some(window) = window else {
                bytes += most * shape.kernels.kv_heads * row_bytes(&shape);
                for head in 0..shape.kernels.kv_heads {
                    let kept = run.cached(layer);
                    let rows = list(&kept, row, head).len();
                    run.require(
                        contract.rebuilds || rows <= most,
                        format_args!(
                            "layer {layer}, row {row} keeps {rows} rows, the budget is {most}"
                        ),
                    );
                }
                continue;
            };
            let before = before.get(row).copied().unwrap_or(0);
            let rows = window_rows(*window, before, call[row]);
            bytes += rows * shape.kernels.kv_heads * row_bytes(&shape);
        }
    }
    let found = run.cache.memory().keys_values;
    run.require(
        found <= bytes,
        format_args!("{found} bytes of keys and values are held, the budget is {bytes}"),
    );
}
