//! Laws of drafts: a discarded one leaves no trace, an accepted one equals one step.

use burn::tensor::Device;

use super::{
    contract::{Contract, TIGHT},
    models::{Model, TextStep, chunked, mixed, models, ragged, text},
    test_run::{TestRun, list},
};
use crate::cache::{CacheBackend, CacheError, Draft};

/// While a draft is open, nothing is evicted. After [`Discard`](Draft::Discard) the cache has the contents, and in
/// every later step the bits, of one without the draft.
///
/// This holds before the first step, within a prompt and after it, for sequences of different lengths, and after a
/// truncation within the draft. Ending a draft is refused if there is none, and so is a draft within a draft.
///
/// # Panics
/// If the law is broken.
pub(super) fn a_discarded_draft_leaves_no_trace(contract: &Contract, device: &Device) {
    let law = "a discarded draft leaves no trace";
    each(contract, device, |model, text, at| {
        let mut run = TestRun::new(law, contract, model, TIGHT);
        let mut reference = TestRun::new(law, contract, model, TIGHT);
        for refused in [
            run.cache.end_draft(Draft::Discard),
            run.cache.end_draft(Draft::Accept),
        ] {
            let right = matches!(refused, Err(CacheError::NoDraft));
            run.require(
                right,
                format_args!("end_draft without a draft returned {refused:?}, expected NoDraft"),
            );
        }
        run.process_all(&text[..at]);
        reference.process_all(&text[..at]);
        let what = format!("a cache without the draft (after {at} steps)");
        for cut in [false, true] {
            let before = (run.lengths.clone(), run.prompts.clone());
            run.must("begin_draft", |cache| cache.begin_draft());
            let again = run.cache.begin_draft();
            run.require(
                matches!(again, Err(CacheError::DraftOpen)),
                format_args!("begin_draft within a draft returned {again:?}, expected DraftOpen"),
            );
            for step in drafted(&text[0]) {
                run.process(&step);
                nothing_is_evicted(&run, &reference);
            }
            if cut {
                let mut to = before.0.clone();
                to.resize(run.lengths.len(), 0);
                to[0] += 1;
                run.must("a truncation within a draft", |cache| cache.truncate(&to));
            }
            run.must("discarding a draft", |cache| {
                cache.end_draft(Draft::Discard)
            });
            (run.lengths, run.prompts) = before;
            run.require_contents(&reference, &what);
        }
        for step in &text[at..] {
            let (expected, found) = (reference.process(step), run.process(step));
            run.require_same(&found, &reference, &expected, &what);
        }
    });
}

/// After [`Accept`](Draft::Accept), entries are evicted as if the accepted tokens had come in one step. A prompt that
/// ends within the draft ends with the step that marks its end.
///
/// The cached positions are those of a cache that processed the accepted tokens in one step. In later steps, the bits
/// are those of a cache that processed them in one step of a draft. A draft without accepted tokens leaves no trace.
///
/// # Panics
/// If the law is broken.
pub(super) fn an_accepted_draft_equals_one_step(contract: &Contract, device: &Device) {
    let law = "an accepted draft equals one step";
    each(contract, device, |model, text, at| {
        for accepted in [0, 3, 6] {
            let make = || {
                let mut run = TestRun::new(law, contract, model, TIGHT);
                run.process_all(&text[..at]);
                run
            };
            let (mut run, mut once, mut plain) = (make(), make(), make());
            let (before, mut steps) = (run.lengths.clone(), drafted(&text[0]));
            // A prompt ends with the step that marks its end: here with the whole draft.
            if run.prompts.is_empty() || run.prompts.iter().any(Option::is_none) {
                steps = vec![joined(&steps)];
            }
            run.must("begin_draft", |cache| cache.begin_draft());
            run.process_all(&steps);
            let length = |sequence: usize, length: usize| {
                let before = before.get(sequence).copied().unwrap_or(0);
                length.min(before + accepted)
            };
            let sequences = run.lengths.iter().enumerate();
            let to: Vec<usize> = sequences.map(|(i, &n)| length(i, n)).collect();
            run.must("a truncation within a draft", |cache| cache.truncate(&to));
            let empty = to.iter().all(|&to| to == 0);
            if !empty {
                run.must("accepting a draft", |cache| cache.end_draft(Draft::Accept));
            }
            run.lengths = if empty { Vec::new() } else { to };
            let mut whole = joined(&steps);
            let tokens = whole.tokens.iter_mut();
            tokens.for_each(|tokens| tokens.truncate(accepted));
            once.must("begin_draft", |cache| cache.begin_draft());
            if accepted > 0 {
                once.process(&whole);
                plain.process(&whole);
            }
            once.must("accepting a draft", |cache| cache.end_draft(Draft::Accept));
            let what = format!("one step of {accepted} tokens (after {at} steps)");
            for other in [&once, &plain] {
                run.require_contents(other, &what);
            }
            for step in &text[at.max(1)..] {
                let (expected, found) = (once.process(step), run.process(step));
                run.require_same(&found, &once, &expected, &what);
            }
        }
    });
}

/// Runs `check` for every model, text and number of steps before the draft.
fn each(contract: &Contract, device: &Device, check: impl Fn(&Model, &[TextStep], usize)) {
    let models = models(device);
    let served = models
        .iter()
        .filter(|model| contract.drafts && contract.serves(&model.decoder.shape()));
    for model in served {
        for text in [mixed(131), chunked(132), ragged(133)] {
            for at in [0, 2, 4] {
                check(model, &text, at);
            }
        }
    }
}

/// The steps of a draft for as many sequences as in `like`, one or four. Some have no tokens in a step.
fn drafted(like: &TextStep) -> Vec<TextStep> {
    match like.tokens.len() {
        1 => text(134, 0, &[[2], [1], [5]]),
        _ => text(135, 0, &[[2, 1, 0, 4], [1, 1, 3, 0], [5, 1, 1, 1]]),
    }
}

/// The tokens of all steps in one.
fn joined(steps: &[TextStep]) -> TextStep {
    let mut all = steps[0].clone();
    for step in &steps[1..] {
        for (tokens, more) in all.tokens.iter_mut().zip(&step.tokens) {
            tokens.extend(more);
        }
    }
    all
}

fn nothing_is_evicted(run: &TestRun<'_>, before: &TestRun<'_>) {
    let full = |layer: &usize| run.shape().windows[*layer].is_none();
    for layer in (0..run.layers()).filter(full) {
        let (now, then) = (run.cached(layer), before.cached(layer));
        for sequence in 0..then.sequences() {
            for head in 0..run.shape().kernels.kv_heads {
                let (now, then) = (list(&now, sequence, head), list(&then, sequence, head));
                let evicted = then.iter().find(|position| !now.contains(position));
                run.require(
                    evicted.is_none(),
                    format_args!("layer {layer}, sequence {sequence}: position {evicted:?} was evicted within a draft"),
                );
            }
        }
    }
}
