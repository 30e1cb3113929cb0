//! Laws of refusal: what a bad call and a failed step leave behind.

use burn::tensor::Device;

use super::{
    contract::{Contract, TIGHT},
    models::{Call, POSITIONS, VOCAB, mixed, models, ragged, text},
    test_run::TestRun,
};
use crate::{
    cache::{CacheBackend, CacheError, Step},
    model::ForwardError,
};

/// A call that is refused is refused with the error that names it, and changes nothing: not what a cache
/// answers, nor the bits of the next call. Empty steps, other numbers of rows, gaps, overlaps, tokens
/// outside the vocabulary, texts beyond the model's positions, truncations beyond the end, a commit
/// without a step.
///
/// # Panics
/// If the law is broken.
pub fn a_refused_call_changes_nothing(contract: &Contract, device: &Device) {
    let models = models(device);
    for model in models
        .iter()
        .filter(|m| contract.serves(&m.decoder.shape()))
    {
        for past in [mixed(81), ragged(82)] {
            let law = "a refused call changes nothing";
            let mut run = TestRun::new(law, contract, model, TIGHT);
            run.feed_all(&past[..past.len() - 1]);
            let next = &past[past.len() - 1];
            for (what, bad) in BAD {
                let (before, mut untouched) = (run.state(), run.split());
                let refused = bad(&mut run);
                run.require(
                    refused.is_none(),
                    format_args!("{what}: answered {refused:?}"),
                );
                let after = run.state();
                run.require(
                    after == before,
                    format_args!("{what}: {after:?}, before {before:?}"),
                );
                let mut touched = run.split();
                let (expected, found) = (untouched.feed(next), touched.feed(next));
                touched.require_same(&found, &untouched, &expected, what);
            }
            run.feed(next);
        }
    }
}

/// Makes a bad call; what it answered if that was not the error it should be.
type Bad = fn(&mut TestRun<'_>) -> Option<String>;

/// A pattern of the error that is due.
macro_rules! due {
    ($found:expr, $error:pat) => {
        match $found {
            $error => None,
            other => Some(format!("{other:?}")),
        }
    };
}

const BAD: &[(&str, Bad)] = &[
    ("a call without rows", |run| {
        due!(
            run.refused(vec![]),
            ForwardError::Cache(CacheError::EmptyStep { .. })
        )
    }),
    ("a call without tokens", |run| {
        let rows = vec![vec![]; run.lengths.len()];
        due!(
            run.refused(rows),
            ForwardError::Cache(CacheError::EmptyStep { .. })
        )
    }),
    ("one batch row more", |run| {
        let rows = vec![vec![1]; run.lengths.len() + 1];
        due!(
            run.refused(rows),
            ForwardError::Cache(CacheError::Sequences { .. })
        )
    }),
    ("a token outside the vocabulary", |run| {
        let rows = vec![vec![3, VOCAB]; run.lengths.len()];
        due!(run.refused(rows), ForwardError::Vocabulary { .. })
    }),
    ("more positions than the model has", |run| {
        let rows = vec![vec![1; POSITIONS]; run.lengths.len()];
        due!(run.refused(rows), ForwardError::ContextFull { .. })
    }),
    ("a gap in the last row", |run| {
        due!(shifted(run, 1), Err(CacheError::Gap { .. }))
    }),
    ("an overlap in the last row", |run| {
        due!(shifted(run, -1), Err(CacheError::Gap { .. }))
    }),
    ("a truncation beyond the end", |run| {
        let to = run.lengths.iter().max().map_or(1, |longest| longest + 1);
        let to = vec![to; run.lengths.len()];
        due!(
            run.cache.truncate(&to),
            Err(CacheError::TruncateBeyond { .. })
        )
    }),
    ("a commit without a step", |run| {
        due!(run.cache.commit(), Err(CacheError::Uncommittable { .. }))
    }),
];

/// Begins a step whose last row does not start where it stands.
fn shifted(run: &mut TestRun<'_>, by: isize) -> Result<(), CacheError> {
    let mut starts = run.lengths.clone();
    if let Some(last) = starts.last_mut() {
        *last = last.saturating_add_signed(by);
    }
    let rows = vec![vec![1, 2]; starts.len()];
    let step = Step::new(rows.into(), &starts)?;
    run.cache.begin(&step)
}

/// A step that ended midway is not committed, and leaves a cache of which only questions are answered:
/// every other call is [`Poisoned`](CacheError::Poisoned) until `clear`, which makes it as new. A step
/// that is begun twice is refused as well.
///
/// # Panics
/// If the law is broken.
pub fn a_failed_step_needs_a_clear(contract: &Contract, device: &Device) {
    let models = models(device);
    let law = "a failed step needs a clear";
    for model in models
        .iter()
        .filter(|m| contract.serves(&m.decoder.shape()))
    {
        let past = mixed(91);
        for layers in 0..model.decoder.shape().layers() {
            let mut run = TestRun::new(law, contract, model, TIGHT);
            run.feed_all(&past[..4]);
            let (length, tokens) = (run.lengths[0], vec![vec![4, 2]]);
            let step = Step::new(tokens.into(), &run.lengths);
            let begun = step.map_err(ForwardError::from).and_then(|step| {
                run.cache.begin(&step)?;
                let residual = model.decoder.embed(step.tokens())?;
                let cache = &mut run.cache;
                model.decoder.run(0..layers, residual, &step, cache)?;
                Ok(step)
            });
            let step = begun.unwrap_or_else(|error| run.broken(error));
            let found = run.cache.commit();
            run.require(
                matches!(found, Err(CacheError::Uncommittable { .. })),
                format_args!("a commit after {layers} layers: {found:?}"),
            );
            let found = [run.cache.begin(&step), run.cache.truncate(&[length - 1])];
            let poisoned = |answer: &Result<(), _>| matches!(answer, Err(CacheError::Poisoned));
            run.require(
                found.iter().all(poisoned),
                format_args!("begin and truncate after {layers} layers: {found:?}"),
            );
            let found = run.refused(vec![vec![1]]);
            run.require(
                matches!(found, ForwardError::Cache(CacheError::Poisoned)),
                format_args!("a call after {layers} layers: {found:?}"),
            );
            run.require(
                run.cache.lengths() == [length],
                "tokens of a failed step are counted",
            );
            let _ = run.state();
            run.clear();
            let mut fresh = TestRun::new(law, contract, model, TIGHT);
            let next: Vec<Call> = text(92, 0, &[[10, 3], [1, 1], [1, 12]]);
            for call in &next {
                let (expected, found) = (fresh.feed(call), run.feed(call));
                run.require_same(&found, &fresh, &expected, "a fresh cache");
            }
        }
    }
}
