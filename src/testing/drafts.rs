//! Laws of drafts: taken back they never were, accepted they came in one call.

use burn::tensor::Device;

use super::{
    contract::{Contract, TIGHT},
    models::{Call, Model, chunked, mixed, models, ragged, text},
    test_run::{TestRun, list},
};
use crate::cache::{CacheBackend, CacheError, Draft};

/// While a draft is open nothing is dropped, and whatever comes in it, [`restore`](CacheBackend::restore)
/// takes back: the cache stands and goes on, call after call, as one to which the draft never came. That
/// holds before the first call, within a prompt and behind it, for rows of different lengths, and after a
/// truncation within the draft. Restoring or accepting without a draft is refused, and so is a draft in a
/// draft.
///
/// # Panics
/// If the law is broken.
pub fn a_draft_taken_back_never_was(contract: &Contract, device: &Device) {
    let law = "a draft taken back never was";
    each(contract, device, |model, text, at| {
        let mut run = TestRun::new(law, contract, model, TIGHT);
        let mut reference = TestRun::new(law, contract, model, TIGHT);
        for refused in [
            run.cache.end_draft(Draft::Discard),
            run.cache.end_draft(Draft::Accept),
        ] {
            let right = matches!(refused, Err(CacheError::NoDraft));
            run.require(right, "there was no draft to end");
        }
        run.feed_all(&text[..at]);
        reference.feed_all(&text[..at]);
        for cut in [false, true] {
            let before = (run.lengths.clone(), run.prompts.clone());
            run.must("a checkpoint", |cache| cache.begin_draft());
            let again = run.cache.begin_draft();
            run.require(
                matches!(again, Err(CacheError::DraftOpen)),
                "a draft in a draft was not refused",
            );
            for call in drafted(&text[0]) {
                run.feed(&call);
                nothing_is_dropped(&run, &reference);
            }
            if cut {
                let mut to = before.0.clone();
                to.resize(run.lengths.len(), 0);
                to[0] += 1;
                run.must("a truncation within a draft", |cache| cache.truncate(&to));
            }
            run.must("to take a draft back", |cache| {
                cache.end_draft(Draft::Discard)
            });
            (run.lengths, run.prompts) = before;
            let (ours, theirs) = (run.text_state(), reference.text_state());
            run.require(
                ours == theirs,
                format_args!("it stands at {ours:?} and not at {theirs:?}"),
            );
        }
        for call in &text[at..] {
            let (expected, found) = (reference.feed(call), run.feed(call));
            let what = format!("a cache without the draft (after {at} calls)");
            run.require_same(&found, &reference, &expected, &what);
        }
    });
}

/// [`accept`](CacheBackend::accept) drops rows as if what was left of the draft had come in one call (a
/// prompt that ends within it ends where a call said so): the
/// rows kept are those of a cache to which it did, and in later calls the bits are those of one to which it
/// came in one call as a draft. A draft of which nothing is left never was.
///
/// # Panics
/// If the law is broken.
pub fn an_accepted_draft_came_in_one_call(contract: &Contract, device: &Device) {
    let law = "an accepted draft came in one call";
    each(contract, device, |model, text, at| {
        for left in [0, 3, 6] {
            let make = || {
                let mut run = TestRun::new(law, contract, model, TIGHT);
                run.feed_all(&text[..at]);
                run
            };
            let (mut run, mut once, mut plain) = (make(), make(), make());
            let (before, mut calls) = (run.lengths.clone(), drafted(&text[0]));
            // A prompt ends with the call that says so: here with all of the draft.
            if run.prompts.is_empty() || run.prompts.iter().any(Option::is_none) {
                calls = vec![joined(&calls)];
            }
            run.must("a checkpoint", |cache| cache.begin_draft());
            run.feed_all(&calls);
            let length = |row: usize, length: usize| {
                let before = before.get(row).copied().unwrap_or(0);
                length.min(before + left)
            };
            let rows = run.lengths.iter().enumerate();
            let to: Vec<usize> = rows.map(|(row, &n)| length(row, n)).collect();
            run.must("a truncation within a draft", |cache| cache.truncate(&to));
            let empty = to.iter().all(|&to| to == 0);
            if !empty {
                run.must("to accept a draft", |cache| cache.end_draft(Draft::Accept));
            }
            run.lengths = if empty { Vec::new() } else { to };
            let mut whole = joined(&calls);
            whole.rows.iter_mut().for_each(|row| row.truncate(left));
            once.must("a checkpoint", |cache| cache.begin_draft());
            if left > 0 {
                once.feed(&whole);
                plain.feed(&whole);
            }
            once.must("to accept a draft", |cache| cache.end_draft(Draft::Accept));
            for other in [&once, &plain] {
                let (ours, theirs) = (run.text_state(), other.text_state());
                run.require(
                    ours == theirs,
                    format_args!("{left} tokens of a draft keep {ours:?} and not {theirs:?}"),
                );
            }
            for call in &text[at.max(1)..] {
                let (expected, found) = (once.feed(call), run.feed(call));
                let what = format!("a cache to which {left} tokens came in one call (after {at})");
                run.require_same(&found, &once, &expected, &what);
            }
        }
    });
}

/// Every model, text and number of calls before the draft.
fn each(contract: &Contract, device: &Device, check: impl Fn(&Model, &[Call], usize)) {
    let models = models(device);
    let served = models
        .iter()
        .filter(|model| contract.sessions && contract.serves(&model.decoder.shape()));
    for model in served {
        for text in [mixed(131), chunked(132), ragged(133)] {
            for at in [0, 2, 4] {
                check(model, &text, at);
            }
        }
    }
}

/// The calls of a draft for a batch like that of `like`: one row or four, some silent.
fn drafted(like: &Call) -> Vec<Call> {
    match like.rows.len() {
        1 => text(134, 0, &[[2], [1], [5]]),
        _ => text(135, 0, &[[2, 1, 0, 4], [1, 1, 3, 0], [5, 1, 1, 1]]),
    }
}

/// The tokens of all calls in one.
fn joined(calls: &[Call]) -> Call {
    let mut all = calls[0].clone();
    for call in &calls[1..] {
        for (row, more) in all.rows.iter_mut().zip(&call.rows) {
            row.extend(more);
        }
    }
    all
}

fn nothing_is_dropped(run: &TestRun<'_>, before: &TestRun<'_>) {
    let full = |layer: &usize| run.shape().windows[*layer].is_none();
    for layer in (0..run.layers()).filter(full) {
        let (now, then) = (run.cached(layer), before.cached(layer));
        for row in 0..then.sequences() {
            for head in 0..run.shape().kernels.kv_heads {
                let (now, then) = (list(&now, row, head), list(&then, row, head));
                let gone = then.iter().find(|position| !now.contains(position));
                run.require(
                    gone.is_none(),
                    format_args!("layer {layer}, row {row}: {gone:?} was dropped in a draft"),
                );
            }
        }
    }
}
