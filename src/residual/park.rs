//! Rebuilding ahead of the next step what parking has dropped.

use std::ops::ControlFlow;

use super::{
    ResidualCheckpoint,
    step_plan::{Beside, StepPlan},
};
use crate::{
    cache::{CacheError, LayerIndex, Replay, ResumeProgress},
    exact::in_pool,
};

impl ResidualCheckpoint {
    /// Rebuilds the hot entries that [`park`](crate::cache::CacheBackend::park) or a deep truncation dropped, so that
    /// the next step need not. `at` returns the decoder at a layer.
    ///
    /// `progress` is called before every layer and after the last. If it breaks, or if the replay fails, the cache is
    /// parked, as it was before. Where a byte budget has no room for the entries of a deep truncation beside the rebuilt
    /// ones, it is parked whole. If the cache is not [parked](Self::is_parked), neither closure is called.
    ///
    /// # Errors
    /// [`Poisoned`](CacheError::Poisoned) while a step is open, [`StepBytes`](CacheError::StepBytes) where a byte
    /// budget has no room beside what is held, and the errors of the replay.
    ///
    /// # Cost
    /// One prefill of the tokens, or one projection a layer from residuals.
    ///
    /// ```
    /// # #[cfg(feature = "model")]
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use std::ops::ControlFlow;
    ///
    /// use kv_direct::cache::CacheBackend;
    /// use kv_direct::residual::{Plan, ResidualCheckpoint};
    /// # use kv_direct::{burn::tensor::Device, model::{Decoder, DecoderConfig}};
    /// # let device = Device::flex();
    /// # let decoder = Decoder::from_weights(DecoderConfig::new(97, 64, 3, 4, 2), &device, |_, shape| {
    /// #     Ok::<_, std::convert::Infallible>(vec![0.01; shape.iter().product()])
    /// # })?;
    ///
    /// let plan = Plan::tokens(&decoder.shape()).with_hot(usize::MAX);
    /// let mut chat = ResidualCheckpoint::new(&decoder.shape(), decoder.conformance(), plan)?;
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
        progress: impl FnMut(ResumeProgress) -> ControlFlow<()> + Send,
    ) -> Result<ControlFlow<()>, CacheError>
    where
        R: Replay,
    {
        self.tracker.check_idle()?;
        if !self.is_parked() {
            return Ok(ControlFlow::Continue(()));
        }
        let device = self.setup.device.clone();
        in_pool(&device, || self.rebuild_all(at, progress))
    }

    /// Whether hot entries were dropped that a [`resume`](Self::resume), or the next step, rebuilds.
    #[must_use]
    pub fn is_parked(&self) -> bool {
        let hot = self.setup.plan.hot();
        let dropped = self.resident.dropped.iter().zip(self.tracker.lengths());
        let hot_dropped =
            |(&dropped, length): (&usize, &usize)| dropped > length.saturating_sub(hot);
        self.resident.windows_dropped || dropped.into_iter().any(hot_dropped)
    }

    fn rebuild_all<R>(
        &mut self,
        at: impl Fn(LayerIndex) -> R,
        mut progress: impl FnMut(ResumeProgress) -> ControlFlow<()>,
    ) -> Result<ControlFlow<()>, CacheError>
    where
        R: Replay,
    {
        let layers = self.setup.shape.layers();
        let (mut resumed, held_twice) = self.begin_resume()?;
        for layer in 0..layers {
            if progress(ResumeProgress::new(layer, layers)).is_break() {
                return Ok(ControlFlow::Break(()));
            }
            if resumed.step.flow[layer].enters {
                resumed.read(layer, None, &at(LayerIndex::new(layer)))?;
            }
        }
        if progress(ResumeProgress::new(layers, layers)).is_break() {
            return Ok(ControlFlow::Break(()));
        }
        resumed.finish();
        resumed.peak.beside += held_twice + resumed.resident.tokens.bytes();
        *self = resumed;
        Ok(ControlFlow::Continue(()))
    }

    /// A copy of this cache that a resume completes, and how many bytes of entries both hold. This cache stays as it is
    /// if the resume breaks off. Where a byte budget has no room for entries of both, this cache drops those that it
    /// can rebuild.
    fn begin_resume(&mut self) -> Result<(Self, usize), CacheError> {
        let held_twice = self.held_twice();
        let mut resumed = self.clone();
        let Err(refused) = resumed.prepare_resume(held_twice) else {
            return Ok((resumed, held_twice));
        };
        if self.setup.certified || held_twice == 0 {
            return Err(refused);
        }
        let mut parked = self.clone();
        parked.resident.drop_all(self.tracker.lengths());
        let mut resumed = parked.clone();
        resumed.prepare_resume(0)?;
        *self = parked;
        Ok((resumed, 0))
    }

    /// Bytes of the layers that a resume rebuilds, which are held until it has succeeded.
    fn held_twice(&self) -> usize {
        let layers = self.resident.layers.iter().enumerate();
        let lacking = layers.filter(|(layer, _)| self.resident.lacks(*layer));
        lacking.map(|(_, store)| store.held()).sum()
    }

    /// Decides what this copy of a parked cache rebuilds, beside `held_twice` bytes of the original.
    fn prepare_resume(&mut self, held_twice: usize) -> Result<(), CacheError> {
        let (lengths, anchor) = (self.tracker.lengths().to_vec(), self.tracker.anchor());
        let drafted = lengths.iter().zip(&anchor).map(|(n, anchor)| n - anchor);
        let beside = Beside {
            recent: drafted.max().unwrap_or(0).max(self.beyond_windows()),
            bytes: held_twice,
            // What the original holds stays as long as this may break off.
            complete: self.resident.complete.iter().filter(|&&c| c).count(),
        };
        let complete = self.affordable(&lengths, &lengths, beside)?;
        self.step = StepPlan::new(&self.setup, &self.resident, &lengths, complete);
        if self.resident.windows_dropped {
            self.resident.slide(&self.tracker);
        }
        self.resident.limit(&self.step.complete);
        self.peak = super::Peak::default();
        Ok(())
    }
}
