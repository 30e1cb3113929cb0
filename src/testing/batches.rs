//! Laws of batches: sequences and KV heads are independent of one another.

use burn::tensor::Device;

use super::{
    contract::{Contract, TIGHT},
    models::{TextStep, all_models, models, ragged, text},
    test_run::{TestRun, list},
};
use crate::cache::CacheBackend;

/// A sequence of a ragged batch has the logits and the cached positions that it has alone, also if it has no tokens
/// in some steps. Pads are never stored, returned or counted: `keys_values` of the batch is the sum over its
/// sequences alone.
///
/// # Panics
/// If the law is broken.
pub(super) fn sequences_do_not_depend_on_each_other(contract: &Contract, device: &Device) {
    let models = models(device);
    for model in models
        .iter()
        .filter(|m| contract.serves(&m.decoder.shape()))
    {
        let law = "sequences do not depend on each other";
        // A sequence that needs larger buffers, and frees them again.
        let long = text(102, 0, &[[530, 20], [1, 1], [3, 3], [1, 1]]);
        for text in [ragged(101), long] {
            together_as_alone(law, contract, model, &text);
        }
    }
}

/// Every sequence and KV head of a batch has the entries and the logits that it has alone. The law runs batches of 2
/// and of 4 sequences, and every family with 1, 2 and 4 KV heads. So some batches have as many sequences as KV heads.
///
/// # Panics
/// If the law is broken.
pub(super) fn heads_do_not_depend_on_the_batch(contract: &Contract, device: &Device) {
    let models = all_models(device);
    for model in models
        .iter()
        .filter(|m| contract.serves(&m.decoder.shape()))
    {
        let law = "heads do not depend on the batch";
        let two = text(111, 0, &[[11; 2], [3; 2], [1; 2]]);
        let four = text(112, 0, &[[11; 4], [3; 4], [1; 4]]);
        for text in [two, four] {
            together_as_alone(law, contract, model, &text);
        }
    }
}

fn together_as_alone(
    law: &'static str,
    contract: &Contract,
    model: &super::models::Model,
    text: &[TextStep],
) {
    let mut together = TestRun::new(law, contract, model, TIGHT);
    let sequences = text[0].tokens.len();
    let mut alone: Vec<TestRun<'_>> = (0..sequences)
        .map(|_| TestRun::new(law, contract, model, TIGHT))
        .collect();
    for step in text {
        let logits = together.process(step);
        for (sequence, alone) in alone.iter_mut().enumerate() {
            if step.tokens[sequence].is_empty() {
                continue;
            }
            let expected = alone.process(&step.sequence(sequence));
            let ours = vec![logits[sequence].clone()];
            let what = format!("sequence {sequence} alone");
            together.require_logits(&ours, &expected, &what);
            for (layer, reading) in together.readings().iter().enumerate() {
                let ours = reading
                    .entries
                    .range((sequence, 0, 0)..(sequence + 1, 0, 0));
                let ours = ours.map(|((_, head, position), entry)| ((0, *head, *position), entry));
                let theirs = alone.readings()[layer].entries.iter();
                together.require(
                    ours.eq(theirs.map(|(place, entry)| (*place, entry))),
                    format_args!("the entries of sequence {sequence} returned at layer {layer} differ from those it has alone"),
                );
            }
        }
        for layer in 0..together.layers() {
            let cached = together.cached(layer);
            for (sequence, alone) in alone.iter().enumerate() {
                let expected = alone.cached(layer);
                for head in 0..together.shape().kernels.kv_heads {
                    let ours = list(&cached, sequence, head);
                    let theirs = list(&expected, 0, head);
                    together.require(
                        ours == theirs,
                        format_args!("layer {layer}, sequence {sequence}: the cached positions are {ours:?}, expected {theirs:?} as alone"),
                    );
                }
            }
        }
    }
    // A sliding-window layer holds the entries of the last step. In a batch, a sequence may have no tokens in that
    // step, and then holds fewer entries than alone.
    if together.shape().windows.iter().all(Option::is_none) {
        let sum: usize = alone.iter().map(|run| run.cache.memory().keys_values).sum();
        let found = together.cache.memory().keys_values;
        together.require(
            found == sum,
            format_args!("{found} bytes of keys and values are held, expected {sum}, the sum over the sequences alone"),
        );
    }
}
