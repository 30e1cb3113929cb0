//! What a cache needs to know of a model.

use std::{fmt, num::NonZeroUsize};

use burn::tensor::DType;

use crate::{
    cache::{CacheError, Kept, LayerIndex},
    exact::{attention_scratch, conformance::KernelShapes},
    positions::visible,
};

/// The shape of a model, as far as a cache cares.
///
/// ```
/// use burn::tensor::DType;
/// use kv_direct::{cache::ModelShape, exact::conformance::KernelShapes};
///
/// // SmolLM2-135M in f32: keys and values of a token, and one residual per layer.
/// let shape = ModelShape::new(30, 576, DType::F32, KernelShapes::new(9, 3, 64));
/// assert_eq!(shape.keys_values_per_token(), 46_080);
/// assert_eq!(shape.residuals_per_token(), 69_120);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ModelShape {
    /// How many keys each layer shows, the query's own included; `None` for all.
    pub windows: Vec<Option<NonZeroUsize>>,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Dtype of the residual stream, the keys and the values.
    pub dtype: DType,
    /// Heads, and the shapes that kernels choose their path by.
    pub kernels: KernelShapes,
    /// Width inside the feed-forward layer, of gate and up each; 0 where it is not known: prices, budgets and
    /// reports of scratch then leave that layer out.
    pub intermediate: usize,
    /// Size of the vocabulary; 0 where it is not known: prices then leave the head out.
    pub vocab: usize,
}

impl ModelShape {
    /// A model of `layers` layers that all show every key.
    #[must_use]
    pub fn new(layers: usize, hidden: usize, dtype: DType, kernels: KernelShapes) -> Self {
        Self {
            windows: vec![None; layers],
            hidden,
            dtype,
            kernels,
            intermediate: 0,
            vocab: 0,
        }
    }

    /// Number of layers.
    #[must_use]
    pub const fn layers(&self) -> usize {
        self.windows.len()
    }

    /// Whether a layer has a window.
    pub(crate) fn slides(&self, layer: usize) -> bool {
        self.windows.get(layer).is_some_and(Option::is_some)
    }

    /// Number of layers that show all keys.
    fn full_layers(&self) -> usize {
        self.windows
            .iter()
            .filter(|window| window.is_none())
            .count()
    }

    /// Of the positions each batch row holds at `layer`, those that the query after its last token
    /// sees.
    pub(crate) fn readable(
        &self,
        layer: LayerIndex,
        lengths: &[usize],
        mut held: Vec<Vec<Vec<usize>>>,
    ) -> Kept {
        let window = self.windows.get(layer.index()).copied().flatten();
        for (row, &next) in held.iter_mut().zip(lengths) {
            for list in &mut *row {
                list.retain(|&position| visible(next, position, window));
            }
        }
        Kept::per_head(held)
    }

    /// Checks that the sizes are those of a model.
    pub(crate) fn validate(&self) -> Result<(), CacheError> {
        let KernelShapes {
            heads,
            kv_heads,
            head_dim,
            ..
        } = self.kernels;
        let kernels = self
            .kernels
            .linears
            .iter()
            .flatten()
            .chain(&self.kernels.norms)
            .copied();
        let sizes = [
            ("heads", heads),
            ("kv_heads", kv_heads),
            ("head_dim", head_dim),
            ("hidden", self.hidden),
        ];
        let mut sizes = sizes
            .into_iter()
            .chain(kernels.map(|size| ("a kernel's width", size)));
        match sizes.find(|(_, size)| *size == 0) {
            Some((what, found)) => Err(CacheError::ModelShape { what, found }),
            None if !heads.is_multiple_of(kv_heads) => Err(CacheError::ModelShape {
                what: "heads, no multiple of kv_heads,",
                found: heads,
            }),
            None => Ok(()),
        }
    }

    /// Multiplications that keys and values of one row take at one layer: the weights of their projections.
    #[must_use]
    pub const fn projection_weights(&self) -> usize {
        2 * self.kv_width() * self.hidden
    }

    /// Multiplications that one row takes through the matrices of a block, attention's own left out.
    #[must_use]
    pub const fn block_weights(&self) -> usize {
        let queries = self.kernels.heads * self.kernels.head_dim;
        self.projection_weights() + self.hidden * (2 * queries + 3 * self.intermediate)
    }

    /// Bytes of temporaries that a gated block of this shape holds at its peak while it takes `tokens` rows in each of
    /// `batch` rows against `slots` slots: the larger of attention (queries, scores of a block of them) and the
    /// feed-forward layer (gate, up and a partial sum), each beside the residual and its normed copy.
    #[must_use]
    pub fn block_scratch(&self, batch: usize, tokens: usize, slots: usize) -> usize {
        let KernelShapes {
            heads, head_dim, ..
        } = self.kernels;
        let element = self.dtype.size();
        let rows = batch * tokens * element;
        let attention =
            2 * rows * heads * head_dim + attention_scratch(batch, heads, tokens, slots, element);
        let feed_forward = 3 * rows * self.intermediate;
        2 * rows * self.hidden + attention.max(feed_forward)
    }

    /// Bytes of temporaries while `tokens` rows in each of `batch` rows are projected: normed rows, keys and values
    /// side by side, and apart.
    pub(crate) const fn projection_scratch(&self, batch: usize, tokens: usize) -> usize {
        batch * tokens * (self.hidden + 4 * self.kv_width()) * self.dtype.size()
    }

    /// Elements of the keys (or of the values) of one token at one layer.
    #[must_use]
    pub const fn kv_width(&self) -> usize {
        self.kernels.kv_heads * self.kernels.head_dim
    }

    /// Bytes of one token's keys and values in all layers.
    #[must_use]
    pub fn keys_values_per_token(&self) -> usize {
        2 * self.kv_width() * self.layers() * self.dtype.size()
    }

    /// Bytes of one token's keys and values in the layers that show all keys: what a token costs that
    /// has left every window.
    #[must_use]
    pub fn keys_values_per_old_token(&self) -> usize {
        2 * self.kv_width() * self.full_layers() * self.dtype.size()
    }

    /// Bytes of one token's residual rows, one entering every layer that shows all keys: what
    /// [`Floor::Residuals`](crate::cache::Floor::Residuals) keeps of it.
    #[must_use]
    pub fn residuals_per_token(&self) -> usize {
        self.hidden * self.full_layers() * self.dtype.size()
    }
}

/// Everything a cache must agree on to take over the rows of another.
impl fmt::Display for ModelShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (layers, hidden) = (self.layers(), self.hidden);
        let KernelShapes {
            heads,
            kv_heads,
            head_dim,
            ..
        } = self.kernels;
        let dtype = self.dtype.name();
        write!(
            f,
            "{layers} layers of {hidden} in {dtype}, {heads} heads, {kv_heads} KV heads of {head_dim}"
        )?;
        for (layer, window) in self.windows.iter().enumerate() {
            if let Some(window) = window {
                write!(f, ", window {window} at layer {layer}")?;
            }
        }
        Ok(())
    }
}
