//! The fingerprint of a decoder.

use std::{iter::once, ops::Range};

use burn::tensor::Tensor;

use super::{Block, Decoder};
use crate::{
    exact::{Linear, Norm, Weight},
    fields::lines,
    fingerprint::Fingerprint,
};

impl Decoder {
    /// A hash of the configuration and of all weights, as the numbers that they are multiplied as. It identifies this
    /// decoder, on every device, in every layout and in every version of this crate: session files contain it.
    ///
    /// The parts that are [hashed](Fingerprint::of) are the fields of the configuration, a line for each, then name and
    /// bytes of every weight. Names are those of [`from_weights`](Self::from_weights), and so are shapes.
    ///
    /// # Panics
    /// If a weight cannot be read back from the device.
    ///
    /// # Cost
    /// Reads every weight, so compute it once.
    #[must_use]
    pub fn fingerprint(&self) -> Fingerprint {
        let config = self.config();
        let ends = [
            ("embedding", Some(&self.embedding)),
            ("head", (!config.tied_head).then_some(&self.head.weight)),
        ];
        let ends = ends.into_iter().filter_map(|(name, weight)| {
            let all = columns(weight?, 0..config.vocab);
            Some((name.to_owned(), all))
        });
        let names = config.block_weights();
        let blocks = self.blocks.iter().enumerate().flat_map(|(layer, block)| {
            names.iter().map(move |(name, _)| {
                let all = self.block_weight(block, name);
                (format!("layers.{layer}.{name}"), all)
            })
        });
        let last = once(("final_norm".to_owned(), bytes(&self.final_norm.weight)));
        let weights = ends.chain(blocks).chain(last);
        let weights = weights.flat_map(|(name, weight)| [name.into_bytes(), weight]);
        Fingerprint::of(once(lines(&config.fields()).into_bytes()).chain(weights))
    }

    /// A weight of a block by its neutral name: what lies side by side in memory is apart here.
    fn block_weight(&self, block: &Block, name: &str) -> Vec<u8> {
        let config = self.config();
        let (hidden, inner) = (config.hidden, config.intermediate);
        let queries = config.heads * config.head_dim;
        let kv = config.kv_heads * config.head_dim;
        let (attention, feed_forward) = (&block.attention, &block.feed_forward);
        let (name, is_bias) = match name.strip_suffix(".bias") {
            Some(name) => (name, true),
            None => (name, false),
        };
        let (linear, range) = match name {
            "attention_norm" => return bytes(&attention.norm.weight),
            "query_norm" => return norm(attention.query_norm.as_ref()),
            "key_norm" => return norm(attention.key_norm.as_ref()),
            "post_attention_norm" => return norm(attention.post_norm.as_ref()),
            "feed_forward_norm" => return bytes(&feed_forward.norm.weight),
            "post_feed_forward_norm" => return norm(feed_forward.post_norm.as_ref()),
            "query" => (&attention.query, 0..queries),
            "key" => (&attention.key_value, 0..kv),
            "value" => (&attention.key_value, kv..2 * kv),
            "output" => (&attention.output, 0..hidden),
            "gate" => (&feed_forward.gate_up, 0..inner),
            "up" => (&feed_forward.gate_up, inner..2 * inner),
            "down" => (&feed_forward.down, 0..hidden),
            name => unreachable!("blocks have no weight {name}"),
        };
        match is_bias {
            true => bias(linear, range),
            false => columns(&linear.weight, range),
        }
    }
}

fn bytes<const D: usize>(tensor: &Tensor<D>) -> Vec<u8> {
    tensor.clone().into_data().as_bytes().to_vec()
}

/// Columns of a weight one after another.
fn columns(weight: &Weight, range: Range<usize>) -> Vec<u8> {
    let range: Vec<u32> = range.map(|column| column as u32).collect();
    bytes(&weight.columns(&range))
}

fn norm(norm: Option<&Norm>) -> Vec<u8> {
    norm.map_or_else(Vec::new, |norm| bytes(&norm.weight))
}

fn bias(linear: &Linear, range: Range<usize>) -> Vec<u8> {
    let of = |bias: &Tensor<1>| bytes(&bias.clone().slice_dim(0, range));
    linear.bias.as_ref().map_or_else(Vec::new, of)
}
