//! Laws of states, of the selection of sequences, and of parking.

use burn::tensor::Device;

use super::{
    contract::{Contract, TIGHT},
    models::{Model, TextStep, chunked, mixed, models, ragged},
    test_run::TestRun,
};
use crate::cache::{CacheBackend, CacheError, Draft, ModelShape, State, Step};

/// A cache that is set to the [`state`](CacheBackend::state) of another continues with the bits of the other,
/// whatever it held before. The other continues unchanged.
///
/// A state of another backend is refused. So is a request for a state while a draft or a step is open. A refusal
/// changes nothing. A backend that claims no states, no drafts or no selection of sequences refuses them.
///
/// # Panics
/// If the law is broken.
pub(super) fn a_state_continues_elsewhere(contract: &Contract, device: &Device) {
    let law = "a state continues elsewhere";
    each(contract, true, device, |model, text| {
        unclaimed_calls_are_refused(contract, TestRun::new(law, contract, model, TIGHT), text);
    });
    each(contract, contract.states, device, |model, text| {
        for at in 0..text.len() {
            let make = || TestRun::new(law, contract, model, TIGHT);
            let (mut origin, mut other) = (make(), make());
            origin.process_all(&text[..at]);
            other.process_all(&ragged(141));
            let before = other.snapshot();
            let refused = other.cache.set_state(&foreign(&model.decoder.shape()));
            let right = matches!(refused, Err(CacheError::Foreign { .. }));
            other.require(
                right,
                format_args!("a state of another backend returned {refused:?}, expected Foreign"),
            );
            let after = other.snapshot();
            other.require(
                after == before,
                format_args!("after a refused state: {after:?}, expected {before:?}"),
            );
            let state = origin.cache.state();
            let state = match state {
                Ok(state) => state,
                Err(error) => origin.broken(format_args!("state() was refused: {error}")),
            };
            other.must("set_state", |cache| cache.set_state(&state));
            let there = other.snapshot();
            (other.lengths, other.prompts) = (origin.lengths.clone(), origin.prompts.clone());
            other.require_contents(&origin, "the cache of the state");
            for step in &text[at..] {
                let (expected, found) = (origin.process(step), other.process(step));
                let what = format!("the cache of the state (taken after {at} steps)");
                other.require_same(&found, &origin, &expected, &what);
            }
            if contract.drafts {
                origin.must("begin_draft", |cache| cache.begin_draft());
                let drafted = origin.cache.state();
                origin.require(
                    matches!(drafted, Err(CacheError::DraftOpen)),
                    format_args!("state() within a draft returned {drafted:?}, expected DraftOpen"),
                );
                origin.must("discarding a draft", |cache| {
                    cache.end_draft(Draft::Discard)
                });
            }
            let tokens = vec![vec![1, 2, 3]; text[0].tokens.len()];
            let mut starts = origin.lengths.clone();
            starts.resize(tokens.len(), 0);
            let begun =
                Step::new(tokens.into(), &starts).and_then(|step| origin.cache.begin(&step));
            origin.require(begun.is_ok(), "a valid step was refused");
            let cache = &mut origin.cache;
            let mut results = vec![cache.state().map(drop), cache.truncate(&[usize::MAX])];
            if contract.drafts {
                results.push(cache.begin_draft());
                results.push(cache.end_draft(Draft::Discard));
                results.push(cache.end_draft(Draft::Accept));
            }
            if contract.selection {
                results.push(cache.select_sequences(&[0]));
            }
            let right = |result: &Result<(), _>| matches!(result, Err(CacheError::Poisoned));
            origin.require(
                results.iter().all(right),
                format_args!("calls within a step returned {results:?}, expected Poisoned"),
            );
            // A state can be set whatever happened before.
            origin.must("set_state", |cache| cache.set_state(&state));
            let after = origin.snapshot();
            origin.require(
                after == there,
                format_args!("after set_state within a step: {after:?}, expected {there:?}"),
            );
        }
    });
}

/// What the contract does not claim is refused as unsupported, and nothing changes.
fn unclaimed_calls_are_refused(contract: &Contract, mut run: TestRun<'_>, text: &[TextStep]) {
    run.process(&text[0]);
    let (before, state) = (run.snapshot(), foreign(&run.shape()));
    let cache = &mut run.cache;
    let mut results = Vec::new();
    if !contract.states {
        results.push(cache.state().map(drop));
        results.push(cache.set_state(&state));
    }
    if !contract.drafts {
        results.push(cache.begin_draft());
        results.push(cache.end_draft(Draft::Discard));
        results.push(cache.end_draft(Draft::Accept));
    }
    if !contract.selection {
        results.push(cache.select_sequences(&[0]));
    }
    let right = |result: &Result<(), _>| matches!(result, Err(CacheError::Unsupported { .. }));
    run.require(
        results.iter().all(right),
        format_args!(
            "calls that the contract does not claim returned {results:?}, expected Unsupported"
        ),
    );
    let after = run.snapshot();
    run.require(
        after == before,
        format_args!("after unsupported calls: {after:?}, expected {before:?}"),
    );
}

/// After [`select_sequences`](CacheBackend::select_sequences), every sequence continues as if it had always been at
/// its present place, alone or beside others. Sequences may be left out, reordered and repeated. A sequence that does
/// not exist is refused, and so is a selection within a draft.
///
/// # Panics
/// If the law is broken.
pub(super) fn selected_sequences_continue_as_alone(contract: &Contract, device: &Device) {
    let law = "selected sequences continue as alone";
    let selections = [&[2, 0][..], &[1, 1, 3], &[0, 1, 2, 3], &[3]];
    each(contract, contract.selection, device, |model, text| {
        if text[0].tokens.len() < 4 {
            return;
        }
        for selection in selections {
            let make = || TestRun::new(law, contract, model, TIGHT);
            let (mut run, mut rest) = (make(), text.iter());
            let before: Vec<&TextStep> = rest.by_ref().take(3).collect();
            before.iter().for_each(|step| drop(run.process(step)));
            let there = run.snapshot();
            let refused = run.cache.select_sequences(&[0, 4]);
            let right = matches!(
                refused,
                Err(CacheError::NoSequence {
                    sequence: 4,
                    sequences: 4
                })
            );
            run.require(
                right,
                format_args!("selecting sequence 4 of 4 returned {refused:?}, expected NoSequence"),
            );
            let after = run.snapshot();
            run.require(
                after == there,
                format_args!("after a refused selection: {after:?}, expected {there:?}"),
            );
            if contract.drafts {
                run.must("begin_draft", |cache| cache.begin_draft());
                let drafted = run.cache.select_sequences(selection);
                run.require(
                    matches!(drafted, Err(CacheError::DraftOpen)),
                    format_args!(
                        "a selection within a draft returned {drafted:?}, expected DraftOpen"
                    ),
                );
                run.must("discarding a draft", |cache| {
                    cache.end_draft(Draft::Discard)
                });
            }
            run.must("select_sequences", |cache| {
                cache.select_sequences(selection)
            });
            run.lengths = selection.iter().map(|&i| run.lengths[i]).collect();
            run.prompts = selection.iter().map(|&i| run.prompts[i]).collect();
            let mut alone: Vec<TestRun<'_>> = selection.iter().map(|_| make()).collect();
            for (alone, &sequence) in alone.iter_mut().zip(selection) {
                let has_tokens = |step: &&&TextStep| !step.tokens[sequence].is_empty();
                before
                    .iter()
                    .filter(has_tokens)
                    .for_each(|step| drop(alone.process(&step.sequence(sequence))));
            }
            for step in rest {
                let tokens = selection.iter().map(|&i| step.tokens[i].clone()).collect();
                let logits = run.process(&TextStep { tokens, ..*step });
                for (place, (alone, &sequence)) in alone.iter_mut().zip(selection).enumerate() {
                    if step.tokens[sequence].is_empty() {
                        continue;
                    }
                    let expected = alone.process(&step.sequence(sequence));
                    let ours = vec![logits[place].clone()];
                    let what = format!("sequence {sequence} of {selection:?} alone");
                    run.require_logits(&ours, &expected, &what);
                }
            }
        }
    });
}

/// After [`park`](CacheBackend::park) a cache holds less, has the same lengths and cached positions, and continues
/// with the bits of one that was never parked. A backend that claims no parking refuses it, and nothing changes.
///
/// # Panics
/// If the law is broken.
pub(super) fn a_parked_cache_continues(contract: &Contract, device: &Device) {
    let law = "a parked cache continues";
    each(contract, true, device, |model, text| {
        for at in [1, 3, text.len() - 1] {
            let make = || TestRun::new(law, contract, model, TIGHT);
            let (mut run, mut reference) = (make(), make());
            run.process_all(&text[..at]);
            reference.process_all(&text[..at]);
            let before = run.snapshot();
            let held = run.cache.memory();
            if !contract.parks {
                let refused = run.cache.park();
                let right = matches!(refused, Err(CacheError::Unsupported { .. }));
                run.require(
                    right,
                    format_args!("park returned {refused:?}, expected Unsupported"),
                );
                let after = run.snapshot();
                run.require(
                    after == before,
                    format_args!("after a refused park: {after:?}, expected {before:?}"),
                );
                continue;
            }
            run.must("park", |cache| cache.park());
            let parked = run.cache.memory();
            run.require(
                parked.total() <= held.total()
                    && (held.keys_values == 0 || parked.keys_values < held.keys_values),
                format_args!("parked, the cache holds {parked:?}, expected less than {held:?}"),
            );
            let what = format!("a cache that was never parked (after {at} steps)");
            run.require_contents(&reference, &what);
            for step in &text[at..] {
                let (expected, found) = (reference.process(step), run.process(step));
                run.require_same(&found, &reference, &expected, &what);
            }
        }
    });
}

/// A state of a backend that does not exist.
fn foreign(shape: &ModelShape) -> State {
    State::new("no such backend", [], shape)
}

/// Runs `check` for every model and text, if `claimed`.
fn each(contract: &Contract, claimed: bool, device: &Device, check: impl Fn(&Model, &[TextStep])) {
    let models = models(device);
    let served = models
        .iter()
        .filter(|model| claimed && contract.serves(&model.decoder.shape()));
    for model in served {
        for text in [mixed(142), chunked(143), ragged(144)] {
            check(model, &text);
        }
    }
}
