//! The paper's patching experiment: the residual stream is the whole state.

use kv_direct::{
    cache::{CacheBackend, FullKv, Step},
    model::Decoder,
};

use crate::support::{bits, tiny, tokens};

/// Stops `recipient`'s forward before layer `at`, puts `donor`'s residuals of all positions in, and
/// lets the rest run on: the bits of the logits, and those of the donor's own run.
pub fn patch(
    decoder: &Decoder,
    recipient: &[u32],
    donor: &[u32],
    at: usize,
) -> (Vec<u32>, Vec<u32>) {
    let layers = decoder.shape().layers();
    let run = |tokens: &[u32], replaced: Option<_>| {
        let mut cache = FullKv::new(&decoder.shape());
        let step = Step::new(tokens.into(), &[0]).expect("tokens");
        cache.begin(&step).expect("a fresh cache");
        let residual = decoder.embed(step.tokens()).expect("ids of the vocabulary");
        let residual = decoder
            .run(0..at, residual, &step, &mut cache)
            .expect("a good call");
        let entering = residual.clone();
        let residual = decoder
            .run(at..layers, replaced.unwrap_or(residual), &step, &mut cache)
            .expect("a good call");
        cache.commit().expect("every layer had its turn");
        (entering, bits(&decoder.logits(residual)))
    };
    let (state, expected) = run(donor, None);
    let (own, _) = run(recipient, None);
    assert_ne!(
        bits(&own),
        bits(&state),
        "the two prompts differ before layer {at}"
    );
    (run(recipient, Some(state)).1, expected)
}

/// KL divergence of the distributions of a row of logits, in nats.
pub fn kl(p: &[u32], q: &[u32]) -> f64 {
    let log_softmax = |bits: &[u32]| {
        let logits: Vec<f64> = bits.iter().map(|&b| f64::from(f32::from_bits(b))).collect();
        let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total = logits.iter().map(|l| (l - max).exp()).sum::<f64>().ln();
        logits
            .into_iter()
            .map(|l| l - max - total)
            .collect::<Vec<_>>()
    };
    log_softmax(p)
        .iter()
        .zip(log_softmax(q))
        .map(|(p, q)| p.exp() * (p - q))
        .sum()
}

#[test]
fn another_prompts_residuals_give_that_prompts_output_at_every_layer() {
    for kv_heads in [1, 2, 4] {
        let decoder = tiny(kv_heads);
        let (recipient, donor) = (tokens(1, 30), tokens(900, 30));
        for layer in 0..decoder.shape().layers() {
            let (patched, expected) = patch(&decoder, &recipient, &donor, layer);
            assert_eq!(patched, expected, "layer {layer}");
            assert_eq!(kl(&patched[29 * 97..], &expected[29 * 97..]), 0.0);
        }
    }
}
