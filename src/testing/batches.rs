//! Laws of batches: rows and KV heads keep to themselves.

use burn::tensor::Device;

use super::{
    contract::{Contract, TIGHT},
    models::{Call, all_models, models, ragged, text},
    test_run::{TestRun, list},
};
use crate::cache::CacheBackend;

/// A row of a ragged batch has the logits and keeps the positions it has alone, also when it brings
/// nothing in some calls. Pads are never kept, shown or counted: `keys_values` of the batch is that of
/// its rows alone.
///
/// # Panics
/// If the law is broken.
pub fn rows_do_not_depend_on_their_neighbours(contract: &Contract, device: &Device) {
    let models = models(device);
    for model in models
        .iter()
        .filter(|m| contract.serves(&m.decoder.shape()))
    {
        let law = "rows do not depend on their neighbours";
        // A neighbour that needs larger buffers, and gives them back.
        let long = text(102, 0, &[[530, 20], [1, 1], [3, 3], [1, 1]]);
        for text in [ragged(101), long] {
            alone_or_not(law, contract, model, &text);
        }
    }
}

/// Batches of 2 and of 4 rows, as many as KV heads among them: each row and KV head is shown
/// the rows it is shown alone, and has the same logits. Every family, with 1, 2 and 4 KV heads.
///
/// # Panics
/// If the law is broken.
pub fn heads_do_not_depend_on_the_batch(contract: &Contract, device: &Device) {
    let models = all_models(device);
    for model in models
        .iter()
        .filter(|m| contract.serves(&m.decoder.shape()))
    {
        let law = "heads do not depend on the batch";
        let two = text(111, 0, &[[11; 2], [3; 2], [1; 2]]);
        let four = text(112, 0, &[[11; 4], [3; 4], [1; 4]]);
        for text in [two, four] {
            alone_or_not(law, contract, model, &text);
        }
    }
}

fn alone_or_not(
    law: &'static str,
    contract: &Contract,
    model: &super::models::Model,
    text: &[Call],
) {
    let mut together = TestRun::new(law, contract, model, TIGHT);
    let rows = text[0].rows.len();
    let mut alone: Vec<TestRun<'_>> = (0..rows)
        .map(|_| TestRun::new(law, contract, model, TIGHT))
        .collect();
    for call in text {
        let logits = together.feed(call);
        for (row, alone) in alone.iter_mut().enumerate() {
            if call.rows[row].is_empty() {
                continue;
            }
            let expected = alone.feed(&call.row(row));
            together.require(
                logits[row] == expected[0],
                format_args!("row {row} has other logits than alone"),
            );
            for (layer, shown) in together.shown().iter().enumerate() {
                let ours = shown.rows.range((row, 0, 0)..(row + 1, 0, 0));
                let ours = ours.map(|((_, head, position), row)| ((0, *head, *position), row));
                let theirs = alone.shown()[layer].rows.iter();
                together.require(
                    ours.eq(theirs.map(|(place, row)| (*place, row))),
                    format_args!("layer {layer} shows row {row} other rows than alone"),
                );
            }
        }
        for layer in 0..together.layers() {
            let kept = together.cached(layer);
            for (row, alone) in alone.iter().enumerate() {
                for head in 0..together.shape().kernels.kv_heads {
                    let (ours, theirs) = (list(&kept, row, head).to_vec(), alone.cached(layer));
                    let theirs = list(&theirs, 0, head);
                    together.require(
                        ours == theirs,
                        format_args!("layer {layer}, row {row} keeps {ours:?}, alone {theirs:?}"),
                    );
                }
            }
        }
    }
    // A layer with a window may hold more of a silent row's last call alone: it brought none since.
    if together.shape().windows.iter().all(Option::is_none) {
        let sum: usize = alone.iter().map(|run| run.cache.memory().keys_values).sum();
        let found = together.cache.memory().keys_values;
        together.require(
            found == sum,
            format_args!("{found} bytes of keys and values are held, {sum} by rows alone"),
        );
    }
}
