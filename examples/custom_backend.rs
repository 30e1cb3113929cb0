//! A backend of one's own, put through the contract suite: `cargo test --example custom_backend`.
//!
//! `Thinned` keeps the newest rows and, of those just older, every second one. It stores rows as plain
//! tensors and decides nothing in layers with a window, where it keeps what the window and an undo need.

use std::cmp::Ordering;

use kv_direct::burn::tensor::{Device, Int, Tensor, TensorData};
use kv_direct::cache::{
    CacheBackend, CacheError, CachedPositions, FullKv, KeysValues, LayerIndex, ModelShape, Span,
    Step,
};
use kv_direct::{Decoder, exact::KV_BLOCK, memory::MemoryReport, positions::Positions};

/// One batch row at one layer: keys and values `[1, kv_heads, rows, head_dim]`, and their positions.
#[derive(Debug, Clone, Default)]
struct Rows {
    stored: Option<[Tensor<4>; 2]>,
    positions: Vec<usize>,
}

impl Rows {
    fn append(&mut self, new: [Tensor<4>; 2], positions: &[usize]) {
        self.positions.extend(positions);
        self.stored = Some(match self.stored.take() {
            Some([k, v]) => {
                let [new_k, new_v] = new;
                [
                    Tensor::cat(vec![k, new_k], 2),
                    Tensor::cat(vec![v, new_v], 2),
                ]
            }
            None => new,
        });
    }

    fn retain(&mut self, keep: impl Fn(usize) -> bool) {
        let slots = 0..self.positions.len();
        let stay: Vec<i64> = slots
            .filter(|&slot| keep(self.positions[slot]))
            .map(|slot| slot as i64)
            .collect();
        if let Some([k, v]) = self.stored.take().filter(|_| !stay.is_empty()) {
            let index = Tensor::<1, Int>::from_data(
                TensorData::new(stay.clone(), [stay.len()]),
                &k.device(),
            );
            self.stored = Some([k.select(2, index.clone()), v.select(2, index)]);
        }
        self.positions.retain(|&position| keep(position));
    }
}

#[derive(Debug, Clone)]
struct Thinned {
    shape: ModelShape,
    recent: usize,
    /// By layer and batch row.
    layers: Vec<Vec<Rows>>,
    lengths: Vec<usize>,
    /// Bytes of the last step's largest answer.
    shown: usize,
    /// The open step's lengths before and after it, and the layers that had their turn.
    open: Option<(Vec<usize>, Vec<usize>, usize)>,
}

impl Thinned {
    /// Holds up to `budget` rows.
    fn new(shape: &ModelShape, budget: usize) -> Self {
        let layers = vec![Vec::new(); shape.layers()];
        let (shape, lengths) = (shape.clone(), Vec::new());
        Self {
            shape,
            recent: budget / 2,
            layers,
            lengths,
            open: None,
            shown: 0,
        }
    }

    /// Whether a batch row that went from `before` to `after` tokens holds on to a position.
    fn keeps(&self, layer: usize, position: usize, before: usize, after: usize) -> bool {
        match self.shape.windows[layer] {
            Some(window) => position.saturating_add(window.get()) > before,
            None => {
                position + self.recent >= after
                    || (position + 3 * self.recent >= after && position.is_multiple_of(2))
            }
        }
    }
}

impl CacheBackend for Thinned {
    fn begin(&mut self, step: &Step) -> Result<(), CacheError> {
        let (expected, found) = (self.lengths.len(), step.starts().len());
        if self.open.is_some() {
            return Err(CacheError::Poisoned);
        }
        if expected > 0 && expected != found {
            return Err(CacheError::Sequences { expected, found });
        }
        for (row, &found) in step.starts().iter().enumerate() {
            let expected = self.position(row);
            if found != expected {
                return Err(CacheError::Gap {
                    row,
                    expected,
                    found,
                });
            }
        }
        let (before, more) = (step.starts().to_vec(), step.tokens().lengths());
        let after = before
            .iter()
            .zip(more)
            .map(|(start, more)| start + more)
            .collect();
        self.lengths.clone_from(&before);
        (self.open, self.shown) = (Some((before, after, 0)), 0);
        Ok(())
    }

    fn keys_values(&mut self, layer: LayerIndex, span: Span<'_>) -> Result<KeysValues, CacheError> {
        let (before, after, called) = self.open.as_mut().ok_or(CacheError::Poisoned)?;
        if *called != layer.index() {
            let (expected, found) = (Some(*called), layer.index());
            return Err(CacheError::LayerOrder { expected, found });
        }
        *called += 1;
        let (keys, values) = (span.projection.keys.clone(), span.projection.values.clone());
        let [batch, heads, _, width] = keys.dims();
        let rows = &mut self.layers[layer.index()];
        rows.resize_with(batch, Rows::default);
        for (row, held) in rows.iter_mut().enumerate() {
            let new = after[row] - before[row];
            if new > 0 {
                let part = |all: &Tensor<4>| all.clone().slice([row..row + 1, 0..heads, 0..new]);
                held.append(
                    [part(&keys), part(&values)],
                    &span.positions.slots(row, 0)[..new],
                );
            }
        }
        // Shown are all rows side by side, each filled up to whole pieces, keys transposed.
        let longest = rows.iter().map(|held| held.positions.len()).max();
        let slots = longest.unwrap_or(0).next_multiple_of(KV_BLOCK);
        let options = (&keys.device(), keys.dtype());
        let mut shown_keys = Tensor::zeros([batch, heads, width, slots], options);
        let mut shown_values = Tensor::zeros([batch, heads, slots, width], options);
        let mut positions = Vec::new();
        for (row, held) in rows.iter().enumerate() {
            let (count, at) = (held.positions.len(), row..row + 1);
            positions.push([&held.positions[..], &vec![Positions::EMPTY; slots - count]].concat());
            if let Some([keys, values]) = held.stored.clone() {
                let to = [at.clone(), 0..heads, 0..width, 0..count];
                shown_keys = shown_keys.slice_assign(to, keys.swap_dims(2, 3));
                shown_values =
                    shown_values.slice_assign([at, 0..heads, 0..count, 0..width], values);
            }
        }
        self.shown = self
            .shown
            .max(2 * batch * heads * slots * width * keys.dtype().size());
        KeysValues::new(shown_keys, shown_values, Positions::shared(&positions))
    }

    fn commit(&mut self) -> Result<(), CacheError> {
        let (called, layers) = (
            self.open.as_ref().map_or(0, |open| open.2),
            self.layers.len(),
        );
        let Some((before, after, _)) = self.open.take_if(|_| called == layers) else {
            return Err(CacheError::Uncommittable { called, layers });
        };
        for layer in 0..layers {
            let mut rows = std::mem::take(&mut self.layers[layer]);
            for (row, held) in rows.iter_mut().enumerate() {
                held.retain(|position| self.keeps(layer, position, before[row], after[row]));
            }
            self.layers[layer] = rows;
        }
        self.lengths = after;
        Ok(())
    }

    fn position(&self, row: usize) -> usize {
        self.lengths.get(row).copied().unwrap_or(0)
    }

    fn cached(&self, layer: LayerIndex) -> CachedPositions {
        let rows = self
            .layers
            .get(layer.index())
            .map_or(&[][..], Vec::as_slice);
        let window = self.shape.windows.get(layer.index()).copied().flatten();
        let lists = rows.iter().enumerate().map(|(row, held)| {
            let next = self.position(row);
            let seen = |&&position: &&usize| kv_direct::positions::visible(next, position, window);
            held.positions.iter().filter(seen).copied().collect()
        });
        CachedPositions::shared(lists.collect())
    }

    fn memory(&self) -> MemoryReport {
        let rows: usize = self
            .layers
            .iter()
            .flatten()
            .map(|held| held.positions.len())
            .sum();
        let mut report = MemoryReport::default();
        report.scratch_peak = self.shown;
        report.keys_values = rows * 2 * self.shape.kv_width() * self.shape.dtype.size();
        report.reserved = rows * size_of::<usize>();
        report
    }

    fn rows(&self) -> usize {
        self.lengths.len()
    }

    fn truncate(&mut self, to: &[usize]) -> Result<(), CacheError> {
        let (expected, found) = (self.lengths.len(), to.len());
        if self.open.is_some() {
            return Err(CacheError::Poisoned);
        }
        if expected != found {
            return Err(CacheError::Sequences { expected, found });
        }
        let lengths = self.lengths.iter().zip(to).enumerate();
        // The plainest honest answer: what is not kept cannot be taken back.
        let refused = lengths.clone().find_map(|(row, (&length, &to))| {
            let (longest, oldest) = (length, length);
            match to.cmp(&length) {
                Ordering::Greater => Some(CacheError::TruncateBeyond { to, longest }),
                Ordering::Less => Some(CacheError::Irreversible { row, to, oldest }),
                Ordering::Equal => None,
            }
        });
        if to.iter().all(|&to| to == 0) {
            self.clear();
            return Ok(());
        }
        refused.map_or(Ok(()), Err)
    }

    fn clear(&mut self) {
        self.layers.iter_mut().for_each(Vec::clear);
        (self.lengths, self.open, self.shown) = (Vec::new(), None, 0);
    }

    fn fork(&self) -> Box<dyn CacheBackend> {
        Box::new(self.clone())
    }
}

fn main() -> anyhow::Result<()> {
    let config = kv_direct::model::DecoderConfig::new(97, 64, 3, 4, 2);
    let decoder = Decoder::from_weights(config, &Device::flex(), |_, shape| {
        let size: usize = shape.iter().product();
        Ok::<_, std::convert::Infallible>(
            (0..size)
                .map(|i| (i * 37 % 101) as f32 / 500.0 - 0.1)
                .collect::<Vec<_>>(),
        )
    })?;
    let (mut full, mut thinned) = (
        FullKv::new(&decoder.shape()),
        Thinned::new(&decoder.shape(), 8),
    );
    for token in 0..20 {
        decoder.forward(&[token][..], &mut full)?;
        decoder.forward(&[token][..], &mut thinned)?;
    }
    println!(
        "of 20 tokens it keeps {:?}",
        thinned.cached(LayerIndex::new(0)).row(0)[0]
    );
    let [ours, theirs] = [thinned.memory(), full.memory()].map(|report| report.keys_values);
    println!("{ours} bytes of keys and values, FullKv holds {theirs}");
    Ok(())
}

#[cfg(test)]
kv_direct::contract_tests! {
    on Device::flex();
    thinned => kv_direct::testing::Contract::lossy(|shape, _, budget| Thinned::new(shape, budget)).with_no_truncation().without_sessions();
}
