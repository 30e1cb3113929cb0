//! A policy of one's own, from the paper to the test suite: `cargo test --example knorm`.
//!
//! Keys with a small L2 norm receive much attention (Devoto et al., arXiv 2406.11430). So this policy evicts, in every
//! layer and KV head, the entries whose keys have the largest norm.

use kv_direct::burn::tensor::{Device, Tensor};
use kv_direct::cache::{CacheBackend, LayerIndex};
use kv_direct::policy::{Attention, Entries, Evicting, Policy, Sequence};
use kv_direct::{Decoder, model::DecoderConfig};

#[derive(Debug, Clone)]
struct KeyNorm {
    budget: usize,
}

impl Policy for KeyNorm {
    const NAME: &'static str = "knorm";
    const PER_HEAD: bool = true;

    fn options(&self) -> Vec<(&'static str, String)> {
        vec![("budget", self.budget.to_string())]
    }

    fn score_keys(&self, keys: &Tensor<4>) -> Option<Tensor<3>> {
        Some(keys.clone().square().sum_dim(3).sqrt().neg().squeeze_dim(3))
    }

    fn evict(&self, entries: &mut Entries<'_>, _: &Attention<'_>, _: &Sequence) {
        entries.evict_lowest(self.budget, |_position| true);
    }
}

fn main() -> anyhow::Result<()> {
    let config = DecoderConfig::new(97, 64, 3, 4, 2);
    let decoder = Decoder::from_weights(config, &Device::flex(), |_, shape| {
        let weights = 0..shape.iter().product();
        let weights = weights.map(|i: usize| (i * 37 % 101) as f32 / 500.0 - 0.1);
        Ok::<_, std::convert::Infallible>(weights)
    })?;
    let mut cache = Evicting::new(&decoder.shape(), KeyNorm { budget: 8 });
    for token in 0..20 {
        decoder.forward(&[token][..], &mut cache)?;
    }
    let cached = cache.cached(LayerIndex::new(0));
    println!("of 20 tokens the KV heads keep {:?}", cached.sequence(0));
    Ok(())
}

#[cfg(test)]
kv_direct::contract_tests! {
    on Device::flex();
    knorm => kv_direct::testing::Contract::lossy(|shape, _, budget| {
        Evicting::new(shape, KeyNorm { budget })
    });
}
