//! Laws of bits: equal to those of the reference, and repeatable.

use burn::tensor::Device;

use super::{
    contract::{AMPLE, Contract, TIGHT},
    models::{Model, TextStep, all_models, chunked, models, ragged, text, wide_windows},
    test_run::{Logits, TestRun},
};

/// With a budget that no text exceeds, all logits and all returned entries have the bits of
/// [`FullKv`](crate::FullKv). A lossless backend has them with any budget. The law runs every family with 1, 2 and 4
/// KV heads, for a whole text, chunks and ragged batches. In a sliding window of 40 tokens, which texts exceed by far,
/// bits are equal only if entries stay at the slots of their positions: sums run over slots.
///
/// # Panics
/// If the law is broken.
pub(super) fn an_ample_budget_equals_full_kv(contract: &Contract, device: &Device) {
    let models = all_models(device);
    let budgets: &[usize] = if contract.lossless {
        &[AMPLE, TIGHT]
    } else {
        &[AMPLE]
    };
    for model in models
        .iter()
        .filter(|m| contract.serves(&m.decoder.shape()))
    {
        for text in [text(41, 0, &[[40], [1]]), chunked(43), ragged(44)] {
            for &budget in budgets {
                equals_full_kv(contract, model, budget, &text);
            }
        }
    }
    let model = wide_windows(device);
    if contract.serves(&model.decoder.shape()) {
        let mut beyond = vec![[1]; 75];
        (beyond[0], beyond[72]) = ([45], [9]);
        for text in [text(46, 0, &beyond), text(47, 0, &[[290], [1], [1]])] {
            equals_full_kv(contract, &model, AMPLE, &text);
        }
    }
}

fn equals_full_kv(contract: &Contract, model: &Model, budget: usize, text: &[TextStep]) {
    let law = "an ample budget equals FullKv";
    let mut ours = TestRun::new(law, contract, model, budget);
    let mut reference = TestRun::reference(law, model);
    for step in text {
        let expected = reference.process(step);
        let found = ours.process(step);
        ours.require_same(&found, &reference, &expected, "FullKv");
    }
}

/// The same steps give the same bits again. In a lossless backend, a token has the same logits however the text is
/// split into steps.
///
/// # Panics
/// If the law is broken.
pub(super) fn bits_repeat(contract: &Contract, device: &Device) {
    let models = models(device);
    let law = "bits repeat";
    for model in models
        .iter()
        .filter(|m| contract.serves(&m.decoder.shape()))
    {
        for text in [chunked(52), ragged(53)] {
            let mut one = TestRun::new(law, contract, model, TIGHT);
            let mut two = TestRun::new(law, contract, model, TIGHT);
            for step in &text {
                let (found, again) = (one.process(step), two.process(step));
                two.require_same(&again, &one, &found, "the first run of the same steps");
            }
        }
        if contract.lossless {
            let whole = text(54, 0, &[[36]]);
            let mut cache = TestRun::new(law, contract, model, TIGHT);
            let expected = cache.process(&whole[0]);
            for size in [2, 17] {
                let mut cache = TestRun::new(law, contract, model, TIGHT);
                let steps = whole[0].tokens[0].chunks(size).map(|chunk| TextStep {
                    tokens: vec![chunk.to_vec()],
                    more_follows: false,
                });
                let steps: Vec<TextStep> = steps.collect();
                let found = joined(cache.process_all(&steps));
                let what = format!("one step, with steps of {size} tokens");
                cache.require_logits(&found, &expected, &what);
            }
        }
    }
}

/// The logits of several steps as those of one.
pub(super) fn joined(steps: Vec<Logits>) -> Logits {
    let mut joined: Logits = Vec::new();
    for step in steps {
        joined.resize(step.len(), Vec::new());
        joined
            .iter_mut()
            .zip(step)
            .for_each(|(sequence, more)| sequence.extend(more));
    }
    joined
}
