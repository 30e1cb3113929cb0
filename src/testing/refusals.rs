//! Laws of refusals: the state of a cache after a refused call and after a failed step.

use burn::tensor::Device;

use super::{
    contract::{Contract, TIGHT},
    models::{POSITIONS, TextStep, VOCAB, mixed, models, ragged, text},
    test_run::TestRun,
};
use crate::{
    cache::{CacheBackend, CacheError, Step},
    model::ForwardError,
};

/// A refused call returns the right error and changes nothing, neither what the cache reports nor the bits of the
/// next step.
///
/// The calls are empty steps, another number of sequences, gaps, overlaps, tokens outside the vocabulary, texts
/// beyond the model's positions, truncations beyond the end, and a commit without a step.
///
/// # Panics
/// If the law is broken.
pub(super) fn a_refused_call_changes_nothing(contract: &Contract, device: &Device) {
    let models = models(device);
    for model in models
        .iter()
        .filter(|m| contract.serves(&m.decoder.shape()))
    {
        for past in [mixed(81), ragged(82)] {
            let law = "a refused call changes nothing";
            let mut run = TestRun::new(law, contract, model, TIGHT);
            run.process_all(&past[..past.len() - 1]);
            let next = &past[past.len() - 1];
            for (what, invalid) in INVALID {
                let (before, mut untouched) = (run.snapshot(), run.split());
                let unexpected = invalid(&mut run);
                run.require(
                    unexpected.is_none(),
                    format_args!("{what} returned {unexpected:?}, expected another error"),
                );
                let after = run.snapshot();
                run.require(
                    after == before,
                    format_args!("after {what}: {after:?}, expected {before:?}"),
                );
                let mut touched = run.split();
                let (expected, found) = (untouched.process(next), touched.process(next));
                let what = format!("a cache without {what}");
                touched.require_same(&found, &untouched, &expected, &what);
            }
            run.process(next);
        }
    }
}

/// Makes an invalid call. Returns its result if that is not the right error.
type Invalid = fn(&mut TestRun<'_>) -> Option<String>;

/// Compares a result with the pattern of the right error.
macro_rules! expect {
    ($found:expr, $error:pat) => {
        match $found {
            $error => None,
            other => Some(format!("{other:?}")),
        }
    };
}

const INVALID: &[(&str, Invalid)] = &[
    ("a step without sequences", |run| {
        expect!(
            run.refused(vec![]),
            ForwardError::Cache(CacheError::EmptyStep { .. })
        )
    }),
    ("a step without tokens", |run| {
        let tokens = vec![vec![]; run.lengths.len()];
        expect!(
            run.refused(tokens),
            ForwardError::Cache(CacheError::EmptyStep { .. })
        )
    }),
    ("a step with one sequence more", |run| {
        let tokens = vec![vec![1]; run.lengths.len() + 1];
        expect!(
            run.refused(tokens),
            ForwardError::Cache(CacheError::Sequences { .. })
        )
    }),
    ("a token outside the vocabulary", |run| {
        let tokens = vec![vec![3, VOCAB]; run.lengths.len()];
        expect!(run.refused(tokens), ForwardError::Vocabulary { .. })
    }),
    ("more positions than the model has", |run| {
        let tokens = vec![vec![1; POSITIONS]; run.lengths.len()];
        expect!(run.refused(tokens), ForwardError::ContextFull { .. })
    }),
    ("a gap in the last sequence", |run| {
        expect!(shifted(run, 1), Err(CacheError::Gap { .. }))
    }),
    ("an overlap in the last sequence", |run| {
        expect!(shifted(run, -1), Err(CacheError::Gap { .. }))
    }),
    ("a truncation beyond the end", |run| {
        let to = run.lengths.iter().max().map_or(1, |longest| longest + 1);
        let to = vec![to; run.lengths.len()];
        expect!(
            run.cache.truncate(&to),
            Err(CacheError::TruncateBeyond { .. })
        )
    }),
    ("a commit without a step", |run| {
        expect!(run.cache.commit(), Err(CacheError::Uncommittable { .. }))
    }),
];

/// Begins a step in which the last sequence starts `by` positions from its end.
fn shifted(run: &mut TestRun<'_>, by: isize) -> Result<(), CacheError> {
    let mut starts = run.lengths.clone();
    if let Some(last) = starts.last_mut() {
        *last = last.saturating_add_signed(by);
    }
    let tokens = vec![vec![1, 2]; starts.len()];
    let step = Step::new(tokens.into(), &starts)?;
    run.cache.begin(&step)
}

/// A step that ended midway cannot be committed. A report of attention that was not asked for fails the step.
///
/// Until `clear`, which makes the cache as new, every call that could change the cache returns
/// [`Poisoned`](CacheError::Poisoned). A step that is begun twice is refused as well.
///
/// # Panics
/// If the law is broken.
pub(super) fn a_failed_step_needs_a_clear(contract: &Contract, device: &Device) {
    let models = models(device);
    let law = "a failed step needs a clear";
    for model in models
        .iter()
        .filter(|m| contract.serves(&m.decoder.shape()))
    {
        let past = mixed(91);
        a_wrong_report_is_refused(TestRun::new(law, contract, model, TIGHT));
        for layers in 0..model.decoder.shape().layers() {
            let mut run = TestRun::new(law, contract, model, TIGHT);
            run.process_all(&past[..4]);
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
                format_args!(
                    "commit after {layers} layers returned {found:?}, expected Uncommittable"
                ),
            );
            let found = [run.cache.begin(&step), run.cache.truncate(&[length - 1])];
            let poisoned = |result: &Result<(), _>| matches!(result, Err(CacheError::Poisoned));
            run.require(
                found.iter().all(poisoned),
                format_args!(
                    "begin and truncate after {layers} layers returned {found:?}, expected Poisoned"
                ),
            );
            let found = run.refused(vec![vec![1]]);
            run.require(
                matches!(found, ForwardError::Cache(CacheError::Poisoned)),
                format_args!(
                    "a step after {layers} layers of another returned {found:?}, expected Poisoned"
                ),
            );
            let found = run.cache.lengths();
            run.require(
                found == [length],
                format_args!("after a failed step the lengths are {found:?}, expected [{length}]"),
            );
            let _ = run.snapshot();
            run.clear();
            let mut new = TestRun::new(law, contract, model, TIGHT);
            let next: Vec<TextStep> = text(92, 0, &[[10, 3], [1, 1], [1, 12]]);
            for step in &next {
                let (expected, found) = (new.process(step), run.process(step));
                run.require_same(&found, &new, &expected, "a new cache");
            }
        }
    }
}

/// Attention reports in another form than the backend wants, or where it wants nothing.
fn a_wrong_report_is_refused(mut run: TestRun<'_>) {
    run.cache.misreport();
    let found = run.refused(vec![vec![4, 2]]);
    run.require(
        matches!(found, ForwardError::Cache(CacheError::Observation { .. })),
        format_args!(
            "a report of another kind than asked for returned {found:?}, expected Observation"
        ),
    );
    let found = run.refused(vec![vec![1]]);
    run.require(
        matches!(found, ForwardError::Cache(CacheError::Poisoned)),
        format_args!("a step after a wrong report returned {found:?}, expected Poisoned"),
    );
}
