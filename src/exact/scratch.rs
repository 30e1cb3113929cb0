//! What the kernels of this crate hold beside their operands and results.

use burn::tensor::{DType, Device};

use super::ATTENTION_BLOCK;

/// Whether the kernels of this crate run operations on tensors of this dtype on this device.
pub(crate) fn owned(device: &Device, dtype: DType) -> bool {
    #[cfg(feature = "flex")]
    return dtype == DType::F32 && *device == Device::flex();
    #[cfg(not(feature = "flex"))]
    {
        let _ = (device, dtype);
        false
    }
}

/// Whether attention of this crate's kernels reads keys and values in this dtype.
#[cfg(any(feature = "flex", feature = "model"))]
pub(crate) const fn caches(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::BF16 | DType::F16)
}

/// Tokens of each sequence whose queries are computed together.
pub(crate) const TOKENS: usize = 64;
/// Blocks of slots after which results are merged: what is held does not grow with the context.
pub(crate) const WAVE: usize = 16;

/// Bytes that attention holds in f32 for `tokens` queries of up to `sequences` sequences against `slots` slots: the
/// results of some blocks, and those that they are merged into.
pub(crate) fn attention_scratch(
    sequences: usize,
    (heads, head_dim): (usize, usize),
    tokens: usize,
    slots: usize,
) -> usize {
    let blocks = slots.div_ceil(ATTENTION_BLOCK).min(WAVE) + 1;
    tokens.min(sequences * TOKENS) * heads * (head_dim + 2) * blocks * size_of::<f32>()
}

/// Bytes that linear layers hold in f32 between input and result if threads compute all rows at once: normed rows, the
/// same side by side, and for a feed-forward layer of width `inner` its gate, up, and product.
pub(crate) fn layers_scratch(rows: usize, width: usize, inner: Option<usize>) -> usize {
    let inner = inner.unwrap_or(0);
    let row = width + 3 * inner + width.max(inner);
    rows * row * size_of::<f32>()
}
