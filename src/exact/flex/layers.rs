//! Linear layers on `flex`: tensors taken apart into slices for the kernels.

use burn::backend::flex::FlexTensor;

use super::{Rows, primitive, tensor};
use crate::exact::{
    Norm,
    kernels::{
        Product,
        layers::{self as kernels, After},
    },
    ops::{Added, Layers, PackedLinear, Products},
};

pub(super) fn apply(x: FlexTensor, layers: Layers<'_>) -> FlexTensor {
    let bias = |linear: &PackedLinear<'_>| linear.bias.map(|bias| primitive(bias).to_contiguous());
    match layers.products {
        Products::Beside(linears) => {
            let biases: Vec<_> = linears.iter().map(bias).collect();
            let pairs = linears.iter().zip(&biases);
            let linears: Vec<_> = pairs.map(|(linear, bias)| with(linear, bias)).collect();
            run(x, &kernels::Layers::Beside(&linears), layers)
        }
        Products::FeedForward {
            gate_up,
            down,
            activation,
        } => {
            let (gate_up_bias, down_bias) = (bias(&gate_up), bias(&down));
            let feed_forward = kernels::Layers::FeedForward {
                gate_up: with(&gate_up, &gate_up_bias),
                down: with(&down, &down_bias),
                activation,
            };
            run(x, &feed_forward, layers)
        }
    }
}

/// Runs layers with the norms before and after them, and adds what is to be added.
fn run(x: FlexTensor, products: &kernels::Layers<'_>, layers: Layers<'_>) -> FlexTensor {
    let norms = [layers.before, layers.after].map(Vector::of_norm);
    let [before, after] = norms.each_ref().map(|norm| norm.as_ref().map(Vector::norm));
    let mut contiguous = x.to_contiguous();
    drop(x);
    let residual = match layers.added {
        Added::Nothing => None,
        Added::Residual(residual) => Some(primitive(residual).to_contiguous()),
        Added::Input => {
            let rows = Rows::<f32>::of(&contiguous);
            let all = rows.start..rows.start + rows.count * rows.width;
            let x = &mut contiguous.storage_mut::<f32>()[all];
            products.add_to(x, before, after);
            return contiguous;
        }
    };
    let residual = residual
        .as_ref()
        .map(|residual| Rows::<f32>::of(residual).all());
    let (rows, columns) = (Rows::<f32>::of(&contiguous), products.columns());
    let mut out = vec![0.0; rows.count * columns];
    let after = After {
        norm: after,
        residual,
    };
    products.apply(rows.all(), rows.width, before, after, &mut out);
    tensor(out, rows.shape_with(columns))
}

fn with<'a>(linear: &PackedLinear<'a>, bias: &'a Option<FlexTensor>) -> Product<'a> {
    let bias = bias.as_ref().map(|bias| Rows::<f32>::of(bias).row(0));
    Product::all(linear.weight, bias)
}

/// A norm and its weight.
struct Vector<'a> {
    norm: &'a Norm,
    weight: FlexTensor,
}

impl<'a> Vector<'a> {
    fn of_norm(norm: Option<&'a Norm>) -> Option<Self> {
        norm.map(|norm| Self {
            norm,
            weight: primitive(&norm.weight).to_contiguous(),
        })
    }

    fn norm(&self) -> kernels::Norm<'_> {
        kernels::Norm {
            weight: Rows::<f32>::of(&self.weight).row(0),
            epsilon: self.norm.epsilon as f32,
            plus_one: self.norm.plus_one,
        }
    }
}
