//! Divergence of two distributions given by their logits.

/// KL divergence of `q` from `p` in nats, taken in f64.
pub(crate) fn kl(p: &[f32], q: &[f32]) -> f64 {
    log_softmax(p)
        .iter()
        .zip(log_softmax(q))
        .map(|(p, q)| p.exp() * (p - q))
        .sum()
}

/// Logarithms of the probabilities, taken in f64.
pub(crate) fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total = logits
        .iter()
        .map(|&logit| f64::from(logit - max).exp())
        .sum::<f64>()
        .ln();
    logits
        .iter()
        .map(|&logit| f64::from(logit - max) - total)
        .collect()
}
