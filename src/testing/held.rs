//! Laws of the entries held between steps.

use burn::tensor::Device;

use super::{
    contract::{Contract, TIGHT},
    memory::{entry_bytes, window_entries},
    models::{chunked, mixed, models, ragged, text},
    test_run::{TestRun, list},
};
use crate::cache::CacheBackend;

/// `cached` returns positions that rise strictly and are below the sequence's length. It returns one list for all KV
/// heads or one for each, and none for a layer that does not exist.
///
/// Each position was readable in the step before. The next step reads exactly these positions and its own. A
/// sliding-window layer caches its window, a lossless backend every position. `lengths` counts the processed tokens.
///
/// # Panics
/// If the law is broken.
pub(super) fn cached_is_what_the_next_step_reads(contract: &Contract, device: &Device) {
    let models = models(device);
    for model in models
        .iter()
        .filter(|m| contract.serves(&m.decoder.shape()))
    {
        for text in [mixed(11), chunked(12), ragged(13)] {
            let law = "cached is what the next step reads";
            let mut run = TestRun::new(law, contract, model, TIGHT);
            for step in &text {
                let before: Vec<_> = (0..run.layers()).map(|layer| run.cached(layer)).collect();
                let starts = run.lengths.clone();
                run.process(step);
                check(&run, contract);
                if starts.is_empty() {
                    continue;
                }
                for (layer, (cached, reading)) in before.iter().zip(run.readings()).enumerate() {
                    for (sequence, &start) in starts.iter().enumerate() {
                        for head in 0..run.shape().kernels.kv_heads {
                            let old = reading
                                .entries
                                .range((sequence, head, 0)..(sequence, head, start));
                            let old: Vec<usize> =
                                old.map(|((.., position), _)| *position).collect();
                            let cached = list(cached, sequence, head);
                            run.require(
                                old == cached,
                                format_args!("layer {layer}, sequence {sequence}, KV head {head}: the step reads the old positions {old:?}, expected the cached ones {cached:?}"),
                            );
                        }
                    }
                }
            }
        }
    }
}

/// What must hold for `lengths` and `cached` after a step.
fn check(run: &TestRun<'_>, contract: &Contract) {
    let shape = run.shape();
    let kv_heads = shape.kernels.kv_heads;
    let found = run.cache.lengths();
    run.require(
        found == run.lengths,
        format_args!("the lengths are {found:?}, expected {:?}", run.lengths),
    );
    run.require(
        run.cached(shape.layers()).sequences() == 0,
        "a layer that does not exist caches positions",
    );
    for (layer, reading) in run.readings().iter().enumerate() {
        let cached = run.cached(layer);
        let at = |sequence| format!("layer {layer}, sequence {sequence}");
        let (found, expected) = (cached.sequences(), run.lengths.len());
        run.require(
            found == expected,
            format_args!("layer {layer} caches {found} sequences, expected {expected}"),
        );
        for (sequence, &length) in run.lengths.iter().enumerate() {
            let lists = cached.sequence(sequence);
            run.require(
                lists.len() == 1 || lists.len() == kv_heads,
                format_args!(
                    "{}: there are {} lists of cached positions, expected 1 or {kv_heads}",
                    at(sequence),
                    lists.len()
                ),
            );
            for head in 0..kv_heads {
                let list = list(&cached, sequence, head);
                run.require(
                    list.is_sorted_by(|a, b| a < b),
                    format_args!(
                        "{}: the cached positions {list:?} do not rise strictly",
                        at(sequence)
                    ),
                );
                run.require(
                    list.last().is_none_or(|&last| last < length),
                    format_args!(
                        "{}: the cached positions {list:?} are not below the length {length}",
                        at(sequence)
                    ),
                );
                let unread = |position: &&usize| {
                    let place = (sequence, head, **position);
                    !reading.entries.contains_key(&place)
                };
                let unread = list.iter().find(unread);
                run.require(
                    unread.is_none(),
                    format_args!(
                        "{}: {unread:?} is cached, but the step did not read it",
                        at(sequence)
                    ),
                );
                let from = match shape.windows[layer] {
                    Some(window) => (length + 1).saturating_sub(window.get()),
                    None if contract.lossless => 0,
                    None => continue,
                };
                run.require(
                    list.iter().copied().eq(from..length),
                    format_args!(
                        "{}: the cached positions are {list:?}, expected {from}..{length}",
                        at(sequence)
                    ),
                );
            }
        }
    }
}

/// After each step, every KV head of a full-attention layer holds no more entries than the budget. The bytes in
/// `keys_values` are no more than those of as many entries. A sliding-window layer holds its window and the last
/// step.
///
/// This holds for a prompt of several hundred tokens, for single tokens and for chunks. In models without sliding
/// windows, the bytes held do not grow from step to step as long as the budget does not grow.
///
/// # Panics
/// If the law is broken.
pub(super) fn the_budget_holds_after_each_step(contract: &Contract, device: &Device) {
    let models = models(device);
    let long = text(23, 0, &[[530], [1], [1], [20], [1], [1]]);
    // The prompt of the first sequence ends before that of the second.
    let open = text(24, 1, &[[13, 12], [0, 5], [1, 1]]);
    for model in models
        .iter()
        .filter(|m| contract.serves(&m.decoder.shape()))
    {
        for text in [&long, &chunked(22), &ragged(23), &open] {
            let law = "the budget holds after each step";
            let mut run = TestRun::new(law, contract, model, TIGHT);
            let (mut last, mut grew) = ((Vec::new(), usize::MAX), false);
            for step in text {
                let before = run.lengths.clone();
                run.process(step);
                let most = most(&run, contract);
                within(&run, contract, &most, &before, &step.lengths());
                let steady = most.len() == 1
                    && run.shape().windows.iter().all(Option::is_none)
                    && most == last.0;
                let total = run.cache.memory().total();
                let grows = steady && !contract.lossless && total > last.1;
                run.require(
                    !(grows && grew),
                    format_args!(
                        "{total} bytes are held, expected at most {} as before: they grew in two steps in a row",
                        last.1
                    ),
                );
                grew = grows;
                last = (most, total);
            }
        }
    }
}

/// The most entries that each sequence may hold in a full-attention layer.
fn most(run: &TestRun<'_>, contract: &Contract) -> Vec<usize> {
    let sequences = run.lengths.iter().zip(&run.prompts);
    sequences
        .map(|(&length, &prompt)| contract.most_entries(TIGHT, prompt, length))
        .collect()
}

fn within(run: &TestRun<'_>, contract: &Contract, most: &[usize], before: &[usize], new: &[usize]) {
    let shape = run.shape();
    let mut bytes = 0;
    for (layer, window) in shape.windows.iter().enumerate() {
        for (sequence, &most) in most.iter().enumerate() {
            let Some(window) = window else {
                bytes += most * shape.kernels.kv_heads * entry_bytes(&shape);
                for head in 0..shape.kernels.kv_heads {
                    let cached = run.cached(layer);
                    let entries = list(&cached, sequence, head).len();
                    run.require(
                        contract.rebuilds || entries <= most,
                        format_args!("layer {layer}, sequence {sequence}: {entries} entries are cached, expected at most the budget of {most}"),
                    );
                }
                continue;
            };
            let before = before.get(sequence).copied().unwrap_or(0);
            let entries = window_entries(*window, before, new[sequence]);
            bytes += entries * shape.kernels.kv_heads * entry_bytes(&shape);
        }
    }
    let found = run.cache.memory().keys_values;
    run.require(
        found <= bytes,
        format_args!("{found} bytes of keys and values are held, expected at most {bytes}"),
    );
}
