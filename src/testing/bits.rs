//! Laws of bits: the oracle's, and one's own.

use burn::tensor::Device;

use super::{
    contract::{AMPLE, Contract, TIGHT},
    models::{Call, all_models, chunked, models, ragged, text},
    test_run::{Logits, TestRun},
};

/// With a budget that no text exceeds, every logit and every row shown has the bits of
/// [`FullKv`](crate::cache::FullKv), in every family with 1, 2 and 4 KV heads, for a whole text, chunks
/// and ragged batches. A lossless backend has them with any budget.
///
/// # Panics
/// If the law is broken.
pub fn an_ample_budget_equals_full_kv(contract: &Contract, device: &Device) {
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
                let law = "an ample budget equals FullKv";
                let mut ours = TestRun::new(law, contract, model, budget);
                let mut oracle = TestRun::oracle(law, model);
                for call in &text {
                    let expected = oracle.feed(call);
                    let found = ours.feed(call);
                    ours.require_same(&found, &oracle, &expected, "FullKv");
                }
            }
        }
    }
}

/// The same calls give the same bits again. In a lossless backend a token has the same logits however the
/// text is split into calls.
///
/// # Panics
/// If the law is broken.
pub fn bits_repeat(contract: &Contract, device: &Device) {
    let models = models(device);
    let law = "bits repeat";
    for model in models
        .iter()
        .filter(|m| contract.serves(&m.decoder.shape()))
    {
        for text in [chunked(52), ragged(53)] {
            let mut one = TestRun::new(law, contract, model, TIGHT);
            let mut two = TestRun::new(law, contract, model, TIGHT);
            for call in &text {
                let (found, again) = (one.feed(call), two.feed(call));
                two.require_same(&again, &one, &found, "the same calls gave before");
            }
        }
        if contract.lossless {
            let whole = text(54, 0, &[[36]]);
            let mut cache = TestRun::new(law, contract, model, TIGHT);
            let expected = cache.feed(&whole[0]);
            for size in [2, 17] {
                let mut cache = TestRun::new(law, contract, model, TIGHT);
                let calls = whole[0].rows[0].chunks(size).map(|chunk| Call {
                    rows: vec![chunk.to_vec()],
                    more_follows: false,
                });
                let calls: Vec<Call> = calls.collect();
                let found = joined(cache.feed_all(&calls));
                cache.require(
                    found == expected,
                    format_args!("calls of {size} give other logits than one call"),
                );
            }
        }
    }
}

/// Logits of several calls as those of one.
pub(super) fn joined(calls: Vec<Logits>) -> Logits {
    let mut rows: Logits = Vec::new();
    for call in calls {
        rows.resize(call.len(), Vec::new());
        rows.iter_mut()
            .zip(call)
            .for_each(|(row, more)| row.extend(more));
    }
    rows
}
