//! What a [`ResidualCheckpoint`](super::ResidualCheckpoint) keeps of old tokens, layer by layer.

use std::fmt;

use crate::cache::{CacheError, Floor, ModelShape};

/// What is kept of old tokens at one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Old {
    /// Their keys and values: nothing is rebuilt here. Not in a layer with a window, which keeps that.
    KeysValues,
    /// The residual entering the layer, one vector a token: a norm and two projections give keys and
    /// values, and a replay of the layers above can start here.
    Residual,
    /// Nothing: a replay brings their residual from below, from the nearest layer that keeps it or from
    /// the token ids.
    Nothing,
}

/// What is kept of old tokens at every layer, and with it where replays start and how far they run; how many
/// tokens are not old, but hot: exact rows in every layer; and how many rows a replay takes in one call.
///
/// Every choice can be replayed: token ids, 4 bytes a token, are kept wherever it takes them. A replay runs
/// through whole blocks, from the ids or from a kept residual up to the last layer that keeps nothing; there
/// it only projects.
///
/// ```
/// use burn::tensor::DType;
/// use kv_direct::cache::{ModelShape, Plan};
/// use kv_direct::exact::conformance::KernelShapes;
///
/// // SmolLM2-135M in f32, the top half kept: half of the keys and values, and 4 bytes for the rest.
/// let shape = ModelShape::new(30, 576, DType::F32, KernelShapes::new(9, 3, 64));
/// let plan = Plan::keep_top(&shape, 15)?;
/// assert_eq!(plan.bytes_per_old_token(&shape), 4 + 46_080 / 2);
/// assert_eq!(plan.to_string(), "layers 0-14: nothing, 15-29: keys and values; token ids");
/// # Ok::<(), kv_direct::cache::CacheError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    layers: Vec<Old>,
    /// Whether each layer has a window.
    slides: Vec<bool>,
    hot: usize,
    chunk: usize,
}

/// Rows of a replay's call unless the plan says otherwise: from about 100 on products of many rows run at their
/// full speed, and attention holds the scores of 128 queries at most.
const CHUNK: usize = 128;

/// The most rows of a call that reads the same tiles of slots however many of its rows are there.
const CANONICAL: usize = 64;

/// Whether a replay carries old rows into a layer, and on to the next.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Flow {
    pub(super) enters: bool,
    pub(super) leaves: bool,
}

impl Plan {
    /// The most rows of a call of a replay.
    pub(super) const WIDEST: usize = 4096;

    /// What is kept at every layer.
    ///
    /// # Errors
    /// [`PlanLayers`](CacheError::PlanLayers) for another number of layers,
    /// [`PlanWindow`](CacheError::PlanWindow) for keys and values in a layer with a window.
    pub fn new(shape: &ModelShape, layers: Vec<Old>) -> Result<Self, CacheError> {
        let (expected, found) = (shape.layers(), layers.len());
        if expected != found {
            return Err(CacheError::PlanLayers { expected, found });
        }
        let slides: Vec<bool> = (0..expected).map(|layer| shape.slides(layer)).collect();
        let mut both = layers.iter().zip(&slides);
        match both.position(|(old, slides)| *slides && *old == Old::KeysValues) {
            Some(layer) => Err(CacheError::PlanWindow { layer }),
            None => Ok(Self {
                layers,
                slides,
                hot: 0,
                chunk: CHUNK,
            }),
        }
    }

    /// Token ids alone.
    #[must_use]
    pub fn tokens(shape: &ModelShape) -> Self {
        Self::by_layer(shape, |_| Old::Nothing)
    }

    /// The residual entering every layer that shows all keys.
    #[must_use]
    pub fn residuals(shape: &ModelShape) -> Self {
        Self::by_layer(shape, |layer| match shape.slides(layer) {
            true => Old::Nothing,
            false => Old::Residual,
        })
    }

    /// Keys and values of the top `count` layers, as far as these show all keys; the rest is replayed from
    /// token ids.
    ///
    /// # Errors
    /// [`PlanLayers`](CacheError::PlanLayers) if there are not so many layers.
    pub fn keep_top(shape: &ModelShape, count: usize) -> Result<Self, CacheError> {
        let (expected, found) = (shape.layers(), count);
        let Some(first) = expected.checked_sub(count) else {
            return Err(CacheError::PlanLayers { expected, found });
        };
        Ok(Self::by_layer(shape, |layer| {
            if layer < first || shape.slides(layer) {
                Old::Nothing
            } else {
                Old::KeysValues
            }
        }))
    }

    /// The residual entering one layer, from which it and all above are replayed; keys and values below.
    ///
    /// # Errors
    /// [`PlanLayers`](CacheError::PlanLayers) if there is no such layer.
    pub fn residual_at(shape: &ModelShape, at: usize) -> Result<Self, CacheError> {
        if at >= shape.layers() {
            let (expected, found) = (shape.layers(), at + 1);
            return Err(CacheError::PlanLayers { expected, found });
        }
        Ok(Self::by_layer(shape, |layer| {
            if layer == at {
                Old::Residual
            } else if layer > at || shape.slides(layer) {
                Old::Nothing
            } else {
                Old::KeysValues
            }
        }))
    }

    /// With `rows` hot rows: the newest of every layer, whose keys and values are not rebuilt. 0 before.
    #[must_use]
    pub const fn with_hot(mut self, rows: usize) -> Self {
        self.hot = rows;
        self
    }

    /// With replays in calls of `rows` rows, at least 1 and at most 4,096; 128 before. Fewer need less memory for their scores and
    /// take longer; bits do not depend on it.
    #[must_use]
    pub const fn with_chunk(mut self, rows: usize) -> Self {
        self.chunk = match rows {
            0 => 1,
            rows if rows > Self::WIDEST => Self::WIDEST,
            rows => rows,
        };
        self
    }

    /// Hot rows.
    #[must_use]
    pub const fn hot(&self) -> usize {
        self.hot
    }

    /// Rows of a call of a replay.
    #[must_use]
    pub const fn chunk(&self) -> usize {
        self.chunk
    }

    pub(super) fn of_floor(shape: &ModelShape, floor: Floor) -> Self {
        match floor {
            Floor::Tokens => Self::tokens(shape),
            Floor::Residuals => Self::residuals(shape),
        }
    }

    /// The plan, if it is one for this model.
    pub(super) fn checked(self, shape: &ModelShape) -> Result<Self, CacheError> {
        let Self { hot, chunk, .. } = self;
        Ok(Self::new(shape, self.layers)?
            .with_hot(hot)
            .with_chunk(chunk))
    }

    pub(super) fn has_residuals(&self) -> bool {
        self.layers.contains(&Old::Residual)
    }

    fn by_layer(shape: &ModelShape, old: impl Fn(usize) -> Old) -> Self {
        let layers = 0..shape.layers();
        Self {
            layers: layers.clone().map(old).collect(),
            slides: layers.map(|layer| shape.slides(layer)).collect(),
            hot: 0,
            chunk: CHUNK,
        }
    }

    /// What is kept at a layer.
    ///
    /// # Panics
    /// If there is no such layer.
    #[must_use]
    pub fn old(&self, layer: usize) -> Old {
        self.layers[layer]
    }

    /// Bytes of one token that has left the hot rows and all windows.
    #[must_use]
    pub fn bytes_per_old_token(&self, shape: &ModelShape) -> usize {
        let element = shape.dtype.size();
        let layers = self.layers.iter().map(|old| match old {
            Old::KeysValues => 2 * shape.kv_width() * element,
            Old::Residual => shape.hidden * element,
            Old::Nothing => 0,
        });
        let ids = if self.keeps_ids() {
            size_of::<u32>()
        } else {
            0
        };
        layers.sum::<usize>() + ids
    }

    /// Whether a replay starts from the token ids, be it that of rows of a window that were let go of.
    #[must_use]
    pub fn keeps_ids(&self) -> bool {
        let flow = self.flow(|layer| self.rebuilds(layer) || self.slides[layer]);
        let first = flow.first().copied().unwrap_or_default();
        first.enters && self.layers.first() != Some(&Old::Residual)
    }

    /// Whether a layer that shows all keys holds no more than the hot rows.
    pub(super) fn rebuilds(&self, layer: usize) -> bool {
        !self.slides[layer] && self.layers[layer] != Old::KeysValues
    }

    /// With chunks that read whole tiles of slots however many of their rows are there, so that their calls
    /// are always of the same shapes.
    pub(super) const fn canonical(mut self) -> Self {
        let mut chunk = CANONICAL;
        while chunk > self.chunk {
            chunk /= 2;
        }
        self.chunk = chunk;
        self
    }

    /// The most rows that a rebuilt layer holds, unless some differed when they were rebuilt. Rows leave in whole
    /// chunks where they are certified.
    pub(super) const fn limit(&self, certified: bool) -> usize {
        let more = if certified { self.chunk } else { 0 };
        self.hot.saturating_add(more)
    }

    /// Which layers a replay runs through if rows are `missing` at these.
    pub(super) fn flow(&self, missing: impl Fn(usize) -> bool) -> Vec<Flow> {
        let mut flow = vec![Flow::default(); self.layers.len()];
        let mut leaves = false;
        for (layer, flow) in flow.iter_mut().enumerate().rev() {
            let enters = leaves || missing(layer);
            *flow = Flow { enters, leaves };
            // What a layer keeps need not be brought to it.
            leaves = enters && self.layers[layer] != Old::Residual;
        }
        flow
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = |layer: usize| match self.layers[layer] {
            Old::KeysValues => "keys and values",
            Old::Residual => "residual",
            Old::Nothing if self.slides[layer] => "window",
            Old::Nothing => "nothing",
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
        f.write_str(if self.keeps_ids() { "; token ids" } else { "" })
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::DType;

    use super::{
        Old::{KeysValues, Nothing, Residual},
        *,
    };
    use crate::exact::conformance::KernelShapes;

    fn shape(windows: &[bool]) -> ModelShape {
        let mut shape = ModelShape::new(windows.len(), 64, DType::F32, KernelShapes::new(4, 2, 16));
        for (window, &slides) in shape.windows.iter_mut().zip(windows) {
            *window = slides.then_some(std::num::NonZeroUsize::MIN);
        }
        shape
    }

    fn flow(shape: &ModelShape, layers: &[Old], windows: bool) -> String {
        let plan = Plan::new(shape, layers.to_vec()).expect("a plan");
        let sign = |flow: Flow| match (flow.enters, flow.leaves) {
            (false, _) => '.',
            (true, false) => 'p',
            (true, true) => 'b',
        };
        let missing = |layer| plan.rebuilds(layer) || windows && plan.slides[layer];
        plan.flow(missing).into_iter().map(sign).collect()
    }

    #[test]
    fn a_replay_runs_as_far_as_something_is_missing_and_only_projects_there() {
        let full = shape(&[false; 4]);
        assert_eq!(flow(&full, &[Nothing; 4], false), "bbbp");
        assert_eq!(
            flow(&full, &[Nothing, Nothing, KeysValues, KeysValues], false),
            "bp.."
        );
        assert_eq!(
            flow(&full, &[KeysValues, KeysValues, Residual, Nothing], false),
            "..bp"
        );
        assert_eq!(flow(&full, &[Residual; 4], false), "pppp");
        assert_eq!(
            flow(&full, &[Nothing, KeysValues, Nothing, KeysValues], false),
            "bbp."
        );
        assert_eq!(flow(&full, &[KeysValues; 4], false), "....");
    }

    #[test]
    fn a_layer_with_a_window_is_passed_through_and_rebuilt_where_its_rows_are_gone() {
        let gemma = shape(&[true, false, true, true]);
        assert_eq!(flow(&gemma, &[Nothing; 4], false), "bp..");
        assert_eq!(flow(&gemma, &[Nothing; 4], true), "bbbp");
        let ids = [true, false].map(|first| Plan::residuals(&shape(&[first, false])).keeps_ids());
        assert_eq!(
            ids,
            [true, false],
            "nothing else leads to the window of the first layer"
        );
        assert!(Plan::tokens(&shape(&[true; 2])).keeps_ids());
        assert!(!Plan::new(&shape(&[false; 2]), vec![KeysValues; 2]).is_ok_and(|p| p.keeps_ids()));
    }

    #[test]
    fn what_is_no_plan_for_the_model_is_refused() {
        let gemma = shape(&[true, false]);
        let refused = Plan::new(&gemma, vec![KeysValues; 2]).map(drop);
        assert!(matches!(refused, Err(CacheError::PlanWindow { layer: 0 })));
        let refused = Plan::new(&gemma, vec![Nothing]).map(drop);
        assert!(matches!(
            refused,
            Err(CacheError::PlanLayers {
                expected: 2,
                found: 1
            })
        ));
        assert!(Plan::keep_top(&gemma, 3).is_err() && Plan::residual_at(&gemma, 2).is_err());
        assert_eq!(
            Plan::keep_top(&gemma, 2).map(|plan| plan.old(0)).ok(),
            Some(Nothing)
        );
    }
}
