//! Linear layers with what stands around them, as one operation where the device has kernels for it.

use burn::tensor::Tensor;

#[cfg(feature = "flex")]
use super::ops::{self, Added, Layers, PackedLinear, Products};
use super::{Activation, Norm, Weight, gated, linear};

/// A weight `[in, out]` and an optional bias.
#[derive(Debug, Clone)]
pub(crate) struct Linear {
    pub(crate) weight: Weight,
    pub(crate) bias: Option<Tensor<1>>,
}

impl Linear {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let y = linear(x, &self.weight);
        match &self.bias {
            Some(bias) => y + bias.clone().unsqueeze::<3>(),
            None => y,
        }
    }

    /// The same with a packed weight.
    #[cfg(feature = "flex")]
    fn packed(&self) -> Option<PackedLinear<'_>> {
        let weight = self.weight.packed()?;
        let bias = self.bias.as_ref();
        Some(PackedLinear { weight, bias })
    }
}

/// The products of the normed `x` with several weights, side by side: `[batch, tokens, in]` to
/// `[batch, tokens, sum of out]`.
pub(crate) fn normed_linears(x: Tensor<3>, norm: &Norm, linears: &[&Linear]) -> Tensor<3> {
    #[cfg(feature = "flex")]
    if let Some(linears) = linears
        .iter()
        .map(|l| l.packed())
        .collect::<Option<Vec<_>>>()
    {
        return ops::layers(
            x,
            Layers {
                before: Some(norm),
                products: Products::Beside(&linears),
                after: None,
                added: Added::Nothing,
            },
        );
    }
    let x = norm.forward(x);
    let mut products: Vec<_> = linears.iter().map(|l| l.forward(x.clone())).collect();
    match products.len() {
        1 => products.remove(0),
        _ => Tensor::cat(products, 2),
    }
}

/// `residual + after(x · weight)`.
pub(crate) fn linear_added(
    x: Tensor<3>,
    linear: &Linear,
    after: Option<&Norm>,
    residual: Tensor<3>,
) -> Tensor<3> {
    #[cfg(feature = "flex")]
    if let Some(linear) = linear.packed() {
        return ops::layers(
            x,
            Layers {
                before: None,
                products: Products::Beside(&[linear]),
                after,
                added: Added::Residual(&residual),
            },
        );
    }
    added(linear.forward(x), after, residual)
}

/// `residual + after(down(activation(gate) · up))` of the normed residual. Gate and up are side by side.
pub(crate) fn feed_forward_added(
    residual: Tensor<3>,
    norm: &Norm,
    [gate_up, down]: [&Linear; 2],
    activation: Activation,
    after: Option<&Norm>,
) -> Tensor<3> {
    #[cfg(feature = "flex")]
    if let Some((gate_up, down)) = gate_up.packed().zip(down.packed()) {
        let products = Products::FeedForward {
            gate_up,
            down,
            activation,
        };
        return ops::layers(
            residual,
            Layers {
                before: Some(norm),
                products,
                after,
                added: Added::Input,
            },
        );
    }
    let inner = gated(gate_up.forward(norm.forward(residual.clone())), activation);
    added(down.forward(inner), after, residual)
}

/// A product after its norm, and the residual added to it.
fn added(product: Tensor<3>, after: Option<&Norm>, residual: Tensor<3>) -> Tensor<3> {
    match after {
        Some(norm) => norm.forward(product) + residual,
        None => product + residual,
    }
}
