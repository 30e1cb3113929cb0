//! The law of memory reports.

use std::num::NonZeroUsize;

use burn::tensor::Device;

use super::{
    contract::{Contract, TIGHT},
    models::{chunked, mixed, models, ragged, text},
    test_run::{TestRun, list},
};
use crate::{
    cache::{CacheBackend, ModelShape},
    exact::PANEL,
    memory::MemoryReport,
};

/// The report states what is held, as far as that is visible from outside:
/// * `keys_values` is the bytes of the cached entries in full-attention layers. In a sliding-window layer it is the
///   bytes of its window and at most those of the last step on top. Neither applies to [rebuilt
///   entries](Contract::with_rebuilt_entries).
/// * `total` and `scratch_peak` together cover the keys and values returned at any layer, apart from those of the
///   step itself, which count as whole panels.
/// * A batch of two equal sequences holds twice the `keys_values` of one.
/// * A new cache and a cleared one hold nothing, in any part.
///
/// No law can detect unreported memory other than cached entries and returned tensors.
///
/// # Panics
/// If the law is broken.
pub(super) fn memory_is_what_is_held(contract: &Contract, device: &Device) {
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
            let report = run.cache.memory();
            run.require(
                report == empty,
                format_args!("a new cache reports {report:?}, expected nothing"),
            );
            for step in text {
                let before = run.lengths.clone();
                run.process(step);
                if !contract.rebuilds {
                    entries_are_counted(&run, &before, &step.lengths());
                }
                readings_are_counted(&run, &step.lengths());
            }
            run.cache.clear();
            let report = run.cache.memory();
            run.require(
                report == empty,
                format_args!("a cleared cache reports {report:?}, expected nothing"),
            );
        }
        let mut one = TestRun::new(law, contract, model, TIGHT);
        let mut two = TestRun::new(law, contract, model, TIGHT);
        for step in mixed(34) {
            let mut twice = step.clone();
            twice.tokens.push(step.tokens[0].clone());
            one.process(&step);
            two.process(&twice);
            let [one, found] = [&one, &two].map(|run| run.cache.memory().keys_values);
            two.require(
                found == 2 * one,
                format_args!("two equal sequences hold {found} bytes of keys and values, expected twice the {one} of a single one"),
            );
        }
    }
}

/// Bytes of an entry in one KV head: a key and a value.
pub(super) fn entry_bytes(shape: &ModelShape) -> usize {
    2 * shape.kernels.head_dim * shape.cache_dtype.size()
}

/// The most entries of a sliding-window layer after a step: those that its first query saw, and the new ones.
pub(super) fn window_entries(window: NonZeroUsize, before: usize, new: usize) -> usize {
    before.min(window.get() - 1) + new
}

fn entries_are_counted(run: &TestRun<'_>, before: &[usize], new: &[usize]) {
    let shape = run.shape();
    let (mut least, mut most) = (0, 0);
    for (layer, window) in shape.windows.iter().enumerate() {
        let cached = run.cached(layer);
        for (sequence, &new) in new.iter().enumerate() {
            for head in 0..shape.kernels.kv_heads {
                let entries = list(&cached, sequence, head).len();
                least += entries;
                most += window.map_or(entries, |window| {
                    let before = before.get(sequence).copied().unwrap_or(0);
                    window_entries(window, before, new)
                });
            }
        }
    }
    let expected = least * entry_bytes(&shape)..=most * entry_bytes(&shape);
    let found = run.cache.memory().keys_values;
    run.require(
        expected.contains(&found),
        format_args!(
            "{found} bytes of keys and values are reported, expected {expected:?} for the cached entries"
        ),
    );
}

fn readings_are_counted(run: &TestRun<'_>, new: &[usize]) {
    let shape = run.shape();
    let panels = |&new: &usize| new.next_multiple_of(PANEL);
    let slots: usize = new.iter().map(panels).sum();
    let own = slots * shape.kernels.kv_heads * entry_bytes(&shape);
    let report = run.cache.memory();
    let counted = report.total() + report.scratch_peak + own;
    for (layer, reading) in run.readings().iter().enumerate() {
        let bytes = reading.bytes;
        run.require(
            bytes <= counted,
            format_args!("layer {layer} returns {bytes} bytes, expected at most {counted}: those reported, and those of the step itself"),
        );
    }
}
