//! A cache that writes down what attention read.

use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::Tensor;
use kv_direct::{
    cache::{CacheBackend, CacheError, KeysValues, LayerIndex, Span},
    exact::Segment,
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
    let sequences = returned.sequences().iter();
    sequences.map(|segments| of_sequence(segments)).collect()
}

fn of_sequence(segments: &[Segment]) -> Vec<Vec<ReadEntry>> {
    let floats = |tensor: Tensor<3>| -> Vec<f32> { tensor.try_into_vec_as().unwrap_or_default() };
    let heads = segments
        .first()
        .map_or(0, |segment| segment.values().dims()[0]);
    let mut read: Vec<Vec<ReadEntry>> = vec![Vec::new(); heads];
    for segment in segments {
        let [_, slots, width] = segment.values().dims();
        let (keys, values) = (floats(segment.key_rows()), floats(segment.values().clone()));
        for (head, read) in read.iter_mut().enumerate() {
            let at =
                |all: &[f32], slot: usize| all[(head * slots + slot) * width..][..width].to_vec();
            let entries = segment.positions(head).iter().enumerate();
            let used = entries.filter(|&(_, &position)| position != Positions::EMPTY);
            read.extend(used.map(|(slot, &p)| (p, at(&keys, slot), at(&values, slot))));
        }
    }
    for read in &mut read {
        read.sort_by_key(|(position, ..)| *position);
    }
    read
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
