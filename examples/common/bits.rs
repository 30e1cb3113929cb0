//! Logits compared bit by bit.

/// Whether two rows of logits are the same bits.
pub(crate) fn same_bits(one: &[f32], other: &[f32]) -> bool {
    let mut pairs = one.iter().zip(other);
    one.len() == other.len() && pairs.all(|(a, b)| a.to_bits() == b.to_bits())
}
