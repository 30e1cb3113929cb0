//! Measures whether a decoder repeats bits: in steps of any length, and in its [`Replay`].

use std::{
    collections::hash_map::DefaultHasher,
    hash::{Hash as _, Hasher as _},
    ops::Range,
};

use burn::tensor::{Device, Tensor};

use crate::{
    cache::{
        CacheBackend, CacheError, CheckedReplay, KeysValues, LayerIndex, ModelShape, Projection,
        Replay as _, Span, Step, TokenIds,
    },
    exact::{Check, CheckKind, Conformance, Subject},
    forward_backend,
    policy::FullKv,
    positions::Positions,
};

/// Rows of the calls that are compared with a step over the whole text.
const CALLS: [usize; 5] = [1, 2, 16, 65, 257];
/// Tokens of the steps in which the text comes a second time, over and over.
const STEPS: [usize; 8] = [1, 65, 1, 1, 3, 130, 1, 16];

impl Conformance {
    /// Runs a decoder of your own and compares every bit: that of `text` in one step with that of `text` in many steps,
    /// and with what its [`Replay`](crate::cache::Replay) returns for a few tokens at a time, at several offsets.
    /// `step` runs exactly one step of the decoder for these tokens on this cache. Of the last block only keys and values
    /// are compared: no cache replays it.
    ///
    /// The first 515 tokens of the text are used. A shorter text leaves out longer calls; one of less than 2 tokens
    /// leaves out everything, and the report does not cover the decoder. Tokens that `step` does not hand to the cache
    /// count as differing. Keep the report with the decoder: its caches can share it.
    ///
    /// # Errors
    /// Those of `step`. A failed [`Replay`](crate::cache::Replay) fails the step.
    ///
    /// # Cost
    /// That of about five prefills of the text.
    ///
    /// ```
    /// # #[cfg(feature = "model")]
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use kv_direct::exact::Conformance;
    /// # use kv_direct::{burn::tensor::Device, model::{Decoder, DecoderConfig}};
    /// # let decoder = Decoder::from_weights(DecoderConfig::new(97, 64, 3, 4, 2), &Device::flex(), |_, shape| {
    /// #     Ok::<_, std::convert::Infallible>(vec![0.01; shape.iter().product()])
    /// # })?;
    ///
    /// // The decoder of this crate, as if it were another one.
    /// let text: Vec<u32> = (0..100).map(|token| token * 7 % 97).collect();
    /// let report = Conformance::probe_decoder(&decoder.shape(), decoder.device(), &text, |tokens, cache| {
    ///     decoder.forward(tokens, cache).map(drop)
    /// })?;
    /// assert!(report.is_exact() && report.covers_decoder(), "{report}");
    /// # Ok(())
    /// # }
    /// # #[cfg(not(feature = "model"))]
    /// # fn main() {}
    /// ```
    pub fn probe_decoder<E>(
        shape: &ModelShape,
        device: &Device,
        text: &[u32],
        mut step: impl FnMut(TokenIds, &mut dyn CacheBackend) -> Result<(), E>,
    ) -> Result<Self, E> {
        let text = &text[..text.len().min(LONGEST)];
        let subject = Subject::new(&shape.kernels, device, shape.dtype);
        if text.len() < 2 {
            return Ok(Self::of_decoder(subject, Vec::new(), false));
        }
        let mut whole = Probe::new(shape);
        step(text.into(), &mut whole)?;
        let mut parts = Probe {
            expected: Some(whole.layers),
            ..Probe::new(shape)
        };
        let (mut rest, mut steps) = (text, STEPS.iter().cycle());
        while let (Some(&count), false) = (steps.next(), rest.is_empty()) {
            let (next, later) = rest.split_at(count.min(rest.len()));
            step(next.into(), &mut parts)?;
            rest = later;
        }
        parts.count_missing(text.len());
        let checks = [whole.checks, parts.checks].concat();
        Ok(Self::of_decoder(subject, checks, true))
    }
}

/// The most tokens of a text that are compared.
const LONGEST: usize = 2 * 257 + 1;

/// A hash of the bits of every row.
type Rows = Vec<u64>;

/// What came into a layer, and its keys and values.
#[derive(Debug, Clone, Default)]
struct Seen {
    residuals: Rows,
    keys: Rows,
    values: Rows,
}

/// A cache that compares what a decoder hands to it.
#[derive(Debug, Clone)]
struct Probe {
    inner: FullKv,
    shape: ModelShape,
    /// The tokens of the open step.
    tokens: TokenIds,
    /// Of the first step, which has the whole text.
    layers: Vec<Seen>,
    /// The same of an earlier probe. Steps are compared with it, and no replay is.
    expected: Option<Vec<Seen>>,
    /// Residuals that left the block before, with the first row and the size of their calls.
    left: Vec<(Range<usize>, usize, Rows)>,
    checks: Vec<Check>,
}

impl Probe {
    fn new(shape: &ModelShape) -> Self {
        Self {
            inner: FullKv::new(shape),
            shape: shape.clone(),
            tokens: TokenIds::default(),
            layers: Vec::new(),
            expected: None,
            left: Vec::new(),
            checks: Vec::new(),
        }
    }

    /// Adds a comparison of rows to the check of its kind, layer and size of calls.
    fn compare(&mut self, kind: CheckKind, layer: usize, rows: usize, pair: (&[u64], &[u64])) {
        let (found, expected) = pair;
        let pairs = found.iter().zip(expected);
        let (compared, differing) = (pairs.len(), pairs.filter(|(a, b)| a != b).count());
        let shape = vec![layer];
        let same =
            |check: &&mut Check| (check.kind, check.rows, &check.shape) == (kind, rows, &shape);
        if let Some(check) = self.checks.iter_mut().find(same) {
            check.compared += compared;
            check.differing += differing;
            return;
        }
        self.checks.push(Check {
            kind,
            shape,
            rows,
            compared,
            differing,
        });
    }

    /// Counts the tokens that were not compared, out of `tokens` in every layer, as differing.
    fn count_missing(&mut self, tokens: usize) {
        for layer in 0..self.shape.layers() {
            let of_layer =
                |check: &&Check| check.kind == CheckKind::Steps && check.shape == [layer];
            let compared = self
                .checks
                .iter()
                .filter(of_layer)
                .map(|check| check.compared);
            // Residuals, keys and values.
            let missing = (3 * tokens).saturating_sub(compared.sum());
            if missing > 0 {
                self.checks.push(Check {
                    kind: CheckKind::Steps,
                    shape: vec![layer],
                    rows: tokens,
                    compared: missing,
                    differing: missing,
                });
            }
        }
    }

    /// Compares the replay with this step, which has the whole text.
    fn replay(
        &mut self,
        layer: usize,
        span: &Span<'_>,
        seen: &Seen,
        keys_values: &KeysValues,
    ) -> Result<(), CacheError> {
        for (call, rows, found) in std::mem::take(&mut self.left) {
            let expected = &seen.residuals[call];
            self.compare(CheckKind::Block, layer - 1, rows, (&found, expected));
        }
        let shape = self.shape.clone();
        let replay = CheckedReplay {
            replay: span.replay,
            shape: &shape,
        };
        let tokens = span.positions.tokens();
        for rows in CALLS.into_iter().filter(|&rows| rows < tokens) {
            for call in offsets(tokens, rows) {
                let positions = Positions::contiguous(&[call.start], &[rows]);
                if layer == 0 {
                    let ids = TokenIds::from(&self.tokens.sequence(0)[call.clone()]);
                    let found = residuals(replay.embed(&ids, &positions)?);
                    let expected = &seen.residuals[call.clone()];
                    self.compare(CheckKind::Embedding, layer, rows, (&found, expected));
                }
                let residual = span.residual.clone().slice_dim(1, call.clone());
                let projected = replay.project(residual.clone(), &positions)?;
                let [keys, values] = entries(&projected);
                for (found, expected) in [(keys, &seen.keys), (values, &seen.values)] {
                    let expected = &expected[call.clone()];
                    self.compare(CheckKind::Projection, layer, rows, (&found, expected));
                }
                if layer + 1 < shape.layers() {
                    let left = replay.forward(residual, &positions, keys_values)?;
                    self.left.push((call, rows, residuals(left)));
                }
            }
        }
        Ok(())
    }
}

impl CacheBackend for Probe {
    fn begin(&mut self, step: &Step) -> Result<(), CacheError> {
        if step.starts().len() != 1 {
            return Err(CacheError::Sequences {
                expected: 1,
                found: step.starts().len(),
            });
        }
        self.inner.begin(step)?;
        self.tokens = step.tokens().clone();
        Ok(())
    }

    fn keys_values(&mut self, layer: LayerIndex, span: Span<'_>) -> Result<KeysValues, CacheError> {
        let keys_values = self.inner.keys_values(layer, span)?;
        let [keys, values] = entries(span.projection);
        let seen = Seen {
            residuals: residuals(span.residual.clone()),
            keys,
            values,
        };
        let layer = layer.index();
        if let Some(all) = self.expected.take() {
            let from = self.lengths().first().copied().unwrap_or(0);
            let rows = seen.keys.len();
            if let Some(expected) = all.get(layer) {
                let pairs = [
                    (&seen.residuals, &expected.residuals),
                    (&seen.keys, &expected.keys),
                    (&seen.values, &expected.values),
                ];
                for (found, expected) in pairs {
                    let expected = expected.get(from..from + rows).unwrap_or_default();
                    self.compare(CheckKind::Steps, layer, rows, (found, expected));
                }
            }
            self.expected = Some(all);
        } else if self.layers.len() < self.shape.layers() {
            self.replay(layer, &span, &seen, &keys_values)?;
            self.layers.push(seen);
        }
        Ok(keys_values)
    }

    forward_backend!(self => self.inner; wants observe commit queries lifecycle clear);

    fn fork(&self) -> Box<dyn CacheBackend> {
        Box::new(self.clone())
    }
}

/// Calls of so many rows out of `all`: both ends and the middle, and more for single rows.
fn offsets(all: usize, rows: usize) -> Vec<Range<usize>> {
    let last = all - rows;
    let mut starts = vec![0, last / 2, last];
    if rows == 1 {
        starts.extend((1..16).map(|i| i * last / 16));
    }
    starts.sort_unstable();
    starts.dedup();
    starts
        .into_iter()
        .map(|start| start..start + rows)
        .collect()
}

/// Hashes of the rows of `[1, rows, hidden]`.
fn residuals(tensor: Tensor<3>) -> Rows {
    let rows = tensor.dims()[1];
    hashes(tensor, rows)
}

/// Hashes of the rows of keys and of values.
fn entries(of: &Projection) -> [Rows; 2] {
    [&of.keys, &of.values].map(|entries| {
        let rows = entries.dims()[2];
        hashes(entries.clone().swap_dims(1, 2), rows)
    })
}

/// A hash of the bits of each of so many rows.
fn hashes<const D: usize>(tensor: Tensor<D>, rows: usize) -> Rows {
    let data = tensor.into_data();
    let bytes = data.as_bytes();
    let hash = |row: &[u8]| {
        let mut hasher = DefaultHasher::new();
        row.hash(&mut hasher);
        hasher.finish()
    };
    bytes
        .chunks_exact((bytes.len() / rows).max(1))
        .map(hash)
        .collect()
}
