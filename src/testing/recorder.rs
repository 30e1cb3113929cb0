//! A cache that writes down what attention is given to read.

use std::collections::BTreeMap;

use burn::tensor::Tensor;

use crate::{
    cache::{CacheBackend, CacheError, KeysValues, LayerIndex, ModelShape, Span, Step},
    positions::{Positions, visible},
};

/// Batch row, KV head and position of a row.
pub(super) type Place = (usize, usize, usize);

/// The bits of a key and of a value.
pub(super) type Row = (Vec<u32>, Vec<u32>);

/// What one call of `keys_values` was given, and what it answered.
#[derive(Debug, Default)]
pub(super) struct Shown {
    /// The new rows, at the positions their queries have.
    pub(super) given: BTreeMap<Place, Row>,
    /// The rows of the answer that a query of the step, or of a silent row's next step, can see.
    pub(super) rows: BTreeMap<Place, Row>,
    /// A place that two slots claim.
    pub(super) twice: Option<Place>,
    /// Whether all that the answer stores is finite, free slots too.
    pub(super) finite: bool,
    /// Bytes of the answer's keys and values.
    pub(super) bytes: usize,
}

/// Forwards everything, and writes down each layer's [`Shown`].
#[derive(Debug)]
pub(super) struct Recorder {
    inner: Box<dyn CacheBackend>,
    shape: ModelShape,
    /// Whether anything is written down.
    recording: bool,
    shown: Vec<Shown>,
}

impl Recorder {
    pub(super) fn new(inner: Box<dyn CacheBackend>, shape: ModelShape) -> Self {
        Self {
            inner,
            shape,
            recording: true,
            shown: Vec::new(),
        }
    }

    /// Forwards only.
    pub(super) fn unrecorded(self) -> Self {
        Self {
            recording: false,
            ..self
        }
    }

    /// What was shown in the last step, layer by layer.
    pub(super) fn shown(&self) -> &[Shown] {
        &self.shown
    }

    /// A fork that is watched too.
    pub(super) fn split(&self) -> Self {
        Self {
            inner: self.inner.fork(),
            shape: self.shape.clone(),
            recording: self.recording,
            shown: Vec::new(),
        }
    }

    fn write_down(&self, layer: usize, span: &Span<'_>, answer: &KeysValues) -> Shown {
        let slots = answer.positions();
        let queries = span.positions;
        let window = self.shape.windows.get(layer).copied().flatten();
        let [batch, heads, _, _] = answer.values().dims();
        let mut shown = Shown::default();
        let new = Table::new(span.projection.keys.clone(), span.projection.values.clone());
        let old = Table::new(
            answer.keys().clone().swap_dims(2, 3),
            answer.values().clone(),
        );
        shown.finite = old.finite();
        shown.bytes = old.bytes(self.shape.dtype.size());
        for row in 0..batch {
            let first = queries.slots(row, 0).first().copied();
            let first = first.filter(|&first| first != Positions::EMPTY);
            let first =
                first.unwrap_or_else(|| self.inner.lengths().get(row).copied().unwrap_or(0));
            for head in 0..heads {
                for (index, &position) in held(queries.slots(row, head)) {
                    let at = (row, head, position);
                    shown.given.insert(at, new.row(row, head, index));
                }
                for (index, &position) in held(slots.slots(row, head)) {
                    let at = (row, head, position);
                    if position < first && !visible(first, position, window) {
                        continue;
                    }
                    if shown.rows.insert(at, old.row(row, head, index)).is_some() {
                        shown.twice = Some(at);
                    }
                }
            }
        }
        shown
    }
}

/// The slots in use, with their numbers.
fn held(slots: &[usize]) -> impl Iterator<Item = (usize, &usize)> {
    let slots = slots.iter().enumerate();
    slots.filter(|&(_, &position)| position != Positions::EMPTY)
}

/// Keys and values `[batch, heads, rows, width]` on the host.
struct Table {
    keys: Vec<f32>,
    values: Vec<f32>,
    dims: [usize; 4],
}

impl Table {
    fn new(keys: Tensor<4>, values: Tensor<4>) -> Self {
        let dims = values.dims();
        let host = |tensor: Tensor<4>| tensor.try_into_vec_as().expect("rows can be read");
        Self {
            keys: host(keys),
            values: host(values),
            dims,
        }
    }

    fn row(&self, row: usize, head: usize, index: usize) -> Row {
        let [_, heads, rows, width] = self.dims;
        let from = ((row * heads + head) * rows + index) * width;
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
        self.shown.clear();
        Ok(())
    }

    fn keys_values(&mut self, layer: LayerIndex, span: Span<'_>) -> Result<KeysValues, CacheError> {
        let answer = self.inner.keys_values(layer, span)?;
        if self.recording {
            let shown = self.write_down(layer.index(), &span, &answer);
            self.shown.push(shown);
        }
        Ok(answer)
    }

    crate::forward_backend!(self => self.inner; wants observe commit queries lifecycle fork);

    fn clear(&mut self) {
        self.inner.clear();
        self.shown.clear();
    }
}
