//! Rows in every layer and one progress for all: what backends that store keys and values share.

use crate::{
    cache::{
        CacheError, Kept, KeysValues, LayerIndex, ModelShape, Span, progress::Progress, rows::Rows,
    },
    memory::MemoryReport,
};

#[derive(Debug, Clone)]
pub(crate) struct Layered {
    pub(crate) shape: ModelShape,
    pub(crate) progress: Progress,
    pub(crate) layers: Vec<Rows>,
}

impl Layered {
    pub(crate) fn new(shape: &ModelShape) -> Self {
        let layers = vec![Rows::default(); shape.layers()];
        Self {
            shape: shape.clone(),
            progress: Progress::default(),
            layers,
        }
    }

    /// Stores the span and answers all rows of its layer.
    pub(crate) fn append(
        &mut self,
        layer: LayerIndex,
        span: &Span<'_>,
    ) -> Result<KeysValues, CacheError> {
        self.progress.layer(layer, span, &self.shape)?;
        let rows = &mut self.layers[layer.index()];
        rows.append(span.projection, span.positions);
        rows.read()
    }

    pub(crate) fn kept(&self, layer: LayerIndex) -> Kept {
        self.layers
            .get(layer.index())
            .map_or_else(|| Kept::shared(Vec::new()), Rows::kept)
    }

    pub(crate) fn memory(&self) -> MemoryReport {
        let mut report = MemoryReport::default();
        for rows in &self.layers {
            let (used, reserved) = rows.bytes();
            report.keys_values += used;
            report.reserved += reserved;
        }
        report
    }

    /// Forgets the tokens from `to` on; everything if that is all.
    pub(crate) fn truncate(&mut self, to: usize) {
        if to == 0 {
            return self.clear();
        }
        self.progress.truncate(to);
        for rows in &mut self.layers {
            rows.retain(|_, position| position < to);
            rows.scrub();
            rows.shrink();
        }
    }

    pub(crate) fn clear(&mut self) {
        *self = Self::new(&self.shape);
    }
}
