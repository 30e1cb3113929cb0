//! The law of truncation: exact or refused.

use burn::tensor::Device;

use super::{
    contract::{AMPLE, Contract, Reach, TIGHT},
    models::{Model, TextStep, mixed, models, ragged, text},
    test_run::TestRun,
};
use crate::cache::{CacheBackend, CacheError};

/// After `truncate(to)` a cache continues with the bits and entries of one that processed the same steps, cut off at
/// `to`. Or it refuses with [`Irreversible`](CacheError::Irreversible), names a length that can be reached, and has
/// not changed.
///
/// All layers are truncated, or none. Sequences shorter than `to` do not change. The last step of a batch is undone
/// to a different length for each sequence. Truncation to the end, to 0, and to what the [`Contract`] claims must not
/// be refused.
///
/// # Panics
/// If the law is broken.
pub(super) fn a_truncation_is_exact_or_refused(contract: &Contract, device: &Device) {
    let models = models(device);
    for model in models
        .iter()
        .filter(|m| contract.serves(&m.decoder.shape()))
    {
        // A short prompt and a short reply, the middle of a prompt, and longer ones.
        let short = text(121, 0, &[[6], [1], [1]]);
        let open = text(122, 2, &[[6], [5], [7]]);
        for past in [&short, &open[..2], &open, &mixed(123)] {
            every_length(contract, model, past, TIGHT);
        }
        every_length(contract, model, &mixed(123), AMPLE);
        every_length(contract, model, &ragged(125)[..2], TIGHT);
        let ragged = ragged(126);
        for steps in 2..=ragged.len() {
            last_step(contract, model, &ragged[..steps]);
        }
    }
}

/// Undoes the last step of a batch, to lengths that differ between sequences.
fn last_step(contract: &Contract, model: &Model, past: &[TextStep]) {
    let law = "a truncation is exact or refused";
    let [before @ .., last] = past else { return };
    let make = || TestRun::new(law, contract, model, TIGHT);
    let (mut run, mut reference) = (make(), make());
    run.process_all(before);
    reference.process_all(before);
    let to = run.lengths.clone();
    run.process(last);
    let there = run.snapshot();
    match run.cache.truncate(&to) {
        Ok(()) => {
            (run.lengths, run.prompts) = (to, reference.prompts.clone());
            continues(run, reference, 1);
        }
        Err(CacheError::Irreversible { .. }) => {
            let lossless = matches!(contract.reach, Reach::Everywhere | Reach::LastStep);
            run.require(
                !lossless,
                format_args!("the last step cannot be undone to the lengths {to:?}"),
            );
            let after = run.snapshot();
            run.require(
                after == there,
                format_args!("after a refused truncation: {after:?}, expected {there:?}"),
            );
        }
        Err(error) => run.broken(format_args!("truncation to {to:?} failed: {error}")),
    }
}

fn every_length(contract: &Contract, model: &Model, past: &[TextStep], budget: usize) {
    let law = "a truncation is exact or refused";
    let mut origin = TestRun::new(law, contract, model, budget);
    let mut last_start = 0;
    for step in past {
        last_start = origin.lengths.iter().copied().max().unwrap_or(0);
        origin.process(step);
    }
    let longest = origin.lengths.iter().copied().max().unwrap_or(0);
    let mut lengths = vec![0, 5, last_start - 1, last_start, longest - 1, longest];
    lengths.sort_unstable();
    lengths.dedup();
    for to in lengths {
        let (mut run, before) = (origin.split(), origin.snapshot());
        let mut reference = TestRun::new(law, contract, model, budget);
        if run.truncate(to) {
            reference.process_all(&cut(past, to, origin.prompts.iter().all(Option::is_some)));
            continues(run, reference, to);
            continue;
        }
        let claimed = [0, longest].contains(&to) || must_reach(contract, &origin, to, last_start);
        run.require(!claimed, format_args!("truncation to {to} was refused"));
        run.require_contents(&origin, "the cache before the refused truncation");
        let after = origin.snapshot();
        run.require(
            after == before,
            format_args!(
                "after the refused truncation of a fork to {to}: {after:?}, expected {before:?}"
            ),
        );
        if let Err(CacheError::Irreversible {
            sequence, shortest, ..
        }) = run.cache.truncate(&shortened(&origin, to))
        {
            let mut there = run.cache.split();
            run.require(
                to < shortest
                    && sequence < origin.lengths.len()
                    && shortest <= origin.lengths[sequence],
                format_args!("the refused truncation to {to} names the length {shortest} of sequence {sequence}, expected one between {to} and its end"),
            );
            let reached = origin.lengths.len() > 1 || there.truncate(&[shortest]).is_ok();
            run.require(
                reached,
                format_args!("the refused truncation to {to} names the length {shortest}, which cannot be reached either"),
            );
        }
        reference.process_all(past);
        continues(run, reference, to);
    }
}

/// The lengths after every sequence is shortened to `to`, if it is longer.
fn shortened(run: &TestRun<'_>, to: usize) -> Vec<usize> {
    run.lengths.iter().map(|&length| to.min(length)).collect()
}

fn must_reach(contract: &Contract, origin: &TestRun<'_>, to: usize, last_start: usize) -> bool {
    let complete = || {
        (0..origin.layers()).all(|layer| {
            let cached = origin.cached(layer);
            let sequences = origin.lengths.iter().enumerate();
            let lists =
                sequences.flat_map(|(i, &n)| cached.sequence(i).iter().map(move |l| (l, n)));
            lists.into_iter().all(|(list, length)| list.len() == length)
        })
    };
    match contract.reach {
        Reach::Everywhere => true,
        Reach::LastStep => to >= last_start || complete(),
        Reach::NothingEvicted => origin.prompts.iter().all(Option::is_some) && complete(),
        Reach::Nowhere => false,
    }
}

/// The first `to` tokens of every sequence, in the same steps. With `complete`, the prompt ends where it is cut.
fn cut(past: &[TextStep], to: usize, complete: bool) -> Vec<TextStep> {
    let mut left = vec![to; past[0].tokens.len()];
    let mut steps = Vec::new();
    for step in past {
        let mut step = step.clone();
        for (tokens, left) in step.tokens.iter_mut().zip(&mut left) {
            tokens.truncate(*left);
            *left -= tokens.len();
        }
        if step.tokens.iter().any(|tokens| !tokens.is_empty()) {
            steps.push(step);
        }
    }
    if let Some(last) = steps.last_mut().filter(|_| complete) {
        last.more_follows = false;
    }
    steps
}

/// Checks that both have the same contents and continue with the same bits.
fn continues(mut run: TestRun<'_>, mut reference: TestRun<'_>, to: usize) {
    let what = format!("a cache that never had more tokens (truncated to {to})");
    if to > 0 {
        run.require_contents(&reference, &what);
    }
    let next: Vec<TextStep> = match run.lengths.len() {
        4 => text(127, 0, &[[2, 1, 0, 9], [1; 4], [5; 4]]),
        _ => text(128, 0, &[[2], [1], [12], [1]]),
    };
    for step in &next {
        let (expected, found) = (reference.process(step), run.process(step));
        run.require_same(&found, &reference, &expected, &what);
    }
}
