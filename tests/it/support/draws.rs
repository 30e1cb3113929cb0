//! Draws of a sampler, counted.

use kv_direct::generate::{Sampler, Sampling};

pub fn at_temperature_one() -> Sampling {
    Sampling::new().with_temperature(1.0).expect("in range")
}

/// Logits of these probabilities.
pub fn logits<const N: usize>(probabilities: [f32; N]) -> [f32; N] {
    probabilities.map(f32::ln)
}

/// How often each id is drawn in `draws` draws.
pub fn counts(sampling: &Sampling, logits: &[f32], draws: usize) -> Vec<usize> {
    let mut sampler = Sampler::new(sampling.clone());
    let mut counts = vec![0; logits.len()];
    for _ in 0..draws {
        counts[sampler.choose(logits).expect("finite") as usize] += 1;
    }
    counts
}

/// Which ids are drawn at all; those tested for have a probability of 0.05 at least.
pub fn drawn(sampling: &Sampling, logits: &[f32]) -> Vec<u32> {
    let counts = counts(sampling, logits, 400);
    (0..).zip(counts).filter(|c| c.1 > 0).map(|c| c.0).collect()
}
