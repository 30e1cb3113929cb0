//! A backend with rules of its own, on the crate's storage: `cargo test --example custom_backend`.
//!
//! `Thinned` keeps the newest entries of a sequence and, of those just older, every second one. A rule like that needs
//! no more than a `Policy` (see `knorm.rs`). This example shows what lies below: `LayerStores` stores the entries and
//! checks the order of calls, and the backend decides what stays.

use kv_direct::burn::tensor::Device;
use kv_direct::cache::{CacheBackend, CacheError, LayerIndex, ModelShape};
use kv_direct::{Decoder, FullKv, forward_backend, storage::LayerStores};

#[derive(Debug, Clone)]
struct Thinned {
    recent: usize,
    stores: LayerStores,
}

impl Thinned {
    /// Keeps up to `budget` entries.
    fn new(shape: &ModelShape, budget: usize) -> Self {
        let (recent, stores) = (budget / 2, LayerStores::new(shape));
        Self { recent, stores }
    }
}

impl CacheBackend for Thinned {
    fn commit(&mut self) -> Result<(), CacheError> {
        self.stores.commit()?;
        let (recent, lengths) = (self.recent, self.lengths().to_vec());
        self.stores.retain(|sequence, position| {
            let age = lengths[sequence] - position;
            age <= recent || age <= 3 * recent && position.is_multiple_of(2)
        });
        Ok(())
    }

    // The storage refuses every report of attention. Drafts, states and the choice of sequences stay with the trait,
    // which refuses them.
    forward_backend!(self => self.stores; begin keys_values observe queries truncate clear);

    fn fork(&self) -> Box<dyn CacheBackend> {
        Box::new(self.clone())
    }
}

fn main() -> anyhow::Result<()> {
    let config = kv_direct::model::DecoderConfig::new(97, 64, 3, 4, 2);
    let decoder = Decoder::from_weights(config, &Device::flex(), |_, shape| {
        let weights = 0..shape.iter().product();
        let weights = weights.map(|i: usize| (i * 37 % 101) as f32 / 500.0 - 0.1);
        Ok::<_, std::convert::Infallible>(weights)
    })?;
    let shape = decoder.shape();
    let (mut full, mut thinned) = (FullKv::new(&shape), Thinned::new(&shape, 8));
    for token in 0..20 {
        decoder.forward(&[token][..], &mut full)?;
        decoder.forward(&[token][..], &mut thinned)?;
    }
    let cached = thinned.cached(LayerIndex::new(0));
    println!("of 20 tokens it keeps {:?}", cached.sequence(0)[0]);
    let [ours, theirs] = [thinned.memory(), full.memory()].map(|report| report.keys_values);
    println!("{ours} bytes of keys and values, FullKv holds {theirs}");
    Ok(())
}

#[cfg(test)]
kv_direct::contract_tests! {
    on Device::flex();
    thinned => kv_direct::testing::Contract::lossy(|shape, _, budget| Thinned::new(shape, budget))
        .without_provided_methods();
    its_storage => kv_direct::testing::Contract::lossless(|shape, _, _| LayerStores::new(shape));
}
