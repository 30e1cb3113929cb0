//! What the kernels of this crate hold beside their operands and results.

use burn::tensor::{DType, Device};

use super::{ATTENTION_BLOCK, PANEL};

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
pub(crate) const TOKENS: usize = 256;
/// The same where exponentials are kept for a report.
pub(crate) const FEW_TOKENS: usize = 64;

/// Where threads share out blocks of slots, their results are held until they are merged: so many blocks at a time for
/// the queries of `tokens` tokens of a sequence.
pub(crate) const fn blocks_at_once(tokens: usize) -> usize {
    if tokens == 0 || tokens > HELD {
        1
    } else {
        HELD / tokens
    }
}

/// Tokens of a sequence times blocks whose results are held.
const HELD: usize = 128;

/// Bytes that attention holds in f32 for `tokens` queries of up to `sequences` sequences against `slots` slots.
pub(crate) fn attention_scratch(
    sequences: usize,
    (heads, head_dim): (usize, usize),
    tokens: usize,
    slots: usize,
) -> usize {
    let sequences = sequences.clamp(1, tokens.max(1));
    let tokens = tokens.div_ceil(sequences).min(TOKENS);
    // Queries and their results where threads share out rows; else results of blocks, and what they are merged into.
    let blocks = slots.div_ceil(ATTENTION_BLOCK);
    let rows = (2 * tokens).max((tokens + HELD).min(tokens * (blocks + 1)));
    sequences * rows * heads * (head_dim + 2) * size_of::<f32>()
}

/// Bytes that linear layers hold in f32 between input and result if threads compute all rows at once: rows as products
/// read them, and for a feed-forward layer of width `inner` what is added to the input, a part of gate and up, and their
/// product.
pub(crate) fn layers_scratch(rows: usize, width: usize, inner: Option<usize>) -> usize {
    let at_once = |inner| inner_at_once(inner, rows, threads_of_a_group(rows));
    let inner = inner.map_or(0, |inner| width + 3 * at_once(inner));
    rows * (width + inner) * size_of::<f32>()
}

/// Threads that share a group of rows, out of `rows`: a few rows are one group.
pub(crate) fn threads_of_a_group(rows: usize) -> usize {
    #[cfg(feature = "flex")]
    let threads = super::kernels::threads::count();
    #[cfg(not(feature = "flex"))]
    let threads = 1;
    if rows < FEWEST * threads { threads } else { 1 }
}

/// The fewest rows of a group for each thread.
const FEWEST: usize = 24;

/// Elements of gate, and as many of up, that are computed at a time for the rows of a group.
pub(crate) const fn inner_at_once(inner: usize, rows: usize, threads: usize) -> usize {
    // Up begins with a panel of the weight.
    let parts = inner.is_multiple_of(PANEL) && rows > WHOLE;
    if parts && inner > INNER * threads {
        INNER * threads
    } else {
        inner
    }
}

/// Whole panels, so few that the elements stay in cache.
const INNER: usize = 256;
/// Rows that are too few to be worth parts.
const WHOLE: usize = 16;
