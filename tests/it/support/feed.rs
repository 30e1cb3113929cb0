//! Feeds tokens to a decoder, and compares its logits.

use burn::tensor::Tensor;
use kv_direct::{
    cache::{CacheBackend, TokenIds},
    model::{Decoder, ForwardError, Input},
    policy::FullKv,
};

use crate::support::random::VOCAB;

pub fn bits<const D: usize>(tensor: &Tensor<D>) -> Vec<u32> {
    let values = tensor.try_to_vec_as::<f32>().expect("f32 on the CPU");
    values.into_iter().map(f32::to_bits).collect()
}

/// Feeds one step and returns the bits of its logits.
pub fn feed<C>(decoder: &Decoder, cache: &mut C, tokens: impl Into<TokenIds>) -> Vec<u32>
where
    C: CacheBackend + ?Sized,
{
    bits(
        &decoder
            .forward(Input::from(tokens), cache)
            .expect("a valid step"),
    )
}

pub fn refusal(
    decoder: &Decoder,
    cache: &mut dyn CacheBackend,
    tokens: impl Into<TokenIds>,
) -> ForwardError {
    decoder
        .forward(tokens.into(), cache)
        .expect_err("a refused step")
}

/// Logits of each sequence without padding, fed through one `FullKv` in these steps.
pub fn fed(decoder: &Decoder, steps: &[TokenIds]) -> Vec<Vec<f32>> {
    let mut cache = FullKv::new(&decoder.shape());
    let mut sequences = vec![Vec::new(); steps[0].sequences()];
    for step in steps {
        let logits = decoder.forward(step.clone(), &mut cache);
        let logits = logits.expect("the step is accepted");
        assert_eq!(logits.dims(), [sequences.len(), step.longest(), VOCAB]);
        let logits: Vec<f32> = logits.into_data().try_to_vec().expect("logits are f32");
        let batch = logits.chunks_exact(step.longest() * VOCAB);
        for ((sequence, logits), count) in sequences.iter_mut().zip(batch).zip(step.lengths()) {
            sequence.extend_from_slice(&logits[..count * VOCAB]);
        }
    }
    sequences
}

pub fn whole(decoder: &Decoder, tokens: &[u32]) -> Vec<f32> {
    fed(decoder, &[tokens.into()]).swap_remove(0)
}

/// The largest difference; NaN if any is NaN.
pub fn apart(ours: &[f32], theirs: impl IntoIterator<Item = f64>) -> f64 {
    let theirs: Vec<f64> = theirs.into_iter().collect();
    assert_eq!(ours.len(), theirs.len(), "as many logits");
    let differences = ours
        .iter()
        .zip(theirs)
        .map(|(a, b)| (f64::from(*a) - b).abs());
    differences.fold(
        0.0,
        |worst, d| if d > worst || d.is_nan() { d } else { worst },
    )
}

pub fn floats<const D: usize>(tensor: &Tensor<D>) -> Vec<f32> {
    tensor.try_to_vec_as().expect("f32 on the CPU")
}
