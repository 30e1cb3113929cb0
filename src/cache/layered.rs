//! Rows in every layer and one progress for all: what backends that store keys and values share.
//!
//! Layers with a window look after themselves here, so that a policy is about the others alone.

use crate::{
    cache::{
        CacheError, Kept, LayerIndex, ModelShape, Span, State, Step, progress::Progress,
        rows::Rows, state::wrong,
    },
    memory::MemoryReport,
};

#[derive(Debug, Clone)]
pub(crate) struct Layered {
    pub(crate) shape: ModelShape,
    pub(crate) progress: Progress,
    pub(crate) layers: Vec<Rows>,
    /// The most bytes held at any time of the last step.
    peak: usize,
}

impl Layered {
    /// Empty; in layers without a window each KV head may hold other rows where `per_head` says so.
    pub(crate) fn new(shape: &ModelShape, per_head: bool) -> Self {
        let layers = shape.windows.iter().map(|&window| match window {
            None if per_head => Rows::per_head(shape.kernels.kv_heads),
            window => Rows::new(window),
        });
        Self {
            shape: shape.clone(),
            progress: Progress::default(),
            layers: layers.collect(),
            peak: 0,
        }
    }

    pub(crate) fn begin(&mut self, step: &Step) -> Result<(), CacheError> {
        self.progress.begin(step)?;
        self.peak = 0;
        for layer in 0..self.layers.len() {
            let moved = self.layers[layer].slide(&self.progress.anchor());
            if moved > 0 {
                self.peak = self.peak.max(moved + self.memory().total());
            }
        }
        Ok(())
    }

    /// Stores the span in its layer, the next one that is due.
    pub(crate) fn store(&mut self, layer: LayerIndex, span: &Span<'_>) -> Result<(), CacheError> {
        self.progress.layer(layer, span, &self.shape)?;
        let moved = self.layers[layer.index()].append(span.projection, span.positions);
        self.peak = self.peak.max(moved + self.memory().total());
        Ok(())
    }

    /// Lets `drop` free slots of a layer, and gives back what is not needed for the rest; `beside` is
    /// what is held meanwhile beside the rows.
    pub(crate) fn evict(&mut self, layer: usize, beside: usize, drop: impl FnOnce(&mut Rows)) {
        let held = self.memory().total() + beside;
        drop(&mut self.layers[layer]);
        let moved = self.layers[layer].shrink();
        self.peak = self.peak.max(held + moved);
    }

    /// In layers without a window, drops the rows whose position `keep(row, position)` declines.
    pub(crate) fn retain(&mut self, keep: impl Fn(usize, usize) -> bool) {
        for layer in 0..self.layers.len() {
            if !self.shape.slides(layer) {
                self.evict(layer, 0, |rows| rows.retain(&keep));
            }
        }
    }

    /// What a next query could read: the rows held, as far as the layer's window shows them.
    pub(crate) fn kept(&self, layer: LayerIndex) -> Kept {
        let rows = self
            .layers
            .get(layer.index())
            .map_or_else(Vec::new, Rows::kept);
        self.shape.readable(layer, self.progress.lengths(), rows)
    }

    pub(crate) fn memory(&self) -> MemoryReport {
        let mut report = Rows::report(&self.layers);
        report.scratch_peak = self.peak.saturating_sub(report.total());
        report
    }

    /// Checks that a truncation makes sense, that no layer with a window has let go of what it needs,
    /// and that no batch row gets shorter than `oldest(row, length)`, where a policy let go.
    pub(crate) fn can_truncate(
        &self,
        to: &[usize],
        oldest: impl Fn(usize, usize) -> usize,
    ) -> Result<(), CacheError> {
        self.progress.can_truncate(to)?;
        if self.progress.is_draft() {
            return Ok(());
        }
        Rows::reachable(&self.layers, self.progress.lengths(), to, oldest)
    }

    /// Takes every batch row back to its length in `to`.
    pub(crate) fn truncate(&mut self, to: &[usize]) {
        for rows in &mut self.layers {
            rows.cut(self.progress.lengths(), to);
        }
        self.progress.truncate(to);
        self.peak = 0;
        // Within a draft slots stay where they are: what its queries saw is told by slot.
        if !self.progress.is_draft() {
            self.settle();
        }
    }

    /// Gives back what half of the buffers no longer need.
    pub(crate) fn settle(&mut self) {
        for layer in 0..self.layers.len() {
            let held = self.memory().total();
            let moved = self.layers[layer].settle();
            self.peak = self.peak.max(held + moved);
        }
    }

    /// Takes note of bytes that are held beside the rows now.
    pub(crate) fn hold(&mut self, beside: usize) {
        self.peak = self.peak.max(self.memory().total() + beside);
    }

    pub(crate) fn select_rows(&mut self, rows: &[usize]) {
        self.layers
            .iter_mut()
            .for_each(|layer| layer.select_rows(rows));
        self.progress.select_rows(rows);
        self.peak = 0;
    }

    /// Adds lengths and rows to a state.
    pub(crate) fn write(&self, state: &mut State) {
        state.insert_positions("lengths", self.progress.lengths().iter().copied());
        for (layer, rows) in self.layers.iter().enumerate() {
            rows.write(layer, state);
        }
    }

    /// The same kind of layers with lengths and rows of a state.
    pub(crate) fn restored(&self, state: &State) -> Result<Self, CacheError> {
        let lengths = state.lengths()?;
        let layers = self.layers.iter().enumerate();
        let layers = layers.map(|(layer, rows)| {
            let rows = rows.restored(layer, &lengths, &self.shape, state)?;
            match rows.are_some(&lengths) {
                true => Ok(rows),
                false => Err(wrong(&format!("layer.{layer}.slots"), "no row is held")),
            }
        });
        Ok(Self {
            shape: self.shape.clone(),
            layers: layers.collect::<Result<_, _>>()?,
            progress: Progress::at(lengths),
            peak: 0,
        })
    }

    /// Checks that no row is missing in a layer that shows all keys.
    pub(crate) fn all_held(&self) -> Result<(), CacheError> {
        let lengths = self.progress.lengths();
        let missing = |(layer, rows): &(usize, &Rows)| {
            !self.shape.slides(*layer) && !rows.are_newest(lengths, |row| lengths[row])
        };
        match self.layers.iter().enumerate().find(missing) {
            Some((layer, _)) => Err(wrong(&format!("layer.{layer}.slots"), "a row is missing")),
            None => Ok(()),
        }
    }

    pub(crate) fn clear(&mut self) {
        self.progress = Progress::default();
        self.layers
            .iter_mut()
            .for_each(|rows| *rows = rows.emptied());
        self.peak = 0;
    }
}
