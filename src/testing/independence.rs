//! Laws of clearing and forking.

use burn::tensor::Device;

use super::{
    contract::{Contract, TIGHT},
    models::{TextStep, chunked, mixed, models, ragged},
    test_run::{Logits, Snapshot, TestRun},
};
use crate::cache::{CacheBackend, LayerIndex, Step};

/// Logits and snapshot after each step of a text.
fn through(run: &mut TestRun<'_>, text: &[TextStep]) -> Vec<(Logits, Snapshot)> {
    text.iter()
        .map(|step| (run.process(step), run.snapshot()))
        .collect()
}

/// After `clear` and after truncation to 0, a cache is as new. It holds nothing, accepts another number of sequences,
/// and has the bits, positions and bytes of a new cache in every later step. This holds after a whole text, within a
/// prompt, and while a step is open.
///
/// # Panics
/// If the law is broken.
pub(super) fn a_cleared_cache_is_as_new(contract: &Contract, device: &Device) {
    let models = models(device);
    let law = "a cleared cache is as new";
    for model in models
        .iter()
        .filter(|m| contract.serves(&m.decoder.shape()))
    {
        let next = [chunked(62), ragged(65)];
        let new = next.each_ref().map(|text| {
            through(
                &mut TestRun::new(law, contract, model, TIGHT).unrecorded(),
                text,
            )
        });
        let mut run = TestRun::new(law, contract, model, TIGHT).unrecorded();
        let pasts = [ragged(63), chunked(64)[..2].to_vec(), mixed(66)];
        for (case, past) in pasts.iter().enumerate() {
            for (text, new) in next.iter().zip(&new) {
                run.process_all(past);
                match case {
                    0 => {
                        let emptied = run.truncate(0);
                        run.require(emptied, "truncation to 0 was refused");
                        (run.lengths, run.prompts) = (Vec::new(), Vec::new());
                    }
                    1 => run.clear(),
                    _ => {
                        let tokens = vec![vec![1, 2, 3]; run.lengths.len()];
                        let step = Step::new(tokens.into(), &run.lengths);
                        let begun = step.and_then(|step| run.cache.begin(&step));
                        run.require(begun.is_ok(), "a valid step was refused");
                        run.clear();
                    }
                }
                let held = run.cache.memory().total();
                run.require(
                    held == 0,
                    format_args!("{held} bytes are held, expected none"),
                );
                let cached = run.cache.cached(LayerIndex::new(0)).sequences();
                run.require(
                    cached == 0 && run.cache.lengths().is_empty(),
                    "there are sequences or cached positions, expected none",
                );
                let found = through(&mut run, text);
                for (step, (found, new)) in found.iter().zip(new).enumerate() {
                    run.require_logits(&found.0, &new.0, &format!("step {step} of a new cache"));
                    let (found, new) = (&found.1, &new.1);
                    run.require(
                        found == new,
                        format_args!(
                            "after step {step}: {found:?}, expected {new:?} as in a new cache"
                        ),
                    );
                }
                run.clear();
            }
        }
    }
}

/// Caches that alternate on one decoder do not affect each other, nor do a fork and its origin, a fork of a fork, and
/// a fork whose origin was cleared. Each continues as if it were alone.
///
/// # Panics
/// If the law is broken.
pub(super) fn caches_are_independent(contract: &Contract, device: &Device) {
    let models = models(device);
    let law = "caches are independent";
    for model in models
        .iter()
        .filter(|m| contract.serves(&m.decoder.shape()))
    {
        for (a, b) in [(mixed(71), mixed(72)), (ragged(75), ragged(76))] {
            let make = || TestRun::new(law, contract, model, TIGHT).unrecorded();
            let alone = make().process_all(&a);
            let (mut one, mut two) = (make(), make());
            for (step, expected) in a.iter().zip(&alone) {
                let found = one.process(step);
                one.require_logits(&found, expected, "a cache alone on the decoder");
                two.process(&b[0]);
            }
            for at in [1, 3] {
                // A fork continues with the steps of the other text.
                let mixture: Vec<TextStep> = a[..at].iter().chain(&b[at..]).cloned().collect();
                let expected = make().process_all(&mixture);
                let mut origin = make();
                origin.process_all(&a[..at]);
                let mut fork = origin.split();
                fork.require_contents(&origin, "the origin of the fork");
                let mut second = fork.split();
                for step in at..a.len() {
                    let found = fork.process(&b[step]);
                    let what = "a cache that is no fork";
                    fork.require_logits(&found, &expected[step], what);
                    let found = origin.process(&a[step]);
                    let what = "a cache that was not forked";
                    origin.require_logits(&found, &alone[step], what);
                }
                origin.cache.clear();
                fork.cache.clear();
                for step in at..a.len() {
                    let found = second.process(&a[step]);
                    let what = "a cache that is no fork of a fork";
                    second.require_logits(&found, &alone[step], what);
                }
            }
        }
    }
}
