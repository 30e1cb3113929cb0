//! Laws of the answer: what attention is given to read.

use std::collections::BTreeMap;

use burn::tensor::Device;

use super::{
    contract::{Contract, TIGHT},
    models::{mixed, models, ragged},
    recorder::{Place, Row},
    test_run::TestRun,
};

/// In every layer and call the rows just given are in the answer, once, with their positions and their
/// bits. All that the answer stores is finite, free slots too.
///
/// # Panics
/// If the law is broken.
pub fn the_newest_rows_are_readable(contract: &Contract, device: &Device) {
    let models = models(device);
    for model in models
        .iter()
        .filter(|m| contract.serves(&m.decoder.shape()))
    {
        for text in [mixed(1), ragged(3)] {
            let mut run = TestRun::new("the newest rows are readable", contract, model, TIGHT);
            for call in &text {
                run.feed(call);
                run.require(
                    run.shown().len() == run.layers(),
                    "not every layer was asked",
                );
                for (layer, shown) in run.shown().iter().enumerate() {
                    for (at, row) in &shown.given {
                        run.require(
                            shown.rows.get(at) == Some(row),
                            format_args!("layer {layer} does not show the new row {at:?} (batch row, KV head, position) as it came in"),
                        );
                    }
                    let twice = shown.twice;
                    run.require(
                        twice.is_none(),
                        format_args!("layer {layer} shows {twice:?} twice"),
                    );
                    run.require(
                        shown.finite,
                        format_args!("layer {layer} stores what is not finite"),
                    );
                }
            }
        }
    }
}

/// A row that is shown again is the row that came in at its position, in that batch row and KV head, to
/// the bit; of [turned keys](Contract::with_turned_keys) only the value is compared. No answer shows a
/// position that no token has yet.
///
/// # Panics
/// If the law is broken.
pub fn rows_are_shown_as_they_came_in(contract: &Contract, device: &Device) {
    let models = models(device);
    for model in models
        .iter()
        .filter(|m| contract.serves(&m.decoder.shape()))
    {
        for text in [mixed(4), ragged(6)] {
            let mut run = TestRun::new("rows are shown as they came in", contract, model, TIGHT);
            let mut came: Vec<BTreeMap<Place, Row>> = vec![BTreeMap::new(); run.layers()];
            for call in &text {
                run.feed(call);
                for (layer, shown) in run.shown().iter().enumerate() {
                    came[layer].extend(shown.given.clone());
                    for (at, (key, value)) in &shown.rows {
                        let same = came[layer]
                            .get(at)
                            .is_some_and(|(k, v)| v == value && (contract.turns_keys || k == key));
                        run.require(
                            same,
                            format_args!("layer {layer} shows at {at:?} (batch row, KV head, position) what never came in there"),
                        );
                    }
                }
            }
        }
    }
}
