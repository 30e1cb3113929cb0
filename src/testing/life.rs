//! Laws of a cache's life: clearing, forking, taking turns.

use burn::tensor::Device;

use super::{
    contract::{Contract, TIGHT},
    models::{Call, chunked, mixed, models, ragged},
    test_run::{Logits, State, TestRun},
};
use crate::cache::{CacheBackend, LayerIndex, Step};

/// What a text gives: logits and state after each call.
fn through(run: &mut TestRun<'_>, text: &[Call]) -> Vec<(Logits, State)> {
    text.iter()
        .map(|call| (run.feed(call), run.state()))
        .collect()
}

/// After `clear` and after `truncate(0)` a cache is as new, whatever happened to it before: it holds
/// nothing, takes another number of batch rows, and gives the bits, positions and bytes of a fresh one in
/// every later call. That holds after a whole text, within a prompt, and in an open step.
///
/// # Panics
/// If the law is broken.
pub fn cleared_is_fresh(contract: &Contract, device: &Device) {
    let models = models(device);
    let law = "cleared is fresh";
    for model in models
        .iter()
        .filter(|m| contract.serves(&m.decoder.shape()))
    {
        let next = [chunked(62), ragged(65)];
        let fresh = next.each_ref().map(|text| {
            through(
                &mut TestRun::new(law, contract, model, TIGHT).unrecorded(),
                text,
            )
        });
        let mut run = TestRun::new(law, contract, model, TIGHT).unrecorded();
        let pasts = [ragged(63), chunked(64)[..2].to_vec(), mixed(66)];
        for (turn, past) in pasts.iter().enumerate() {
            for (text, fresh) in next.iter().zip(&fresh) {
                run.feed_all(past);
                match turn {
                    0 => {
                        let emptied = run.truncate(0);
                        run.require(emptied, "truncation to 0 was refused");
                        (run.lengths, run.prompts) = (Vec::new(), Vec::new());
                    }
                    1 => run.clear(),
                    _ => {
                        let rows = vec![vec![1, 2, 3]; run.lengths.len()];
                        let step = Step::new(rows.into(), &run.lengths);
                        let begun = step.and_then(|step| run.cache.begin(&step));
                        run.require(begun.is_ok(), "a good step was refused");
                        run.clear();
                    }
                }
                let held = run.cache.memory().total();
                run.require(held == 0, format_args!("{held} bytes are held"));
                let kept = run.cache.cached(LayerIndex::new(0)).sequences();
                run.require(
                    kept == 0 && run.cache.lengths().is_empty(),
                    "rows or positions are left",
                );
                let found = through(&mut run, text);
                for (call, (found, fresh)) in found.iter().zip(fresh).enumerate() {
                    run.require(
                        found.0 == fresh.0,
                        format_args!("call {call} has other logits than in a fresh cache"),
                    );
                    let (found, fresh) = (&found.1, &fresh.1);
                    run.require(
                        found == fresh,
                        format_args!("after call {call}: {found:?}, in a fresh cache {fresh:?}"),
                    );
                }
                run.clear();
            }
        }
    }
}

/// Caches that take turns on one decoder, and a fork and its origin, each go on as if alone; a fork of a
/// fork as well, and a fork whose origin was cleared.
///
/// # Panics
/// If the law is broken.
pub fn caches_do_not_touch_each_other(contract: &Contract, device: &Device) {
    let models = models(device);
    let law = "caches do not touch each other";
    for model in models
        .iter()
        .filter(|m| contract.serves(&m.decoder.shape()))
    {
        for (a, b) in [(mixed(71), mixed(72)), (ragged(75), ragged(76))] {
            let make = || TestRun::new(law, contract, model, TIGHT).unrecorded();
            let alone = make().feed_all(&a);
            let (mut one, mut two) = (make(), make());
            for (call, expected) in a.iter().zip(&alone) {
                let found = one.feed(call);
                one.require(
                    found == *expected,
                    "another cache on the decoder was noticed",
                );
                two.feed(&b[0]);
            }
            for at in [1, 3] {
                // What a fork goes on with: the other text's calls.
                let mixture: Vec<Call> = a[..at].iter().chain(&b[at..]).cloned().collect();
                let expected = make().feed_all(&mixture);
                let mut origin = make();
                origin.feed_all(&a[..at]);
                let mut fork = origin.split();
                let (ours, theirs) = (fork.text_state(), origin.text_state());
                fork.require(ours == theirs, "a fork has other rows than its origin");
                let mut second = fork.split();
                for call in at..a.len() {
                    let found = fork.feed(&b[call]);
                    fork.require(found == expected[call], "a fork noticed its origin");
                    let found = origin.feed(&a[call]);
                    origin.require(found == alone[call], "the origin noticed its fork");
                }
                origin.cache.clear();
                fork.cache.clear();
                for call in at..a.len() {
                    let found = second.feed(&a[call]);
                    second.require(found == alone[call], "a fork of a fork noticed the others");
                }
            }
        }
    }
}
