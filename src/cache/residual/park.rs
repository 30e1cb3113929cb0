//! Falling to the floor between turns, and coming back.

use std::ops::ControlFlow;

use super::{
    Old, ResidualCheckpoint,
    plan::Flow,
    prefix::{CHUNK, Prefix, projection_bytes},
    rebuild::fill,
};
use crate::{
    cache::{CacheError, LayerIndex, Replay},
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
    /// [`Poisoned`](CacheError::Poisoned) while a step is open, and whatever the replay runs into.
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
        let short = |(row, &length): (usize, &usize)| {
            let mut limited = (0..self.layers.len()).filter(|&layer| self.plan.rebuilds(layer));
            limited.any(|layer| self.layers[layer].used(row) < length.min(self.hot))
        };
        self.emptied || self.progress.lengths().iter().enumerate().any(short)
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
        let (anchor, flow) = (self.progress.anchor(), self.plan.flow(self.emptied));
        let (mut rebuilt, mut prefix) = (Vec::with_capacity(layers), Prefix::default());
        let mut scratch = 0;
        for (layer, Flow { enters, leaves: on }) in flow.into_iter().enumerate() {
            if progress(Resuming {
                done: layer,
                layers,
            })
            .is_break()
            {
                return Ok(ControlFlow::Break(()));
            }
            let replay = at(LayerIndex::new(layer));
            let slides = self.shape.slides(layer);
            let kept = !(self.plan.rebuilds(layer) || slides && self.emptied);
            if !enters {
                rebuilt.push(self.layers[layer].clone());
                continue;
            }
            match self.plan.old(layer) {
                Old::Residual => prefix = self.residuals[layer].prefix(&lengths),
                _ if layer == 0 => prefix = Prefix::embed(&self.tokens, &lengths, &replay)?,
                _ => {}
            }
            let mut store = match kept {
                true => self.layers[layer].clone(),
                false => self.layers[layer].emptied(),
            };
            if slides {
                if !kept {
                    store.slide(&anchor);
                }
                let refilled = (!kept).then_some(&mut store);
                let passed = self.pass(layer, &mut prefix, &lengths, &replay, on, refilled)?;
                scratch = scratch.max(passed);
            } else {
                let (keys_values, beside) = match kept {
                    true => (store.read()?, 0),
                    false => {
                        let (after, hot) = (&lengths, self.hot);
                        let (read, filled) =
                            fill(&mut store, &prefix, &lengths, hot, after, None, &replay)?;
                        (read, filled.beside)
                    }
                };
                let mut temporaries = projection_bytes(lengths.len(), &self.shape);
                if on {
                    let slots = keys_values.positions().width();
                    temporaries = temporaries.max(replay.scratch(lengths.len(), CHUNK, slots));
                    prefix.advance(&keys_values, &replay)?;
                }
                scratch = scratch.max(beside + prefix.bytes() + temporaries);
            }
            rebuilt.push(store);
        }
        if progress(Resuming {
            done: layers,
            layers,
        })
        .is_break()
        {
            return Ok(ControlFlow::Break(()));
        }
        self.layers = rebuilt;
        self.emptied = false;
        (self.scratch_peak, self.sliding_peak) = (scratch, 0);
        Ok(ControlFlow::Continue(()))
    }
}
