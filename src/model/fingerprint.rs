//! The fingerprint of a decoder.

use std::iter::{once, once_with};

use burn::tensor::Tensor;

use super::{Decoder, linear::Linear};
use crate::{exact::Weight, fingerprint::Fingerprint};

impl Decoder {
    /// A hash of the configuration and of all weights, as the numbers that they are multiplied as. It identifies this
    /// decoder, on every device and in every layout.
    ///
    /// # Panics
    /// If a weight cannot be read back from the device.
    ///
    /// # Cost
    /// Reads every weight, so compute it once.
    #[must_use]
    pub fn fingerprint(&self) -> Fingerprint {
        fn bytes<const D: usize>(tensor: &Tensor<D>) -> Vec<u8> {
            tensor.clone().into_data().as_bytes().to_vec()
        }
        fn columns(weight: &Weight) -> Vec<u8> {
            let all: Vec<u32> = (0..weight.dims()[1] as u32).collect();
            bytes(&weight.columns(&all))
        }
        fn some<const D: usize>(tensor: Option<&Tensor<D>>) -> Vec<u8> {
            tensor.map_or_else(Vec::new, bytes)
        }
        let linear =
            |linear: &Linear| [columns(&linear.weight), some(linear.bias.as_ref())].concat();
        let blocks = self.blocks.iter().flat_map(|block| {
            let attention = &block.attention;
            [
                bytes(&block.attention_norm),
                linear(&attention.query),
                linear(&attention.key_value),
                linear(&attention.output),
                some(attention.query_norm.as_ref()),
                some(attention.key_norm.as_ref()),
                some(block.post_attention_norm.as_ref()),
                bytes(&block.feed_forward_norm),
                linear(&block.feed_forward.gate_up),
                linear(&block.feed_forward.down),
                some(block.post_feed_forward_norm.as_ref()),
            ]
        });
        let config = format!("{:?}", self.config()).into_bytes();
        let ends = once_with(|| columns(&self.embedding))
            .chain(once_with(|| bytes(&self.final_norm)))
            .chain(once_with(|| columns(&self.head)));
        Fingerprint::of(once(config).chain(ends).chain(blocks))
    }
}
