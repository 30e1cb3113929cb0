//! Falling to the floor between turns, and coming back.

use std::ops::ControlFlow;

use super::{
    ResidualCheckpoint,
    prefix::Prefix,
    turn::{Beside, Turn},
};
use crate::{
    cache::{CacheError, LayerIndex, Replay, rows::Rows},
    exact::in_pool,
};

/// How far a [`resume`](ResidualCheckpoint::resume) has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Resuming {
    /// Layers rebuilt.
    pub done: usize,
    /// Layers of the model.
    pub layers: usize,
}

impl ResidualCheckpoint {
    /// Rebuilds the exact rows that a [`park`](crate::cache::CacheBackend::park) or a deep truncation let
    /// go of, so that the next step need not: one prefill of the tokens, or one projection a layer above
    /// residuals. `at` is the decoder at a layer.
    ///
    /// `progress` is asked before every layer and after the last. Where it breaks off, and where it fails,
    /// the cache is as it was before: parked. A cache that is not [parked](Self::is_parked) asks nothing.
    ///
    /// # Errors
    /// [`Poisoned`](CacheError::Poisoned) while a step is open, [`StepBytes`](CacheError::StepBytes) where a budget
    /// has no room beside what is held, and whatever the replay runs into.
    ///
    /// ```
    /// # #[cfg(feature = "model")]
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use std::ops::ControlFlow;
    ///
    /// use kv_direct::cache::{CacheBackend, ResidualCheckpoint, ResidualConfig};
    /// # use kv_direct::{burn::tensor::Device, model::{Decoder, DecoderConfig}};
    /// # let device = Device::flex();
    /// # let decoder = Decoder::from_weights(DecoderConfig::new(97, 64, 3, 4, 2), &device, |_, shape| {
    /// #     Ok::<_, std::convert::Infallible>(vec![0.01; shape.iter().product()])
    /// # })?;
    ///
    /// let mut chat = ResidualCheckpoint::new(&decoder.shape(), &device, ResidualConfig::parked())?;
    /// decoder.forward(&[3, 1, 4, 1, 5][..], &mut chat)?;
    /// chat.park()?;
    /// assert_eq!(chat.memory().total(), 5 * 4, "a token costs its id");
    ///
    /// let cancelled = chat.resume(|layer| decoder.at(layer), |_| ControlFlow::Break(()))?;
    /// assert!(cancelled.is_break());
    /// assert_eq!(chat.memory().total(), 5 * 4, "still parked");
    ///
    /// let resumed = chat.resume(|layer| decoder.at(layer), |_| ControlFlow::Continue(()))?;
    /// assert!(resumed.is_continue());
    /// assert!(chat.memory().keys_values > 0);
    /// # Ok(())
    /// # }
    /// # #[cfg(not(feature = "model"))]
    /// # fn main() {}
    /// ```
    pub fn resume<R>(
        &mut self,
        at: impl Fn(LayerIndex) -> R + Send,
        progress: impl FnMut(Resuming) -> ControlFlow<()> + Send,
    ) -> Result<ControlFlow<()>, CacheError>
    where
        R: Replay,
    {
        self.progress.settled()?;
        if !self.is_parked() {
            return Ok(ControlFlow::Continue(()));
        }
        let device = self.device.clone();
        let rows = self.progress.lengths().iter().sum();
        in_pool(&device, rows, || self.rebuild_all(at, progress))
    }

    /// Whether exact rows were let go of that a [`resume`](Self::resume), or the next step, rebuilds.
    #[must_use]
    pub fn is_parked(&self) -> bool {
        let hot = self.plan.hot();
        let mut rows = self.dropped.iter().zip(self.progress.lengths());
        self.emptied || rows.any(|(&dropped, length)| dropped > length.saturating_sub(hot))
    }

    fn rebuild_all<R>(
        &mut self,
        at: impl Fn(LayerIndex) -> R,
        mut progress: impl FnMut(Resuming) -> ControlFlow<()>,
    ) -> Result<ControlFlow<()>, CacheError>
    where
        R: Replay,
    {
        let (lengths, layers) = (self.progress.lengths().to_vec(), self.shape.layers());
        let anchor = self.progress.anchor();
        let drafted = lengths
            .iter()
            .zip(&anchor)
            .map(|(length, anchor)| length - anchor);
        // Beside the cache itself, so that it is as it was where this breaks off.
        let mut resumed = self.clone();
        let lacking = (0..layers).filter(|&layer| self.lacks(layer));
        let twice = lacking.map(|layer| {
            let (used, free) = self.layers[layer].bytes();
            used + free
        });
        let twice = twice.sum::<usize>();
        let recent = drafted.max().unwrap_or(0).max(self.beyond_windows());
        let beside = Beside {
            recent,
            bytes: twice,
            // What the cache holds stays as long as this may break off.
            whole: self.whole.iter().filter(|&&whole| whole).count(),
        };
        let whole = self.affordable(&lengths, &lengths, beside)?;
        let hot = self.plan.hot();
        let oldest = lengths.iter().map(|length| length.saturating_sub(hot));
        let missing = |layer: usize| match self.shape.slides(layer) {
            true => self.emptied,
            false => resumed.lacks(layer),
        };
        let flow = self.plan.flow(missing);
        if self.emptied {
            resumed.layers.iter_mut().for_each(|rows| {
                rows.slide(&anchor);
            });
        }
        resumed.limit_layers(&whole);
        resumed.turn = Turn {
            carried: resumed.dropped.clone(),
            oldest: oldest.collect(),
            flow,
            whole,
        };
        (resumed.scratch_peak, resumed.sliding_peak) = (0, 0);
        for layer in 0..layers {
            let done = Resuming {
                done: layer,
                layers,
            };
            if progress(done).is_break() {
                return Ok(ControlFlow::Break(()));
            }
            if resumed.turn.flow[layer].enters {
                resumed.answer(layer, None, &at(LayerIndex::new(layer)))?;
            }
        }
        let done = Resuming {
            done: layers,
            layers,
        };
        if progress(done).is_break() {
            return Ok(ControlFlow::Break(()));
        }
        resumed.replaying = Prefix::default();
        resumed.answer_rows = Rows::by_position();
        resumed.end_turn();
        resumed.scratch_peak += twice + resumed.tokens.bytes();
        *self = resumed;
        Ok(ControlFlow::Continue(()))
    }
}
