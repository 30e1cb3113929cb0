//! A cache that writes down what attention read.

use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::Tensor;
use kv_direct::{
    cache::{CacheBackend, CacheError, KeysValues, LayerIndex, Span},
    forward_backend,
    positions::Positions,
};

/// An entry that attention read at one KV head: its position, its key and its value, `[head_dim]`.
pub(crate) type ReadEntry = (usize, Vec<f32>, Vec<f32>);

/// What attention read at one layer: the entries of each sequence and KV head, in rising positions.
pub(crate) type Read = Vec<Vec<Vec<ReadEntry>>>;

/// Forwards every call. If `recording`, copies what `keys_values` returns, layer by layer.
#[derive(Debug)]
pub(crate) struct Recorder<C> {
    inner: C,
    recording: bool,
    reads: Arc<Mutex<Vec<Read>>>,
}

impl<C> Recorder<C> {
    pub(crate) fn new(inner: C, recording: bool) -> Self {
        Self {
            inner,
            recording,
            reads: Arc::default(),
        }
    }

    /// Returns what was read since the last `take`.
    pub(crate) fn take(&self) -> Vec<Read> {
        std::mem::take(&mut self.reads.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Copies the returned entries, so that the cache need not share its buffers.
fn copy(returned: &KeysValues) -> Read {
    let [batch, heads, width, slots] = returned.keys().dims();
    let floats = |tensor: Tensor<4>| -> Vec<f32> { tensor.try_into_vec_as().unwrap_or_default() };
    let keys = floats(returned.keys().clone().permute([0, 3, 1, 2]));
    let values = floats(returned.values().clone().permute([0, 2, 1, 3]));
    let of_head = |sequence: usize, head: usize| {
        let positions = returned.positions().slots(sequence, head);
        let at = |all: &[f32], slot: usize| {
            all[((sequence * slots + slot) * heads + head) * width..][..width].to_vec()
        };
        let used = (0..slots).filter(|&slot| positions[slot] != Positions::EMPTY);
        let mut read: Vec<ReadEntry> = used
            .map(|slot| (positions[slot], at(&keys, slot), at(&values, slot)))
            .collect();
        read.sort_by_key(|(position, ..)| *position);
        read
    };
    (0..batch)
        .map(|sequence| (0..heads).map(|head| of_head(sequence, head)).collect())
        .collect()
}

impl<C> CacheBackend for Recorder<C>
where
    C: CacheBackend,
{
    fn keys_values(&mut self, layer: LayerIndex, span: Span<'_>) -> Result<KeysValues, CacheError> {
        let returned = self.inner.keys_values(layer, span)?;
        if self.recording {
            self.reads
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(copy(&returned));
        }
        Ok(returned)
    }

    forward_backend!(self => self.inner; begin wants observe commit queries lifecycle clear fork);
}
