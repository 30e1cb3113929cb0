//! Laws of what a cache can be made of: a state, a choice of rows, what is left when it is parked.

use burn::tensor::Device;

use super::{
    contract::{Contract, TIGHT},
    models::{Call, Model, chunked, mixed, models, ragged},
    trial::Trial,
};
use crate::cache::{CacheBackend, CacheError, State, Step};

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
        let mut trial = Trial::new(law, contract, model, TIGHT);
        trial.feed(&text[0]);
        let there = trial.state();
        let state = State::new("no such backend", "", &model.decoder.shape());
        let cache = &mut trial.cache;
        let refusals = [
            cache.state().map(drop),
            cache.set_state(&state),
            cache.checkpoint(),
            cache.restore(),
            cache.accept(),
            cache.select_rows(&[0]),
        ];
        let right = |refusal| matches!(refusal, Err(CacheError::Unsupported { .. }));
        trial.require(
            refusals.into_iter().all(right) && trial.state() == there,
            "what is not claimed was not refused, or changed something",
        );
    });
    each(contract, contract.sessions, device, |model, text| {
        for at in 0..text.len() {
            let make = || Trial::new(law, contract, model, TIGHT);
            let (mut origin, mut other) = (make(), make());
            origin.feed_all(&text[..at]);
            other.feed_all(&ragged(141));
            let foreign = State::new("no such backend", "", &model.decoder.shape());
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
            origin.must("a checkpoint", |cache| cache.checkpoint());
            let drafted = origin.cache.state();
            origin.require(
                matches!(drafted, Err(CacheError::CheckpointOpen)),
                "a state within a draft was not refused",
            );
            origin.must("to take a draft back", |cache| cache.restore());
            let rows = vec![vec![1, 2, 3]; text[0].rows.len()];
            let mut starts = origin.lengths.clone();
            starts.resize(rows.len(), 0);
            let begun = Step::new(rows.into(), &starts).and_then(|step| origin.cache.begin(&step));
            origin.require(begun.is_ok(), "a good step was refused");
            let cache = &mut origin.cache;
            let refusals = [
                cache.state().map(drop),
                cache.checkpoint(),
                cache.restore(),
                cache.accept(),
                cache.select_rows(&[0]),
                cache.truncate(usize::MAX),
            ];
            let open = |refusal| matches!(refusal, Err(CacheError::Poisoned));
            origin.require(refusals.into_iter().all(open), "a step is open");
            // A state is taken over whatever happened.
            origin.must("to take over a state", |cache| cache.set_state(&state));
            origin.require(origin.state() == there, "what was open has left something");
        }
    });
}

/// After [`select_rows`](CacheBackend::select_rows) every batch row goes on as if it had always been where
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
            let make = || Trial::new(law, contract, model, TIGHT);
            let (mut trial, mut rest) = (make(), text.iter());
            let before: Vec<&Call> = rest.by_ref().take(3).collect();
            before.iter().for_each(|call| drop(trial.feed(call)));
            let there = trial.state();
            let refused = trial.cache.select_rows(&[0, 4]);
            let right = matches!(refused, Err(CacheError::NoRow { row: 4, rows: 4 }));
            trial.require(
                right && trial.state() == there,
                format_args!("a choice of row 4 of 4 gave {refused:?}"),
            );
            trial.must("a checkpoint", |cache| cache.checkpoint());
            let drafted = trial.cache.select_rows(choice);
            trial.require(
                matches!(drafted, Err(CacheError::CheckpointOpen)),
                "a choice within a draft was not refused",
            );
            trial.must("to take a draft back", |cache| cache.restore());
            trial.must("to select rows", |cache| cache.select_rows(choice));
            trial.lengths = choice.iter().map(|&row| trial.lengths[row]).collect();
            trial.prompts = choice.iter().map(|&row| trial.prompts[row]).collect();
            let mut alone: Vec<Trial<'_>> = choice.iter().map(|_| make()).collect();
            for (alone, &row) in alone.iter_mut().zip(choice) {
                let brings = |call: &&&Call| !call.rows[row].is_empty();
                before
                    .iter()
                    .filter(brings)
                    .for_each(|call| drop(alone.feed(&call.row(row))));
            }
            for call in rest {
                let rows = choice.iter().map(|&row| call.rows[row].clone()).collect();
                let logits = trial.feed(&Call { rows, ..*call });
                for (place, (alone, &row)) in alone.iter_mut().zip(choice).enumerate() {
                    if call.rows[row].is_empty() {
                        continue;
                    }
                    let expected = alone.feed(&call.row(row));
                    trial.require(
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
            let make = || Trial::new(law, contract, model, TIGHT);
            let (mut trial, mut reference) = (make(), make());
            trial.feed_all(&text[..at]);
            reference.feed_all(&text[..at]);
            let before = trial.state();
            let held = trial.cache.memory();
            if !contract.parks {
                let refused = trial.cache.park();
                let right = matches!(refused, Err(CacheError::Unsupported { .. }));
                trial.require(
                    right && trial.state() == before,
                    format_args!("parking gave {refused:?}"),
                );
                continue;
            }
            trial.must("to be parked", |cache| cache.park());
            let parked = trial.cache.memory();
            trial.require(
                parked.total() <= held.total()
                    && (held.keys_values == 0 || parked.keys_values < held.keys_values),
                format_args!("{parked:?} is held, {held:?} before"),
            );
            trial.require(
                trial.text_state() == reference.text_state(),
                "positions or readable rows have changed",
            );
            for call in &text[at..] {
                let (expected, found) = (reference.feed(call), trial.feed(call));
                let what = format!("a cache that was never parked (after {at} calls)");
                trial.require_same(&found, &reference, &expected, &what);
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
