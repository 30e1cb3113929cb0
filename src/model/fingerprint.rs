//! The fingerprint of a decoder.

use std::iter::{once, once_with};

use burn::tensor::Tensor;

use super::Decoder;
use crate::{
    exact::{Linear, Norm, Weight},
    fingerprint::Fingerprint,
};

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
        let norm = |norm: Option<&Norm>| some(norm.map(|norm| &norm.weight));
        let blocks = self.blocks.iter().flat_map(|block| {
            let (attention, feed_forward) = (&block.attention, &block.feed_forward);
            [
                bytes(&attention.norm.weight),
                linear(&attention.query),
                linear(&attention.key_value),
                linear(&attention.output),
                norm(attention.query_norm.as_ref()),
                norm(attention.key_norm.as_ref()),
                norm(attention.post_norm.as_ref()),
                bytes(&feed_forward.norm.weight),
                linear(&feed_forward.gate_up),
                linear(&feed_forward.down),
                norm(feed_forward.post_norm.as_ref()),
            ]
        });
        let config = format!("{:?}", self.config()).into_bytes();
        let ends = once_with(|| columns(&self.embedding))
            .chain(once_with(|| bytes(&self.final_norm.weight)))
            .chain(once_with(|| columns(&self.head.weight)));
        Fingerprint::of(once(config).chain(ends).chain(blocks))
    }
}
