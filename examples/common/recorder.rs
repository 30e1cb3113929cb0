//! A cache that writes down what attention read.

use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::Tensor;
use kv_direct::{
    cache::{CacheBackend, CacheError, KeysValues, LayerIndex, Span},
    forward_backend,
    positions::Positions,
};

/// One row that attention read at one KV head: its position, its key and its value, `[head_dim]`.
pub(crate) type ReadRow = (usize, Vec<f32>, Vec<f32>);

/// What attention read in one call: for each batch row and KV head its rows, positions rising.
pub(crate) type Read = Vec<Vec<Vec<ReadRow>>>;

/// Forwards everything and, where it records, keeps what each call of `keys_values` answered, layer by
/// layer.
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

    /// What was read since the last time this was asked.
    pub(crate) fn take(&self) -> Vec<Read> {
        std::mem::take(&mut self.reads.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The rows of an answer, copied, so that the cache's buffers stay its own.
fn copy(answer: &KeysValues) -> Read {
    let [batch, heads, width, slots] = answer.keys().dims();
    let rows = |tensor: Tensor<4>| -> Vec<f32> { tensor.try_into_vec_as().unwrap_or_default() };
    let keys = rows(answer.keys().clone().permute([0, 3, 1, 2]));
    let values = rows(answer.values().clone().permute([0, 2, 1, 3]));
    let of_head = |row: usize, head: usize| {
        let positions = answer.positions().slots(row, head);
        let at = |all: &[f32], slot: usize| {
            all[((row * slots + slot) * heads + head) * width..][..width].to_vec()
        };
        let used = (0..slots).filter(|&slot| positions[slot] != Positions::EMPTY);
        let mut read: Vec<ReadRow> = used
            .map(|slot| (positions[slot], at(&keys, slot), at(&values, slot)))
            .collect();
        read.sort_by_key(|(position, ..)| *position);
        read
    };
    (0..batch)
        .map(|row| (0..heads).map(|head| of_head(row, head)).collect())
        .collect()
}

impl<C> CacheBackend for Recorder<C>
where
    C: CacheBackend,
{
    fn keys_values(&mut self, layer: LayerIndex, span: Span<'_>) -> Result<KeysValues, CacheError> {
        let answer = self.inner.keys_values(layer, span)?;
        if self.recording {
            self.reads
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(copy(&answer));
        }
        Ok(answer)
    }

    forward_backend!(self => self.inner; begin wants observe commit queries lifecycle clear fork);
}
