//! Linear layers of SmolLM2's sizes for few and many rows, against what this machine can do at most.
//!
//! `cargo bench --bench linear`. One row is as fast as weights are read: its limit is the read rate. Many rows share
//! what is read: their limit is the matrix rate. All weights together are larger than the processor's caches.
//!
//! f32 weights go through [`linear`]. bf16 weights are those of heads: a norm of the rows comes first.

mod common;

use std::{convert::Infallible, hint::black_box};

use burn::tensor::{DType, Device, Tensor};
use common::{
    interleaved::{medians, timed_in_pool},
    limits::Limits,
    measuring, sizes,
};
use criterion::{Criterion, criterion_group, criterion_main};
use kv_direct::{
    exact::{Weight, linear},
    model::{Decoder, DecoderConfig},
};

/// `[in, out]` of the projections in a block of SmolLM2-135M.
const SHAPES: [[usize; 2]; 4] = [[576, 960], [576, 576], [576, 3072], [1536, 576]];
/// Bytes of all weights together, if they are measured.
const BYTES: usize = 256 << 20;

/// A weight, and the layer around it.
enum Layer {
    F32(Weight),
    Bf16(Box<Decoder>),
}

impl Layer {
    fn new([width, out]: [usize; 2], dtype: DType) -> Self {
        if dtype == DType::F32 {
            let weight = Tensor::full([width, out], 0.01, &Device::flex());
            return Self::F32(Weight::new(weight));
        }
        // The head of a decoder that is small otherwise.
        let mut config = DecoderConfig::new(out, width, 1, 1, 1);
        (config.head_dim, config.intermediate, config.tied_head) = (2, 2, true);
        let weights = |_: &str, shape: &[usize]| {
            Ok::<_, Infallible>(vec![0.01; shape.iter().product::<usize>()])
        };
        let decoder = Decoder::from_stored_weights(config, &Device::flex(), |_| dtype, weights);
        Self::Bf16(Box::new(decoder.expect("the configuration fits")))
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        match self {
            Self::F32(weight) => linear(x, weight),
            Self::Bf16(decoder) => decoder.logits(x),
        }
    }
}

fn rows(criterion: &mut Criterion) {
    let mut limits = Limits::new();
    for (name, dtype) in [("f32", DType::F32), ("bf16", DType::BF16)] {
        let numbers: usize = SHAPES.iter().map(|[width, out]| width * out).sum();
        let blocks = match measuring() {
            true => BYTES.div_ceil(numbers * dtype.size()),
            false => 1,
        };
        let block = || SHAPES.map(|shape| (shape[0], Layer::new(shape, dtype)));
        let layers: Vec<_> = (0..blocks).flat_map(|_| block()).collect();
        for &rows in sizes(&[1, 2, 4, 8, 16, 64, 512]) {
            let input = |width| Tensor::<3>::full([1, rows, width], 0.5, &Device::flex());
            let inputs = [576, 1536].map(|width| (width, input(width)));
            let name = format!("{name}, {rows} rows");
            let times = medians(criterion, ("linear", &name), &mut limits, 1, |_| {
                timed_in_pool(|| {
                    for (width, layer) in &layers {
                        let (_, x) = &inputs[usize::from(*width != inputs[0].0)];
                        black_box(layer.forward(x.clone()));
                    }
                })
            });
            let Some(times) = times else { continue };
            let bytes = (blocks * numbers * dtype.size()) as f64 / times[0];
            let operations = (2 * blocks * numbers * rows) as f64 / times[0];
            println!(
                "linear, {name}: {:.1} GB/s of weights, {:.2} of the read rate {:.1}; {:.1} GFLOP/s, {:.2} of the \
                 matrix rate {:.0}\n",
                bytes / 1e9,
                bytes / limits.read_rate(),
                limits.read_rate() / 1e9,
                operations / 1e9,
                operations / limits.matrix_rate(),
                limits.matrix_rate() / 1e9,
            );
        }
    }
}

criterion_group!(benches, rows);
criterion_main!(benches);
