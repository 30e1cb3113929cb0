//! What a [`ResidualCheckpoint`](super::ResidualCheckpoint) retains of old tokens, layer by layer.

use std::fmt;

use crate::{
    cache::{CacheError, ModelShape},
    exact::{PANEL, whole},
    storage::newest_slots,
};

/// What is retained of old tokens at one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Retain {
    /// Their keys and values: nothing is rebuilt here. Not in a sliding-window layer, which keeps its window.
    KeysValues,
    /// The residual entering the layer, one vector a token. A norm and two projections give keys and values, and a
    /// replay of the layers above can start here.
    Residual,
    /// Nothing. A replay brings their residual from below: from the nearest layer that retains it, or from the token
    /// ids.
    Nothing,
}

/// What every layer retains of old tokens, how many tokens are hot, and the tokens of a chunk. Hot tokens have stored
/// entries in every layer. A replay processes a chunk at a time.
///
/// Every combination can be replayed. A replay runs through whole blocks, from the token ids or from a retained
/// residual up to the last layer that retains nothing; there it only projects. Token ids, 4 bytes a token, are kept
/// wherever a replay starts from them.
///
/// ```
/// use burn::tensor::DType;
/// use kv_direct::{cache::ModelShape, exact::KernelShapes, residual::Plan};
///
/// // SmolLM2-135M in f32, keys and values of the top half retained: half of them, and 4 bytes for the rest.
/// let shape = ModelShape::new(30, 576, DType::F32, KernelShapes::new(9, 3, 64));
/// let plan = Plan::retain_top(&shape, 15)?;
/// assert_eq!(plan.bytes_per_old_token(&shape), 4 + 46_080 / 2);
/// assert_eq!(plan.to_string(), "layers 0-14: nothing, 15-29: keys and values; token ids");
/// # Ok::<(), kv_direct::cache::CacheError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    layers: Vec<Retain>,
    /// Whether each layer has a sliding window.
    slides: Vec<bool>,
    hot: usize,
    chunk: usize,
}

/// The most tokens of a chunk by default: whole tiles for many numbers of threads. More tokens take as long, and more
/// memory.
const CHUNK: usize = 96;

/// The chunk by default: in small models fewer tokens, so that their temporaries take no more than the weights of a
/// block.
fn default_chunk(shape: &ModelShape) -> usize {
    let weights = shape.block_weights() * shape.dtype.size();
    let tokens = weights / shape.block_scratch(1, 1, PANEL).max(1);
    (tokens / PANEL * PANEL).clamp(PANEL, CHUNK)
}

/// The largest certified chunk: one tile of slots.
const CANONICAL: usize = 64;

/// Whether a replay carries old tokens into a layer, and on to the next.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Flow {
    pub(crate) enters: bool,
    pub(crate) leaves: bool,
}

impl Plan {
    /// The most tokens of a chunk.
    pub(crate) const LARGEST_CHUNK: usize = 4096;

    /// What each layer retains.
    ///
    /// # Errors
    /// [`PlanLayers`](CacheError::PlanLayers) for another number of layers,
    /// [`PlanWindow`](CacheError::PlanWindow) for keys and values in a sliding-window layer.
    pub fn new(shape: &ModelShape, layers: Vec<Retain>) -> Result<Self, CacheError> {
        let (expected, found) = (shape.layers(), layers.len());
        if expected != found {
            return Err(CacheError::PlanLayers { expected, found });
        }
        let plan = Self::by_layer(shape, |layer| layers[layer]);
        let slides = |layer: &usize| plan.slides[*layer];
        let mut windows = (0..expected).filter(slides);
        match windows.find(|&layer| plan.layers[layer] == Retain::KeysValues) {
            Some(layer) => Err(CacheError::PlanWindow { layer }),
            None => Ok(plan),
        }
    }

    /// Token ids alone.
    #[must_use]
    pub fn tokens(shape: &ModelShape) -> Self {
        Self::by_layer(shape, |_| Retain::Nothing)
    }

    /// The residual entering every full-attention layer. That is smaller than keys and values where
    /// `hidden < 2 · kv_heads · head_dim`, and nowhere else. If a sliding-window layer comes first, ids are kept too:
    /// nothing else leads to its entries.
    #[must_use]
    pub fn residuals(shape: &ModelShape) -> Self {
        Self::by_layer(shape, |layer| match shape.slides(layer) {
            true => Retain::Nothing,
            false => Retain::Residual,
        })
    }

    /// Keys and values of the top `count` layers, as far as these are full-attention layers. The rest is replayed from
    /// token ids.
    ///
    /// # Errors
    /// [`PlanLayers`](CacheError::PlanLayers) if there are fewer layers.
    pub fn retain_top(shape: &ModelShape, count: usize) -> Result<Self, CacheError> {
        let (expected, found) = (shape.layers(), count);
        let Some(first) = expected.checked_sub(count) else {
            return Err(CacheError::PlanLayers { expected, found });
        };
        Ok(Self::by_layer(shape, |layer| {
            match layer < first || shape.slides(layer) {
                true => Retain::Nothing,
                false => Retain::KeysValues,
            }
        }))
    }

    /// The residual entering one layer, from which it and all above are replayed; keys and values below.
    ///
    /// # Errors
    /// [`PlanLayers`](CacheError::PlanLayers) if there is no such layer.
    pub fn residual_at(shape: &ModelShape, at: usize) -> Result<Self, CacheError> {
        if at >= shape.layers() {
            let (expected, found) = (shape.layers(), at.saturating_add(1));
            return Err(CacheError::PlanLayers { expected, found });
        }
        Ok(Self::by_layer(shape, |layer| match layer {
            _ if layer == at => Retain::Residual,
            _ if layer > at || shape.slides(layer) => Retain::Nothing,
            _ => Retain::KeysValues,
        }))
    }

    fn by_layer(shape: &ModelShape, retain: impl Fn(usize) -> Retain) -> Self {
        let layers = 0..shape.layers();
        Self {
            layers: layers.clone().map(retain).collect(),
            slides: layers.map(|layer| shape.slides(layer)).collect(),
            hot: 0,
            chunk: default_chunk(shape),
        }
    }

    /// With `tokens` hot tokens: the newest, whose entries are stored in every layer. 0 by default, which rebuilds
    /// everything that the plan does not retain. `usize::MAX` stores all until the cache is
    /// [parked](crate::cache::CacheBackend::park).
    #[must_use]
    pub const fn with_hot(mut self, tokens: usize) -> Self {
        self.hot = tokens;
        self
    }

    /// Sets the chunk: how many tokens a replay processes at a time, from 1 to 4,096. The default is 96, and less in
    /// models so small that the temporaries of 96 tokens would exceed the weights of a block. Smaller chunks need less
    /// memory and take longer. No bit depends on it.
    #[must_use]
    pub const fn with_chunk(mut self, tokens: usize) -> Self {
        self.chunk = match tokens {
            0 => 1,
            tokens if tokens > Self::LARGEST_CHUNK => Self::LARGEST_CHUNK,
            tokens => tokens,
        };
        self
    }

    /// Hot tokens.
    #[must_use]
    pub const fn hot(&self) -> usize {
        self.hot
    }

    /// Tokens of a chunk.
    #[must_use]
    pub const fn chunk(&self) -> usize {
        self.chunk
    }

    /// What a layer retains.
    ///
    /// # Panics
    /// If there is no such layer.
    #[must_use]
    pub fn retain(&self, layer: usize) -> Retain {
        self.layers[layer]
    }

    /// Bytes of one token that is no longer hot and has left all sliding windows.
    #[must_use]
    pub fn bytes_per_old_token(&self, shape: &ModelShape) -> usize {
        let layers = self.layers.iter().map(|retain| match retain {
            Retain::KeysValues => 2 * shape.kv_width() * shape.cache_dtype.size(),
            Retain::Residual => shape.hidden * shape.dtype.size(),
            Retain::Nothing => 0,
        });
        layers.sum::<usize>() + usize::from(self.retains_ids()) * size_of::<u32>()
    }

    /// Whether a replay starts from the token ids, if only to rebuild a sliding window.
    #[must_use]
    pub fn retains_ids(&self) -> bool {
        let flow = self.flow(|layer| self.rebuilds(layer) || self.slides[layer]);
        let first = flow.first().copied().unwrap_or_default();
        first.enters && self.layers.first() != Some(&Retain::Residual)
    }

    /// The plan, if it is one for this model.
    pub(super) fn checked(self, shape: &ModelShape) -> Result<Self, CacheError> {
        let Self { hot, chunk, .. } = self;
        let plan = Self::new(shape, self.layers)?;
        Ok(plan.with_hot(hot).with_chunk(chunk))
    }

    /// Checks that it is a plan for as many layers.
    pub(crate) const fn check_layers(&self, shape: &ModelShape) -> Result<(), CacheError> {
        let (expected, found) = (shape.layers(), self.layers.len());
        if expected != found {
            return Err(CacheError::PlanLayers { expected, found });
        }
        Ok(())
    }

    /// Number of layers.
    pub(super) const fn layers(&self) -> usize {
        self.layers.len()
    }

    pub(crate) fn has_residuals(&self) -> bool {
        self.layers.contains(&Retain::Residual)
    }

    /// Whether a full-attention layer stores no more than the hot entries.
    pub(crate) fn rebuilds(&self, layer: usize) -> bool {
        !self.slides[layer] && self.layers[layer] != Retain::KeysValues
    }

    /// With a power of two of at most 64 tokens as chunk. Full and partial chunks then read the same tiles, so kernels
    /// always see the same shapes.
    pub(super) const fn canonical(mut self) -> Self {
        let mut chunk = CANONICAL;
        while chunk > self.chunk {
            chunk /= 2;
        }
        self.chunk = chunk;
        self
    }

    /// The most slots that a rebuilt layer has, unless some entries differed when they were rebuilt. Certified entries
    /// are dropped in whole chunks.
    pub(super) const fn slots(&self, certified: bool) -> usize {
        match certified {
            true => whole(self.hot.saturating_add(self.chunk)),
            false => newest_slots(self.hot),
        }
    }

    /// Which layers a replay runs through if entries are `missing` at these.
    pub(crate) fn flow(&self, missing: impl Fn(usize) -> bool) -> Vec<Flow> {
        let mut flow = vec![Flow::default(); self.layers.len()];
        let mut leaves = false;
        for (layer, flow) in flow.iter_mut().enumerate().rev() {
            let enters = leaves || missing(layer);
            *flow = Flow { enters, leaves };
            // A retained residual need not be brought to its layer.
            leaves = enters && self.layers[layer] != Retain::Residual;
        }
        flow
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = |layer: usize| match self.layers[layer] {
            Retain::KeysValues => "keys and values",
            Retain::Residual => "residual",
            Retain::Nothing if self.slides[layer] => "window",
            Retain::Nothing => "nothing",
        };
        f.write_str("layers ")?;
        let (mut from, layers) = (0, self.layers.len());
        while from < layers {
            let to = (from..layers).find(|&layer| kind(layer) != kind(from));
            let to = to.unwrap_or(layers);
            let comma = if from == 0 { "" } else { ", " };
            match to - from {
                1 => write!(f, "{comma}{from}: {}", kind(from))?,
                _ => write!(f, "{comma}{from}-{}: {}", to - 1, kind(from))?,
            }
            from = to;
        }
        f.write_str(if self.retains_ids() {
            "; token ids"
        } else {
            ""
        })
    }
}

#[cfg(test)]
mod tests;
