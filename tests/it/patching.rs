//! The paper's patching experiment: the residual stream is the whole state.

use kv_direct::{
    cache::{CacheBackend, Step},
    model::Decoder,
    policy::FullKv,
};

use crate::{
    kl::kl,
    support::{bits, tiny, tokens},
};

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

#[test]
fn another_prompts_residuals_give_that_prompts_output_at_every_layer() {
    for kv_heads in [1, 2, 4] {
        let decoder = tiny(kv_heads);
        let (recipient, donor) = (tokens(1, 30), tokens(900, 30));
        for layer in 0..decoder.shape().layers() {
            let (patched, expected) = patch(&decoder, &recipient, &donor, layer);
            assert_eq!(patched, expected, "layer {layer}");
            assert_eq!(last_kl(&patched, &expected, 97), 0.0);
        }
    }
}
