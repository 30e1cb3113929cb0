//! How fast a device runs a model: measured, stored as text, given to the planner.

use std::time::Instant;

use burn::tensor::{Device, Tensor, TensorData};

use crate::{
    cache::{CacheError, KeysValues, LayerIndex, ModelShape, Projection, Replay},
    exact::{in_pool, whole},
    positions::Positions,
    storage::LayerStore,
};

/// How fast a device computes and reads for one model. [`Cost::seconds`](super::Cost::seconds) uses it.
///
/// [`measure`](Self::measure) runs blocks of the model for a few seconds. The text that `Display` writes can be stored
/// and parsed, so one measurement serves a model and machine.
///
/// ```
/// use kv_direct::planner::Throughput;
///
/// let stored = "read 9.1e9; 64 tokens: projection 5e10, block 6e10, attention 2e10";
/// let throughput: Throughput = stored.parse()?;
/// assert_eq!(throughput.chunks[0].tokens, 64);
/// assert_eq!(throughput.to_string().parse::<Throughput>()?, throughput);
/// # Ok::<(), kv_direct::cache::CacheError>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Throughput {
    /// Bytes a second at which a step of one token reads weights, keys and values.
    pub read: f64,
    /// One element for each chunk that was measured, smallest first.
    pub chunks: Vec<ChunkThroughput>,
}

/// How fast replays in chunks of this many tokens run, in floating-point operations a second. A multiplication and an
/// addition are two.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct ChunkThroughput {
    /// Tokens of a chunk.
    pub tokens: usize,
    /// Of the projection to keys and values, with its norm and rotation, and writing them where attention reads.
    pub projection: f64,
    /// Of a block's other matrices, with everything between them.
    pub block: f64,
    /// Of attention over the slots that are read.
    pub attention: f64,
}

/// Chunks that are measured, in tokens.
const CHUNKS: [usize; 5] = [16, 32, 64, 128, 256];
/// Attention is measured with these many tokens, and with a multiple of them.
const SHORT: usize = 512;
/// The most tokens that attention is measured with.
const LONGEST: usize = 2048;
/// Rounds in which every kind of call is measured once: slow moments of a shared machine pass.
const ROUNDS: usize = 7;
/// Measurements of a call per round: at least, at most. The median counts.
const TIMES: (usize, usize) = (3, 50);
/// Measures until the times add up to this many seconds, within [`TIMES`].
const SECONDS: f64 = 0.02;

impl Throughput {
    /// Measures blocks of a model for contexts of `context` tokens; `at` returns the model at a layer. Other work on
    /// the machine shows in the result.
    ///
    /// # Errors
    /// [`ModelShape`](CacheError::ModelShape), [`UnknownSize`](CacheError::UnknownSize) if the shape does not say
    /// [`intermediate`](ModelShape::intermediate), and the errors of the blocks.
    ///
    /// # Cost
    /// Seven rounds. Each has three kinds of calls of a block for five chunks, 16 to 256 tokens, and a step through all
    /// layers. That is about five seconds for SmolLM2-135M on two cores.
    ///
    /// ```
    /// # #[cfg(feature = "model")]
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use kv_direct::planner::Throughput;
    /// # use kv_direct::{burn::tensor::Device, model::{Decoder, DecoderConfig}};
    /// # let device = Device::flex();
    /// # let decoder = Decoder::from_weights(DecoderConfig::new(97, 64, 3, 4, 2), &device, |_, shape| {
    /// #     Ok::<_, std::convert::Infallible>(vec![0.01; shape.iter().product()])
    /// # })?;
    ///
    /// let measured = Throughput::measure(&decoder.shape(), &device, 1024, |layer| decoder.at(layer))?;
    /// assert!(measured.read > 0.0 && measured.chunks.len() == 5);
    /// # Ok(())
    /// # }
    /// # #[cfg(not(feature = "model"))]
    /// # fn main() {}
    /// ```
    pub fn measure<R>(
        shape: &ModelShape,
        device: &Device,
        context: usize,
        at: impl Fn(LayerIndex) -> R + Send + Sync,
    ) -> Result<Self, CacheError>
    where
        R: Replay,
    {
        shape.validate()?;
        shape.known_intermediate()?;
        if shape.layers() == 0 {
            return Err(CacheError::ModelShape {
                what: "layers",
                found: 0,
            });
        }
        // A full-attention layer, if there is one: its attention grows with the context.
        let layer = shape.windows.iter().position(Option::is_none).unwrap_or(0);
        let block = |tokens: usize| {
            in_pool(device, || {
                let at = at(LayerIndex::new(layer));
                Block::new(shape, device, &at, tokens).and_then(|block| block.measure(context))
            })
        };
        let mut times = vec![Vec::with_capacity(ROUNDS); CHUNKS.len()];
        let mut steps = Vec::with_capacity(ROUNDS);
        for _ in 0..ROUNDS {
            for (times, tokens) in times.iter_mut().zip(CHUNKS) {
                times.push(block(tokens)?);
            }
            steps.push(in_pool(device, || step(shape, device, context, &at))?);
        }
        let chunks = CHUNKS.into_iter().zip(times).map(|(tokens, times)| {
            let of = |time: fn(&Times) -> f64| middle(times.iter().map(time).collect());
            let (projected, short, long) = (of(|t| t.projected), of(|t| t.short), of(|t| t.long));
            let products = |weights: usize| 2.0 * (tokens * weights) as f64;
            let attended = |slots: usize| (tokens * attention_flops(shape, slots)) as f64;
            let (from, to) = spans(context, tokens);
            let rest = products(shape.block_weights() - shape.projection_weights());
            // In a context too short to tell them apart, all of it counts alike.
            let attention = match to > from && long > short {
                true => (attended(to) - attended(from)) / (long - short),
                false => (rest + attended(from)) / short,
            };
            let block = short - attended(from) / attention;
            ChunkThroughput {
                tokens,
                projection: products(shape.projection_weights()) / projected,
                block: rest / block.max(short / 10.0),
                attention,
            }
        });
        let chunks = chunks.collect();
        let entries = 2 * shape.kv_width() * spans(context, 1).0 * shape.cache_dtype.size();
        let token = shape.block_weights() * shape.dtype.size() + entries;
        let read = (shape.layers() * token) as f64 / middle(steps);
        Ok(Self { read, chunks })
    }
}

/// Seconds of a one-token step through all layers. A single layer would stay in the processor's caches.
fn step<R: Replay>(
    shape: &ModelShape,
    device: &Device,
    context: usize,
    at: &impl Fn(LayerIndex) -> R,
) -> Result<f64, CacheError> {
    let layers = (0..shape.layers()).map(LayerIndex::new).map(at);
    let layers: Vec<R> = layers.collect();
    let blocks = layers
        .iter()
        .map(|at| Block::new(shape, device, at, 1))
        .collect::<Result<Vec<_>, _>>()?;
    let tokens = spans(context, 1).0;
    let keys_values = blocks[0].keys_values(tokens)?;
    median(|| {
        blocks
            .iter()
            .try_for_each(|block| block.step(tokens, &keys_values))
    })
}

/// Operations of attention for one query over this many slots.
pub(super) const fn attention_flops(shape: &ModelShape, slots: usize) -> usize {
    (4 * shape.kernels.heads * shape.kernels.head_dim).saturating_mul(slots)
}

/// The two context lengths that attention is measured with, for a chunk of `tokens` tokens.
fn spans(context: usize, tokens: usize) -> (usize, usize) {
    let short = context.min(SHORT).max(tokens);
    (short, (context.min(LONGEST) / SHORT * SHORT).max(short))
}

/// Seconds of a call.
#[derive(Clone)]
struct Times {
    projected: f64,
    short: f64,
    long: f64,
}

/// A block, and a residual to run through it.
struct Block<'a, R> {
    at: &'a R,
    tokens: usize,
    residual: Tensor<3>,
}

impl<'a, R: Replay> Block<'a, R> {
    fn new(
        shape: &'a ModelShape,
        device: &Device,
        at: &'a R,
        tokens: usize,
    ) -> Result<Self, CacheError> {
        let numbers = (0..tokens * shape.hidden).map(|i| (i % 23) as f32 / 23.0 - 0.5);
        let data = TensorData::new(numbers.collect::<Vec<_>>(), [1, tokens, shape.hidden]);
        Ok(Self {
            at,
            tokens,
            residual: Tensor::from_data(data, (device, shape.dtype)),
        })
    }

    fn measure(&self, context: usize) -> Result<Times, CacheError> {
        let (short, long) = spans(context, self.tokens);
        let positions = |end: usize| Positions::contiguous(&[end - self.tokens], &[self.tokens]);
        let first = positions(self.tokens);
        let mut stored = LayerStore::by_position();
        let projected = median(|| {
            let entries = self.at.project(self.residual.clone(), &first)?;
            stored.vacate();
            stored.reserve(&[whole(long)], &entries);
            stored.append(&entries, &first);
            entries.values.into_data();
            Ok(())
        })?;
        let forward = |tokens: usize| {
            let (keys_values, queries) = (self.keys_values(tokens)?, positions(tokens));
            median(|| {
                let residual = self
                    .at
                    .forward(self.residual.clone(), &queries, &keys_values)?;
                residual.into_data();
                Ok(())
            })
        };
        Ok(Times {
            projected,
            short: forward(short)?,
            long: forward(long)?,
        })
    }

    /// What a step of one token computes at a layer.
    fn step(&self, tokens: usize, keys_values: &KeysValues) -> Result<(), CacheError> {
        let positions = Positions::contiguous(&[tokens - 1], &[1]);
        self.at.project(self.residual.clone(), &positions)?;
        let residual = self
            .at
            .forward(self.residual.clone(), &positions, keys_values)?;
        residual.into_data();
        Ok(())
    }

    /// Entries like these over and over, as a layer stores them.
    fn keys_values(&self, tokens: usize) -> Result<KeysValues, CacheError> {
        let first = Positions::contiguous(&[0], &[self.tokens]);
        let Projection { keys, values } = self.at.project(self.residual.clone(), &first)?;
        let times = tokens.div_ceil(self.tokens);
        let repeat = |part: Tensor<4>| part.repeat_dim(2, times).slice_dim(2, 0..tokens);
        let mut store = LayerStore::by_position();
        let all = Projection {
            keys: repeat(keys),
            values: repeat(values),
        };
        store.append(&all, &Positions::contiguous(&[0], &[tokens]));
        store.read()
    }
}

/// The median of several times that `work` takes, after one that does not count.
fn median(mut work: impl FnMut() -> Result<(), CacheError>) -> Result<f64, CacheError> {
    work()?;
    let (mut times, mut all) = (Vec::new(), 0.0);
    while times.len() < TIMES.0 || all < SECONDS && times.len() < TIMES.1 {
        let start = Instant::now();
        work()?;
        times.push(start.elapsed().as_secs_f64());
        all += times[times.len() - 1];
    }
    Ok(middle(times))
}

fn middle(mut times: Vec<f64>) -> f64 {
    times.sort_unstable_by(f64::total_cmp);
    times[times.len() / 2].max(f64::MIN_POSITIVE)
}
