//! Linear layers on `flex`: tensors taken apart into slices for the kernels.

use burn::backend::flex::FlexTensor;

use super::{Rows, primitive, tensor};
use crate::exact::{
    Norm,
    kernels::{
        Product,
        layers::{self, After},
    },
    ops::{Layers, PackedLinear, Products},
};

pub(super) fn apply(x: FlexTensor, layers: Layers<'_>) -> FlexTensor {
    let x = x.to_contiguous();
    let rows = Rows::<f32>::of(&x);
    let (before, after) = (
        Vector::of_norm(layers.before),
        Vector::of_norm(layers.after),
    );
    let residual = layers
        .residual
        .map(|residual| primitive(residual).to_contiguous());
    let after = After {
        norm: after.as_ref().map(Vector::norm),
        residual: residual
            .as_ref()
            .map(|residual| Rows::<f32>::of(residual).all()),
    };
    let before = before.as_ref().map(Vector::norm);
    let run = |layers: &layers::Layers<'_>| {
        let columns = layers.columns();
        let mut out = vec![0.0; rows.count * columns];
        layers.apply(rows.all(), rows.width, before, after, &mut out);
        tensor(out, rows.shape_with(columns))
    };
    let bias = |linear: &PackedLinear<'_>| linear.bias.map(|bias| primitive(bias).to_contiguous());
    match layers.products {
        Products::Beside(linears) => {
            let biases: Vec<_> = linears.iter().map(bias).collect();
            let pairs = linears.iter().zip(&biases);
            let linears: Vec<_> = pairs.map(|(linear, bias)| with(linear, bias)).collect();
            run(&layers::Layers::Beside(&linears))
        }
        Products::FeedForward {
            gate_up,
            down,
            activation,
        } => {
            let (gate_up_bias, down_bias) = (bias(&gate_up), bias(&down));
            run(&layers::Layers::FeedForward {
                gate_up: with(&gate_up, &gate_up_bias),
                down: with(&down, &down_bias),
                activation,
            })
        }
    }
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

    fn norm(&self) -> layers::Norm<'_> {
        layers::Norm {
            weight: Rows::<f32>::of(&self.weight).row(0),
            epsilon: self.norm.epsilon as f32,
            plus_one: self.norm.plus_one,
        }
    }
}
