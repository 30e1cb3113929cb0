//! Laws of `keys_values`: what attention may read.

use std::collections::BTreeMap;

use burn::tensor::Device;

use super::{
    contract::{Contract, TIGHT},
    models::{mixed, models, ragged},
    recorder::{EntryBits, Place},
    test_run::TestRun,
};

/// In every layer and step, the entries of the step are returned once, with their positions and bits. Everything
/// returned is finite, free slots included.
///
/// # Panics
/// If the law is broken.
pub(super) fn the_newest_entries_are_readable(contract: &Contract, device: &Device) {
    let models = models(device);
    for model in models
        .iter()
        .filter(|m| contract.serves(&m.decoder.shape()))
    {
        for text in [mixed(1), ragged(3)] {
            let mut run = TestRun::new("the newest entries are readable", contract, model, TIGHT);
            for step in &text {
                run.process(step);
                let (called, layers) = (run.readings().len(), run.layers());
                run.require(
                    called == layers,
                    format_args!("{called} layers were called, expected {layers}"),
                );
                for (layer, reading) in run.readings().iter().enumerate() {
                    for (at, entry) in &reading.new {
                        run.require(
                            reading.entries.get(at) == Some(entry),
                            format_args!("layer {layer} does not return the new entry at {at:?} (sequence, KV head, position) with the bits that it received"),
                        );
                    }
                    let duplicate = reading.duplicate;
                    run.require(
                        duplicate.is_none(),
                        format_args!("layer {layer} returns {duplicate:?} (sequence, KV head, position) twice"),
                    );
                    run.require(
                        reading.finite,
                        format_args!("layer {layer} returns numbers that are not finite"),
                    );
                }
            }
        }
    }
}

/// An entry is always returned as it was stored: at its position, in its sequence and KV head, with the same bits.
/// With [rotated keys](Contract::with_rotated_keys) only the value is compared. No position without a token is
/// returned.
///
/// # Panics
/// If the law is broken.
pub(super) fn entries_are_returned_as_stored(contract: &Contract, device: &Device) {
    let models = models(device);
    for model in models
        .iter()
        .filter(|m| contract.serves(&m.decoder.shape()))
    {
        for text in [mixed(4), ragged(6)] {
            let mut run = TestRun::new("entries are returned as stored", contract, model, TIGHT);
            let mut stored: Vec<BTreeMap<Place, EntryBits>> = vec![BTreeMap::new(); run.layers()];
            for step in &text {
                run.process(step);
                for (layer, reading) in run.readings().iter().enumerate() {
                    stored[layer].extend(reading.new.clone());
                    for (at, (key, value)) in &reading.entries {
                        let same = stored[layer].get(at).is_some_and(|(k, v)| {
                            v == value && (contract.rotates_keys || k == key)
                        });
                        run.require(
                            same,
                            format_args!("layer {layer} returns at {at:?} (sequence, KV head, position) an entry that differs from the one stored there"),
                        );
                    }
                }
            }
        }
    }
}
