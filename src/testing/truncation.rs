//! The law of truncation: exact, or refused, and nothing else.

use burn::tensor::Device;

use super::{
    contract::{AMPLE, Contract, Reach, TIGHT},
    models::{Call, Model, mixed, models, ragged, text},
    test_run::TestRun,
};
use crate::cache::{CacheBackend, CacheError};

/// After `truncate(to)` a cache goes on, call after call, with the bits and the rows of one that was fed
/// the same calls cut off at `to`; or it refused with [`Irreversible`](CacheError::Irreversible), names a
/// length that can be reached, and is as it was. In all layers or none; rows of a batch that are shorter
/// than `to` are left alone. The last call of a batch is taken back row by row. What must not be refused is the end, 0, and what the [`Contract`] says.
///
/// # Panics
/// If the law is broken.
pub fn a_truncation_is_exact_or_refused(contract: &Contract, device: &Device) {
    let models = models(device);
    for model in models
        .iter()
        .filter(|m| contract.serves(&m.decoder.shape()))
    {
        // A short prompt and a short answer, the middle of a prompt, and longer ones.
        let short = text(121, 0, &[[6], [1], [1]]);
        let open = text(122, 2, &[[6], [5], [7]]);
        for past in [&short, &open[..2], &open, &mixed(123)] {
            every_length(contract, model, past, TIGHT);
        }
        every_length(contract, model, &mixed(123), AMPLE);
        every_length(contract, model, &ragged(125)[..2], TIGHT);
        let ragged = ragged(126);
        for calls in 2..=ragged.len() {
            last_call(contract, model, &ragged[..calls]);
        }
    }
}

/// Takes the last call of a batch back, row by row: by lengths that differ.
fn last_call(contract: &Contract, model: &Model, past: &[Call]) {
    let law = "a truncation is exact or refused";
    let [before @ .., last] = past else { return };
    let make = || TestRun::new(law, contract, model, TIGHT);
    let (mut run, mut reference) = (make(), make());
    run.feed_all(before);
    reference.feed_all(before);
    let to = run.lengths.clone();
    run.feed(last);
    let there = run.state();
    match run.cache.truncate(&to) {
        Ok(()) => {
            (run.lengths, run.prompts) = (to, reference.prompts.clone());
            goes_on(run, reference, 1);
        }
        Err(CacheError::Irreversible { .. }) => {
            let lossless = matches!(contract.reach, Reach::Everywhere | Reach::LastCall);
            run.require(!lossless, "the last call cannot be undone row by row");
            run.require(
                run.state() == there,
                "a refused truncation changed something",
            );
        }
        Err(error) => run.broken(format_args!("truncation to {to:?} failed: {error}")),
    }
}

fn every_length(contract: &Contract, model: &Model, past: &[Call], budget: usize) {
    let law = "a truncation is exact or refused";
    let mut origin = TestRun::new(law, contract, model, budget);
    let mut last_call = 0;
    for call in past {
        last_call = origin.lengths.iter().copied().max().unwrap_or(0);
        origin.feed(call);
    }
    let longest = origin.lengths.iter().copied().max().unwrap_or(0);
    let mut lengths = vec![0, 5, last_call - 1, last_call, longest - 1, longest];
    lengths.sort_unstable();
    lengths.dedup();
    for to in lengths {
        let (mut run, before) = (origin.split(), origin.state());
        let mut reference = TestRun::new(law, contract, model, budget);
        if run.truncate(to) {
            reference.feed_all(&cut(past, to, origin.prompts.iter().all(Option::is_some)));
            goes_on(run, reference, to);
            continue;
        }
        let due = [0, longest].contains(&to) || must_reach(contract, &origin, to, last_call);
        run.require(!due, format_args!("truncation to {to} was refused"));
        let unchanged = run.text_state() == origin.text_state();
        run.require(
            unchanged && origin.state() == before,
            format_args!("the refused truncation to {to} changed something"),
        );
        if let Err(CacheError::Irreversible {
            sequence, oldest, ..
        }) = run.cache.truncate(&shortened(&origin, to))
        {
            let mut there = run.cache.split();
            run.require(
                to < oldest
                    && sequence < origin.lengths.len()
                    && oldest <= origin.lengths[sequence],
                format_args!("truncation to {to} names {oldest} of sequence {sequence}"),
            );
            let reached = origin.lengths.len() > 1 || there.truncate(&[oldest]).is_ok();
            run.require(
                reached,
                format_args!("{oldest} cannot be reached, though it is named"),
            );
        }
        reference.feed_all(past);
        goes_on(run, reference, to);
    }
}

/// Every sequence shortened to `to`, as far as it is longer.
fn shortened(run: &TestRun<'_>, to: usize) -> Vec<usize> {
    run.lengths.iter().map(|&length| to.min(length)).collect()
}

fn must_reach(contract: &Contract, origin: &TestRun<'_>, to: usize, last_call: usize) -> bool {
    let complete = || {
        (0..origin.layers()).all(|layer| {
            let kept = origin.cached(layer);
            let rows = origin.lengths.iter().enumerate();
            let lists = rows.flat_map(|(row, &n)| kept.sequence(row).iter().map(move |l| (l, n)));
            lists.into_iter().all(|(list, length)| list.len() == length)
        })
    };
    match contract.reach {
        Reach::Everywhere => true,
        Reach::LastCall => to >= last_call || complete(),
        Reach::NothingDropped => origin.prompts.iter().all(Option::is_some) && complete(),
        Reach::Nowhere => false,
    }
}

/// The first `to` tokens of every row in the same calls. A prompt that was over is over where it is cut.
fn cut(past: &[Call], to: usize, over: bool) -> Vec<Call> {
    let mut left = vec![to; past[0].rows.len()];
    let mut calls = Vec::new();
    for call in past {
        let mut call = call.clone();
        for (tokens, left) in call.rows.iter_mut().zip(&mut left) {
            tokens.truncate(*left);
            *left -= tokens.len();
        }
        if call.rows.iter().any(|tokens| !tokens.is_empty()) {
            calls.push(call);
        }
    }
    if let Some(last) = calls.last_mut().filter(|_| over) {
        last.more_follows = false;
    }
    calls
}

/// Both go on alike: where they stand, and in calls that come next.
fn goes_on(mut run: TestRun<'_>, mut reference: TestRun<'_>, to: usize) {
    if to > 0 {
        let (ours, theirs) = (run.text_state(), reference.text_state());
        run.require(
            ours == theirs,
            format_args!("truncated to {to}, it stands at {ours:?} and not at {theirs:?}"),
        );
    }
    let next: Vec<Call> = match run.lengths.len() {
        4 => text(127, 0, &[[2, 1, 0, 9], [1; 4], [5; 4]]),
        _ => text(128, 0, &[[2], [1], [12], [1]]),
    };
    for call in &next {
        let (expected, found) = (reference.feed(call), run.feed(call));
        let what = format!("a cache that never went beyond (truncated to {to})");
        run.require_same(&found, &reference, &expected, &what);
    }
}
