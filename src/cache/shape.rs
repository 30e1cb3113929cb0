//! What a cache needs to know of a model.

use std::{num::NonZeroUsize, sync::Arc};

use burn::tensor::{DType, Device};

use crate::{
    cache::{
        BlockShape, CacheError, CachedPositions, LayerIndex, ReplayCall, block_shape::Scratch,
    },
    exact::{KernelShapes, owned},
    fields::{Fields, dtype_word},
    positions::visible,
};

/// The sizes of a model that a cache needs.
///
/// ```
/// use burn::tensor::DType;
/// use kv_direct::{cache::ModelShape, exact::KernelShapes};
///
/// // SmolLM2-135M in f32: keys and values of a token, and one residual per layer.
/// let shape = ModelShape::new(30, 576, DType::F32, KernelShapes::new(9, 3, 64));
/// assert_eq!(shape.keys_values_per_token(), 46_080);
/// assert_eq!(shape.residuals_per_token(), 69_120);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ModelShape {
    /// How many tokens each layer attends to, the query's own included; `None` for a full-attention layer.
    pub windows: Vec<Option<NonZeroUsize>>,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Dtype of the residual stream, in which the model computes.
    pub dtype: DType,
    /// Dtype in which keys and values are cached: that of the residual stream, or a smaller one.
    pub cache_dtype: DType,
    /// Heads, and the shapes by which kernels choose their path.
    pub kernels: KernelShapes,
    /// How a block computes. Byte budgets and costs need it.
    pub block: BlockShape,
    /// Whether keys are rotated by their positions. Without rotation they cannot be re-indexed.
    pub rotary: bool,
    /// Width of the feed-forward layer, of gate and up each. Byte budgets and costs need it.
    pub intermediate: Option<usize>,
    /// Size of the vocabulary. Costs leave the head out where it is unknown.
    pub vocab: Option<usize>,
    /// Whether the kernels of this crate run the model: then temporaries are small.
    pub(crate) own_kernels: bool,
}

impl ModelShape {
    /// A rotary model of `layers` full-attention layers, with the default [`BlockShape`]. The feed-forward width and
    /// the vocabulary are unknown.
    #[must_use]
    pub fn new(layers: usize, hidden: usize, dtype: DType, kernels: KernelShapes) -> Self {
        Self {
            windows: vec![None; layers],
            hidden,
            dtype,
            cache_dtype: dtype,
            kernels,
            block: BlockShape::default(),
            rotary: true,
            intermediate: None,
            vocab: None,
            own_kernels: cfg!(feature = "flex") && matches!(dtype, DType::F32),
        }
    }

    /// The same model on a device. Its temporaries depend on whose kernels run there.
    pub(crate) fn on(mut self, device: &Device) -> Self {
        self.own_kernels = owned(device, self.dtype);
        self
    }

    /// The same model with keys and values cached in another dtype.
    #[must_use]
    pub const fn with_cache_dtype(mut self, dtype: DType) -> Self {
        self.cache_dtype = dtype;
        self
    }

    /// The same model with temporaries of its own: `bytes` returns what a call of [`Replay`](crate::cache::Replay)
    /// holds at its peak beside its arguments, its result included. Give it where the estimate for the kind of block
    /// does not fit, so that byte budgets hold.
    ///
    /// ```
    /// use burn::tensor::DType;
    /// use kv_direct::{
    ///     cache::{ModelShape, ReplayCall},
    ///     exact::KernelShapes,
    /// };
    ///
    /// let shape = ModelShape::new(2, 64, DType::F32, KernelShapes::new(4, 4, 16));
    /// let shape = shape.with_scratch(|call| match call {
    ///     ReplayCall::Forward { tokens, slots, .. } => tokens * (9 * 64 + 4 * slots) * 4,
    ///     ReplayCall::Project { tokens } => tokens * 3 * 64 * 4,
    ///     _ => 0,
    /// });
    /// ```
    #[must_use]
    pub fn with_scratch(
        mut self,
        bytes: impl Fn(ReplayCall) -> usize + Send + Sync + 'static,
    ) -> Self {
        self.block.scratch = Some(Scratch(Arc::new(bytes)));
        self
    }

    /// Number of layers.
    #[must_use]
    pub const fn layers(&self) -> usize {
        self.windows.len()
    }

    /// Whether a layer has a sliding window.
    pub(crate) fn slides(&self, layer: usize) -> bool {
        self.windows.get(layer).is_some_and(Option::is_some)
    }

    /// Number of full-attention layers.
    fn full_layers(&self) -> usize {
        self.windows
            .iter()
            .filter(|window| window.is_none())
            .count()
    }

    /// Of the positions that each sequence holds at `layer`, those that its next query sees.
    pub(crate) fn readable(
        &self,
        layer: LayerIndex,
        lengths: &[usize],
        mut held: Vec<Vec<Vec<usize>>>,
    ) -> CachedPositions {
        let window = self.windows.get(layer.index()).copied().flatten();
        for (lists, &next) in held.iter_mut().zip(lengths) {
            for list in &mut *lists {
                list.retain(|&position| visible(next, position, window));
            }
        }
        CachedPositions::new(held)
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

    /// The width of the feed-forward layer.
    ///
    /// # Errors
    /// [`UnknownSize`](CacheError::UnknownSize) where the shape does not say it.
    pub(crate) fn known_intermediate(&self) -> Result<usize, CacheError> {
        let what = "intermediate, the width of the feed-forward layer";
        self.intermediate.ok_or(CacheError::UnknownSize { what })
    }

    /// Multiplications for the keys and values of one token at one layer: the weights of their projections.
    pub(crate) const fn projection_weights(&self) -> usize {
        2 * self.kv_width() * self.hidden
    }

    /// Multiplications of one token in the matrices of a block, without attention's own; an unknown feed-forward
    /// layer is left out.
    pub(crate) fn block_weights(&self) -> usize {
        let queries = self.kernels.heads * self.kernels.head_dim;
        let matrices = if self.block.gated { 3 } else { 2 };
        let feed_forward = matrices * self.intermediate.unwrap_or(0);
        self.projection_weights() + self.hidden * (2 * queries + feed_forward)
    }

    /// Elements of the keys (or of the values) of one token at one layer.
    pub(crate) const fn kv_width(&self) -> usize {
        self.kernels.kv_heads * self.kernels.head_dim
    }

    /// Bytes of one token's keys and values in all layers.
    #[must_use]
    pub fn keys_values_per_token(&self) -> usize {
        2 * self.kv_width() * self.layers() * self.cache_dtype.size()
    }

    /// Bytes of one token's keys and values in the full-attention layers: the cost of a token that has left all
    /// sliding windows.
    #[must_use]
    pub fn keys_values_per_old_token(&self) -> usize {
        2 * self.kv_width() * self.full_layers() * self.cache_dtype.size()
    }

    /// Bytes of one token's residuals, one entering every full-attention layer: what
    /// [`Plan::residuals`](crate::residual::Plan::residuals) retains.
    #[must_use]
    pub fn residuals_per_token(&self) -> usize {
        self.hidden * self.full_layers() * self.dtype.size()
    }
}

impl ModelShape {
    /// Everything that two caches must have in common for one to continue from the state of the other. `windows` has
    /// the window of every layer, or `full`; it is left out where all layers are full-attention layers.
    pub(crate) fn fields(&self) -> Fields {
        let KernelShapes {
            heads,
            kv_heads,
            head_dim,
            ..
        } = self.kernels;
        let mut fields = vec![
            ("layers", self.layers().to_string()),
            ("hidden", self.hidden.to_string()),
            ("dtype", dtype_word(self.dtype).into()),
            ("cache_dtype", dtype_word(self.cache_dtype).into()),
            ("heads", heads.to_string()),
            ("kv_heads", kv_heads.to_string()),
            ("head_dim", head_dim.to_string()),
        ];
        if self.full_layers() < self.layers() {
            let window = |window: &Option<NonZeroUsize>| match window {
                Some(window) => window.to_string(),
                None => "full".into(),
            };
            let windows: Vec<String> = self.windows.iter().map(window).collect();
            fields.push(("windows", windows.join(",")));
        }
        let fields = fields.into_iter();
        fields.map(|(name, value)| (name.into(), value)).collect()
    }
}
