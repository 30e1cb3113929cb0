//! The operations that a backend of burn may run by kernels of its own: a backend extension.
//!
//! [`Flex`](burn::backend::Flex) has them in `flex.rs`. Tensors on every other device, of another dtype, or tracked by
//! autodiff take the stock operations that stand beside each caller: [`owned`] decides.

use burn::{
    backend::{Backend, Dispatch, backend_extension, tensor::FloatTensor},
    tensor::{Device, Tensor},
};

use super::{
    Activation, AttentionParams, Norm, Segment,
    packed::Packed,
    scratch::{caches, owned},
};
use crate::positions::Positions;

/// Operations whose order of sums `docs/exactness.md` gives. All tensors are f32.
#[backend_extension(Flex)]
pub(super) trait ExactOps: Backend {
    /// Linear layers with what stands around them, over the last dimension of `x`.
    fn exact_layers(x: FloatTensor<Self>, layers: Layers<'_>) -> FloatTensor<Self>;

    /// Root-mean-square norm along the last dimension.
    fn exact_norm(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
        plus_one: bool,
    ) -> FloatTensor<Self>;

    /// Rotates the last dimension of `[1, heads, tokens, head_dim]`. `cos` and `sin` are
    /// `[1, heads or 1, tokens, head_dim / 2]`.
    fn exact_rotate(
        x: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
    ) -> FloatTensor<Self>;

    /// `activation(gate) · up`, `[.., 2 · width]` to `[.., width]`; the gate comes first.
    fn exact_gated(x: FloatTensor<Self>, activation: Activation) -> FloatTensor<Self>;

    /// `cap · tanh(x / cap)`: in place where nobody else holds `x`.
    fn exact_softcap(x: FloatTensor<Self>, cap: f64) -> FloatTensor<Self>;

    /// `buffer` with `rows`, `[heads, count, head_dim]`, written into the slots from `at` on of the KV heads from
    /// `head` on: in place where nobody else holds the buffer. Both have the same dtype, f32, bf16 or f16. The buffer
    /// is `[kv_heads, slots, head_dim]`, or `[kv_heads, slots / 32, head_dim, 32]` for keys.
    fn exact_write(
        buffer: FloatTensor<Self>,
        rows: FloatTensor<Self>,
        head: usize,
        at: usize,
    ) -> FloatTensor<Self>;

    /// Attention of `[1, heads, tokens, head_dim]`: `[1, tokens, heads · head_dim]`, and what is reported.
    fn exact_attention(
        query: FloatTensor<Self>,
        reads: Reads<'_>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
}

/// A linear layer whose weight is packed.
#[derive(Debug, Clone, Copy)]
pub(super) struct PackedLinear<'a> {
    pub(super) weight: &'a Packed,
    pub(super) bias: Option<&'a Tensor<1>>,
}

/// Layers in a row: a norm, products, a norm of their result, and a tensor that is added.
#[derive(Debug, Clone, Copy)]
pub(super) struct Layers<'a> {
    pub(super) before: Option<&'a Norm>,
    pub(super) products: Products<'a>,
    pub(super) after: Option<&'a Norm>,
    pub(super) added: Added<'a>,
}

/// What is added to the result of [`Layers`].
#[derive(Debug, Clone, Copy)]
#[cfg_attr(
    not(feature = "model"),
    allow(dead_code, reason = "only the decoder has a residual")
)]
pub(super) enum Added<'a> {
    Nothing,
    Residual(&'a Tensor<3>),
    /// The input itself: in place where nobody else holds it.
    Input,
}

/// The products of [`Layers`].
#[derive(Debug, Clone, Copy)]
#[cfg_attr(
    not(feature = "model"),
    allow(dead_code, reason = "only the decoder has a feed-forward layer")
)]
pub(super) enum Products<'a> {
    /// Of the same input, side by side.
    Beside(&'a [PackedLinear<'a>]),
    /// A gated feed-forward layer.
    FeedForward {
        gate_up: PackedLinear<'a>,
        down: PackedLinear<'a>,
        activation: Activation,
    },
}

/// What attention reads beside the queries, and what it reports.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reads<'a> {
    pub(super) positions: &'a Positions,
    pub(super) segments: &'a [Vec<Segment>],
    pub(super) params: &'a AttentionParams,
    pub(super) report: Wanted,
}

/// What attention reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wanted {
    /// Nothing: `[0]`.
    Nothing,
    /// The sums of all probabilities of a slot: `[batch, heads, slots]`.
    ColumnSums,
    /// The probabilities of the last queries: `[batch, heads, queries, slots]`.
    LastQueries(usize),
}

pub(super) fn layers(x: Tensor<3>, layers: Layers<'_>) -> Tensor<3> {
    Tensor::from_dispatch(Dispatch::exact_layers(x.into_dispatch(), layers))
}

pub(super) fn norm<const D: usize>(
    x: Tensor<D>,
    weight: &Tensor<1>,
    epsilon: f64,
    plus_one: bool,
) -> Tensor<D> {
    let (x, weight) = (x.into_dispatch(), weight.clone().into_dispatch());
    Tensor::from_dispatch(Dispatch::exact_norm(x, weight, epsilon, plus_one))
}

pub(super) fn rotate(x: Tensor<4>, cos: &Tensor<4>, sin: &Tensor<4>) -> Tensor<4> {
    let (cos, sin) = (cos.clone().into_dispatch(), sin.clone().into_dispatch());
    Tensor::from_dispatch(Dispatch::exact_rotate(x.into_dispatch(), cos, sin))
}

pub(super) fn gated(x: Tensor<3>, activation: Activation) -> Tensor<3> {
    Tensor::from_dispatch(Dispatch::exact_gated(x.into_dispatch(), activation))
}

pub(super) fn softcap(x: Tensor<3>, cap: f64) -> Tensor<3> {
    Tensor::from_dispatch(Dispatch::exact_softcap(x.into_dispatch(), cap))
}

/// Attention over segments whose elements the kernels read; `D` is the rank of what is reported.
pub(super) fn attention<const D: usize>(
    query: Tensor<4>,
    reads: Reads<'_>,
) -> (Tensor<3>, Tensor<D>) {
    let (out, report) = Dispatch::exact_attention(query.into_dispatch(), reads);
    (Tensor::from_dispatch(out), Tensor::from_dispatch(report))
}

/// Whether the kernels of this crate read these entries for such a query.
pub(super) fn owns_attention(query: &Tensor<4>, segments: &[Vec<Segment>]) -> bool {
    let reads = |segment: &Segment| {
        let dtype = segment.values().dtype();
        segment.keys().dtype() == dtype && caches(dtype)
    };
    owned(&query.device(), query.dtype()) && segments.iter().flatten().all(reads)
}

/// Writes rows into a buffer of keys (rank 4) or values (rank 3), in place, if the kernels of this crate do that for
/// its device and dtype. Returns the buffer, and whether they did.
pub(crate) fn write<const D: usize>(
    buffer: Tensor<D>,
    rows: &Tensor<3>,
    head: usize,
    at: usize,
) -> (Tensor<D>, bool) {
    let dtypes = [buffer.dtype(), rows.dtype()];
    if !caches(dtypes[0]) || dtypes[0] != dtypes[1] || buffer.device() != Device::flex() {
        return (buffer, false);
    }
    let (buffer, rows) = (buffer.into_dispatch(), rows.clone().into_dispatch());
    let written = Dispatch::exact_write(buffer, rows, head, at);
    (Tensor::from_dispatch(written), true)
}
