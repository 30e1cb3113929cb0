//! What a step cannot do without: bytes to read, and floating-point operations.

use kv_direct::model::Decoder;

/// Bytes of a step of one token in each of `sequences`, at `context` tokens in each: every weight once, and the keys
/// and values of every context and new token.
pub(crate) fn bytes_of_step(decoder: &Decoder, sequences: usize, context: usize) -> usize {
    let entries = sequences * (context + 1);
    weights(decoder) * size_of::<f32>() + entries * decoder.shape().keys_values_per_token()
}

/// Operations of the same step.
pub(crate) fn operations_of_step(decoder: &Decoder, sequences: usize, context: usize) -> usize {
    sequences * (2 * weights(decoder) + operations_of_pair(decoder) * (context + 1))
}

/// Operations of a prompt of `tokens` tokens whose last logits are computed.
pub(crate) fn operations_of_prompt(decoder: &Decoder, tokens: usize) -> usize {
    let config = decoder.config();
    let head = config.vocab * config.hidden;
    let products = 2 * ((weights(decoder) - head) * tokens + head);
    products + operations_of_pair(decoder) * (tokens * (tokens + 1) / 2)
}

/// Operations of all heads and layers for a query and a key that it sees: a score, and a weighted value.
fn operations_of_pair(decoder: &Decoder) -> usize {
    let config = decoder.config();
    4 * config.heads * config.head_dim * config.layers.len()
}

/// Numbers in all weights. Of an embedding that is not the head a row is read, not counted.
fn weights(decoder: &Decoder) -> usize {
    let config = decoder.config();
    let mut weights = config.weights().expect("a decoder's configuration fits");
    weights.retain(|(name, _)| config.tied_head || name != "embedding");
    let sizes = weights.iter().map(|(_, shape)| shape.iter());
    sizes.map(|shape| shape.product::<usize>()).sum()
}
