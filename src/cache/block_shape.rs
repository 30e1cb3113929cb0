//! How a decoder's block computes, as far as its temporaries go.

use std::{fmt, sync::Arc};

/// How a block computes. Byte budgets and costs depend on it: the temporaries of a replay are part of them.
///
/// By default a block is that of Llama: keys and values are projected without the queries, the feed-forward layer has a
/// gate, and there are no biases. Change what differs.
///
/// ```
/// use burn::tensor::DType;
/// use kv_direct::{cache::ModelShape, exact::KernelShapes};
///
/// // GPT-2.
/// let mut shape = ModelShape::new(12, 768, DType::F32, KernelShapes::new(12, 12, 64));
/// (shape.block.fused_qkv, shape.block.gated, shape.block.biases) = (true, false, true);
/// shape.intermediate = Some(4 * 768);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct BlockShape {
    /// Whether [`Replay::project`](crate::cache::Replay::project) computes the queries too, in one product.
    pub fused_qkv: bool,
    /// Whether the feed-forward layer multiplies a gate with `up`.
    pub gated: bool,
    /// Whether biases are added to products by operations of their own.
    pub biases: bool,
    /// The temporaries of the decoder's own calls, where the estimate does not fit.
    pub(crate) scratch: Option<Scratch>,
    /// Whether the block runs as the operations of this crate's decoder, which hold little.
    pub(crate) native: bool,
}

impl Default for BlockShape {
    fn default() -> Self {
        Self {
            fused_qkv: false,
            gated: true,
            biases: false,
            scratch: None,
            native: false,
        }
    }
}

/// A call of [`Replay`](crate::cache::Replay), by what its temporaries depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReplayCall {
    /// [`project`](crate::cache::Replay::project) of so many tokens.
    Project {
        /// The tokens of all sequences.
        tokens: usize,
    },
    /// [`forward`](crate::cache::Replay::forward).
    Forward {
        /// The sequences that the tokens belong to, at most.
        sequences: usize,
        /// The tokens of all sequences.
        tokens: usize,
        /// Slots of the sequence that has most.
        slots: usize,
    },
}

/// A function that gives the bytes of a call.
#[derive(Clone)]
pub(crate) struct Scratch(pub(crate) Arc<dyn Fn(ReplayCall) -> usize + Send + Sync>);

impl PartialEq for Scratch {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Scratch {}

impl fmt::Debug for Scratch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a function")
    }
}
