//! Laws of what a cache can be made of: a state, a choice of rows, what is left when it is parked.

use burn::tensor::Device;

use super::{
    contract::{Contract, TIGHT},
    models::{Call, Model, chunked, mixed, models, ragged},
    test_run::TestRun,
};
use crate::cache::{CacheBackend, CacheError, Draft, State, Step};

/// A cache that takes over the [`state`](CacheBackend::state) of another stands where that stood and goes
/// on with its bits, whatever it held before; the other goes on untouched. A state of another backend is
/// refused, and so is taking one while a draft or a step is open; a refusal changes nothing. A backend that
/// claims no states refuses them, and drafts and the choice of rows with them.
///
/// # Panics
/// If the law is broken.
pub fn a_state_goes_on_elsewhere(contract: &Contract, device: &Device) {
    let law = "a state goes on elsewhere";
    each(contract, !contract.sessions, device, |model, text| {
        let mut run = TestRun::new(law, contract, model, TIGHT);
        run.feed(&text[0]);
        let there = run.state();
        let state = State::new("no such backend", [], &model.decoder.shape());
        let cache = &mut run.cache;
        let refusals = [
            cache.state().map(drop),
            cache.set_state(&state),
            cache.begin_draft(),
            cache.end_draft(Draft::Discard),
            cache.end_draft(Draft::Accept),
            cache.select_sequences(&[0]),
        ];
        let right = |refusal| matches!(refusal, Err(CacheError::Unsupported { .. }));
        run.require(
            refusals.into_iter().all(right) && run.state() == there,
            "what is not claimed was not refused, or changed something",
        );
    });
    each(contract, contract.sessions, device, |model, text| {
        for at in 0..text.len() {
            let make = || TestRun::new(law, contract, model, TIGHT);
            let (mut origin, mut other) = (make(), make());
            origin.feed_all(&text[..at]);
            other.feed_all(&ragged(141));
            let foreign = State::new("no such backend", [], &model.decoder.shape());
            let before = other.state();
            let refused = other.cache.set_state(&foreign);
            let right = matches!(refused, Err(CacheError::Foreign { .. }));
            other.require(right, format_args!("a foreign state gave {refused:?}"));
            other.require(other.state() == before, "a refused state changed something");
            let state = origin.cache.state();
            let state = match state {
                Ok(state) => state,
                Err(error) => origin.broken(format_args!("no state: {error}")),
            };
            other.must("to take over a state", |cache| cache.set_state(&state));
            let there = other.state();
            (other.lengths, other.prompts) = (origin.lengths.clone(), origin.prompts.clone());
            let (ours, theirs) = (other.text_state(), origin.text_state());
            other.require(
                ours == theirs,
                format_args!("it stands at {ours:?} and not at {theirs:?}"),
            );
            for call in &text[at..] {
                let (expected, found) = (origin.feed(call), other.feed(call));
                let what = format!("the cache it took over (after {at} calls)");
                other.require_same(&found, &origin, &expected, &what);
            }
            origin.must("a checkpoint", |cache| cache.begin_draft());
            let drafted = origin.cache.state();
            origin.require(
                matches!(drafted, Err(CacheError::DraftOpen)),
                "a state within a draft was not refused",
            );
            origin.must("to take a draft back", |cache| {
                cache.end_draft(Draft::Discard)
            });
            let rows = vec![vec![1, 2, 3]; text[0].rows.len()];
            let mut starts = origin.lengths.clone();
            starts.resize(rows.len(), 0);
            let begun = Step::new(rows.into(), &starts).and_then(|step| origin.cache.begin(&step));
            origin.require(begun.is_ok(), "a good step was refused");
            let cache = &mut origin.cache;
            let refusals = [
                cache.state().map(drop),
                cache.begin_draft(),
                cache.end_draft(Draft::Discard),
                cache.end_draft(Draft::Accept),
                cache.select_sequences(&[0]),
                cache.truncate(&[usize::MAX]),
            ];
            let open = |refusal| matches!(refusal, Err(CacheError::Poisoned));
            origin.require(refusals.into_iter().all(open), "a step is open");
            // A state is taken over whatever happened.
            origin.must("to take over a state", |cache| cache.set_state(&state));
            origin.require(origin.state() == there, "what was open has left something");
        }
    });
}

/// After [`select_sequences`](CacheBackend::select_sequences) every batch row goes on as if it had always been where
/// it is now, alone or beside others: rows may be dropped, reordered and repeated. A row that there is not
/// is refused, and so is a choice within a draft.
///
/// # Panics
/// If the law is broken.
pub fn selected_rows_go_on_as_alone(contract: &Contract, device: &Device) {
    let law = "selected rows go on as alone";
    let choices = [&[2, 0][..], &[1, 1, 3], &[0, 1, 2, 3], &[3]];
    each(contract, contract.sessions, device, |model, text| {
        if text[0].rows.len() < 4 {
            return;
        }
        for choice in choices {
            let make = || TestRun::new(law, contract, model, TIGHT);
            let (mut run, mut rest) = (make(), text.iter());
            let before: Vec<&Call> = rest.by_ref().take(3).collect();
            before.iter().for_each(|call| drop(run.feed(call)));
            let there = run.state();
            let refused = run.cache.select_sequences(&[0, 4]);
            let right = matches!(
                refused,
                Err(CacheError::NoSequence {
                    sequence: 4,
                    sequences: 4
                })
            );
            run.require(
                right && run.state() == there,
                format_args!("a choice of row 4 of 4 gave {refused:?}"),
            );
            run.must("a checkpoint", |cache| cache.begin_draft());
            let drafted = run.cache.select_sequences(choice);
            run.require(
                matches!(drafted, Err(CacheError::DraftOpen)),
                "a choice within a draft was not refused",
            );
            run.must("to take a draft back", |cache| {
                cache.end_draft(Draft::Discard)
            });
            run.must("to select rows", |cache| cache.select_sequences(choice));
            run.lengths = choice.iter().map(|&row| run.lengths[row]).collect();
            run.prompts = choice.iter().map(|&row| run.prompts[row]).collect();
            let mut alone: Vec<TestRun<'_>> = choice.iter().map(|_| make()).collect();
            for (alone, &row) in alone.iter_mut().zip(choice) {
                let brings = |call: &&&Call| !call.rows[row].is_empty();
                before
                    .iter()
                    .filter(brings)
                    .for_each(|call| drop(alone.feed(&call.row(row))));
            }
            for call in rest {
                let rows = choice.iter().map(|&row| call.rows[row].clone()).collect();
                let logits = run.feed(&Call { rows, ..*call });
                for (place, (alone, &row)) in alone.iter_mut().zip(choice).enumerate() {
                    if call.rows[row].is_empty() {
                        continue;
                    }
                    let expected = alone.feed(&call.row(row));
                    run.require(
                        logits[place] == expected[0],
                        format_args!("row {row} of {choice:?} has other logits than alone"),
                    );
                }
            }
        }
    });
}

/// After [`park`](CacheBackend::park) a cache holds less, stands where it stood, and goes on with the bits
/// of one that was never parked; where it claims no parking it refuses and is as it was.
///
/// # Panics
/// If the law is broken.
pub fn a_parked_cache_goes_on(contract: &Contract, device: &Device) {
    let law = "a parked cache goes on";
    each(contract, true, device, |model, text| {
        for at in [1, 3, text.len() - 1] {
            let make = || TestRun::new(law, contract, model, TIGHT);
            let (mut run, mut reference) = (make(), make());
            run.feed_all(&text[..at]);
            reference.feed_all(&text[..at]);
            let before = run.state();
            let held = run.cache.memory();
            if !contract.parks {
                let refused = run.cache.park();
                let right = matches!(refused, Err(CacheError::Unsupported { .. }));
                run.require(
                    right && run.state() == before,
                    format_args!("parking gave {refused:?}"),
                );
                continue;
            }
            run.must("to be parked", |cache| cache.park());
            let parked = run.cache.memory();
            run.require(
                parked.total() <= held.total()
                    && (held.keys_values == 0 || parked.keys_values < held.keys_values),
                format_args!("{parked:?} is held, {held:?} before"),
            );
            run.require(
                run.text_state() == reference.text_state(),
                "positions or readable rows have changed",
            );
            for call in &text[at..] {
                let (expected, found) = (reference.feed(call), run.feed(call));
                let what = format!("a cache that was never parked (after {at} calls)");
                run.require_same(&found, &reference, &expected, &what);
            }
        }
    });
}

/// Every model and text, where the backend claims it.
fn each(contract: &Contract, claimed: bool, device: &Device, check: impl Fn(&Model, &[Call])) {
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
