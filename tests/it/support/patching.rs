//! Runs a decoder with the residuals of another prompt.

use kv_direct::{
    cache::{CacheBackend, Step},
    model::Decoder,
    policy::FullKv,
};

use crate::support::{feed::bits, kl::kl};

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
            .expect("a valid step");
        let entering = residual.clone();
        let residual = decoder
            .run(at..layers, replaced.unwrap_or(residual), &step, &mut cache)
            .expect("a valid step");
        cache.commit().expect("every layer was called");
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

/// D_KL of the last token's distributions.
pub fn last_kl(p: &[u32], q: &[u32], vocab: usize) -> f64 {
    let [p, q] = [p, q].map(|bits| {
        bits[bits.len() - vocab..]
            .iter()
            .map(|&b| f32::from_bits(b))
            .collect::<Vec<_>>()
    });
    kl(&p, &q)
}
