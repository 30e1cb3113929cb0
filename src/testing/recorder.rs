//! A cache that records what attention may read.

use std::collections::BTreeMap;

use burn::tensor::Tensor;

use crate::{
    cache::{
        CacheBackend, CacheError, KeysValues, LayerIndex, ModelShape, Observation, Projection,
        Span, Step,
    },
    positions::{Positions, visible},
};

/// Sequence, KV head and position of an entry.
pub(super) type Place = (usize, usize, usize);

/// The bits of a key and of a value.
pub(super) type EntryBits = (Vec<u32>, Vec<u32>);

/// What one call of `keys_values` received and returned.
#[derive(Debug, Default)]
pub(super) struct Reading {
    /// The new entries, at the positions of their queries.
    pub(super) new: BTreeMap<Place, EntryBits>,
    /// The returned entries that a query of the step sees. For a sequence without tokens in the step, those that its
    /// next query sees.
    pub(super) entries: BTreeMap<Place, EntryBits>,
    /// A place that is returned in two slots.
    pub(super) duplicate: Option<Place>,
    /// Whether everything returned is finite, free slots included.
    pub(super) finite: bool,
    /// Bytes of the returned keys and values.
    pub(super) bytes: usize,
}

impl Reading {
    /// The first entry in which two readings differ, and how: what one has and the other.
    pub(super) fn difference(&self, other: &Self) -> Option<String> {
        let places = self.entries.keys().chain(other.entries.keys());
        let differs = |place: &&Place| self.entries.get(*place) != other.entries.get(*place);
        let at = places.filter(differs).min()?;
        let place = format!("at {at:?} (sequence, KV head, position)");
        Some(match (self.entries.get(at), other.entries.get(at)) {
            (Some(_), None) => format!("an entry {place} that is not"),
            (None, _) => format!("no entry {place}, and one is"),
            (Some((ours, _)), Some((theirs, _))) => {
                let part = if ours == theirs { "value" } else { "key" };
                format!("an entry {place} whose {part} has other bits than the one")
            }
        })
    }
}

/// Forwards every call, and records a [`Reading`] for each layer.
#[derive(Debug)]
pub(super) struct Recorder {
    inner: Box<dyn CacheBackend>,
    shape: ModelShape,
    /// Whether readings are recorded.
    recording: bool,
    /// Whether attention is asked for another report than the backend wants.
    misreports: bool,
    readings: Vec<Reading>,
}

impl Recorder {
    pub(super) fn new(inner: Box<dyn CacheBackend>, shape: ModelShape) -> Self {
        Self {
            inner,
            shape,
            recording: true,
            misreports: false,
            readings: Vec::new(),
        }
    }

    /// Only forwards calls.
    pub(super) fn unrecorded(self) -> Self {
        Self {
            recording: false,
            ..self
        }
    }

    /// From now on attention reports something that was not asked for, in every layer.
    pub(super) const fn misreport(&mut self) {
        self.misreports = true;
    }

    /// The readings of the last step, layer by layer.
    pub(super) fn readings(&self) -> &[Reading] {
        &self.readings
    }

    /// A recorder of a fork.
    pub(super) fn split(&self) -> Self {
        Self {
            inner: self.inner.fork(),
            shape: self.shape.clone(),
            recording: self.recording,
            misreports: false,
            readings: Vec::new(),
        }
    }

    fn record(&self, layer: usize, span: &Span<'_>, returned: &KeysValues) -> Reading {
        let query_positions = span.positions;
        let window = self.shape.windows.get(layer).copied().flatten();
        let [_, heads, ..] = span.projection.values.dims();
        let mut reading = Reading {
            finite: true,
            ..Reading::default()
        };
        for sequence in 0..query_positions.sequences() {
            let of_sequence = |tensor: &Tensor<4>| {
                let part = tensor.clone().slice_dim(2, query_positions.rows(sequence));
                part.squeeze_dim(0)
            };
            let Projection { keys, values } = span.projection;
            let new = Table::new(of_sequence(keys), of_sequence(values));
            let first = query_positions.slots(sequence, 0).first().copied();
            let first = first.filter(|&first| first != Positions::EMPTY);
            let first =
                first.unwrap_or_else(|| self.inner.lengths().get(sequence).copied().unwrap_or(0));
            for head in 0..heads {
                for (slot, &position) in used(query_positions.slots(sequence, head)) {
                    let at = (sequence, head, position);
                    reading.new.insert(at, new.entry(head, slot));
                }
            }
            for segment in returned.segments(sequence) {
                let old = Table::new(segment.key_rows(), segment.values().clone());
                reading.finite &= old.finite();
                reading.bytes += old.bytes(self.shape.cache_dtype.size());
                for head in 0..heads {
                    for (slot, &position) in used(segment.positions(head)) {
                        let at = (sequence, head, position);
                        if position < first && !visible(first, position, window) {
                            continue;
                        }
                        let entry = old.entry(head, slot);
                        if reading.entries.insert(at, entry).is_some() {
                            reading.duplicate = Some(at);
                        }
                    }
                }
            }
        }
        reading
    }
}

/// The slots in use, with their indices.
fn used(slots: &[usize]) -> impl Iterator<Item = (usize, &usize)> {
    let slots = slots.iter().enumerate();
    slots.filter(|&(_, &position)| position != Positions::EMPTY)
}

/// Keys and values `[heads, slots, width]` on the host.
struct Table {
    keys: Vec<f32>,
    values: Vec<f32>,
    dims: [usize; 3],
}

impl Table {
    fn new(keys: Tensor<3>, values: Tensor<3>) -> Self {
        let dims = values.dims();
        let host = |tensor: Tensor<3>| tensor.try_into_vec_as().expect("entries can be read");
        Self {
            keys: host(keys),
            values: host(values),
            dims,
        }
    }

    fn entry(&self, head: usize, slot: usize) -> EntryBits {
        let [_, slots, width] = self.dims;
        let from = (head * slots + slot) * width;
        let bits = |of: &[f32]| of[from..from + width].iter().map(|x| x.to_bits()).collect();
        (bits(&self.keys), bits(&self.values))
    }

    fn finite(&self) -> bool {
        self.keys.iter().chain(&self.values).all(|x| x.is_finite())
    }

    fn bytes(&self, element: usize) -> usize {
        (self.keys.len() + self.values.len()) * element
    }
}

impl CacheBackend for Recorder {
    fn begin(&mut self, step: &Step) -> Result<(), CacheError> {
        self.inner.begin(step)?;
        self.readings.clear();
        Ok(())
    }

    fn keys_values(&mut self, layer: LayerIndex, span: Span<'_>) -> Result<KeysValues, CacheError> {
        let returned = self.inner.keys_values(layer, span)?;
        if self.recording {
            let reading = self.record(layer.index(), &span, &returned);
            self.readings.push(reading);
        }
        Ok(returned)
    }

    fn wants(&self, layer: LayerIndex) -> Observation {
        match self.inner.wants(layer) {
            wanted if !self.misreports => wanted,
            Observation::ColumnSums => Observation::LastQueries(1),
            _ => Observation::ColumnSums,
        }
    }

    crate::forward_backend!(self => self.inner; observe commit queries lifecycle fork);

    fn clear(&mut self) {
        self.inner.clear();
        self.readings.clear();
    }
}
