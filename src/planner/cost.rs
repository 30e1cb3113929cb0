//! What a plan costs: bytes, operations, and with a measured throughput seconds.

use std::fmt;

use super::{Throughput, throughput::attention_flops};
use crate::{
    cache::{CacheError, ModelShape},
    exact::ATTENTION_BLOCK,
    residual::{
        Flow, Plan,
        need::{Need, StepSize, rebuilt},
    },
};

/// The longest context whose cost is computed: products of sizes then fit 64 bits.
pub(super) const MOST_TOKENS: usize = 1 << 24;

/// What a plan costs at a context length: the bytes held, and a step of one token.
///
/// ```
/// # #[cfg(feature = "model")]
/// # fn main() -> Result<(), kv_direct::cache::CacheError> {
/// use burn::tensor::DType;
/// use kv_direct::{model::DecoderConfig, residual::Plan};
///
/// let shape = DecoderConfig::new(49_152, 576, 30, 9, 3).shape(DType::F32);
/// let all = Plan::retain_top(&shape, 30)?.cost(&shape, 2000)?;
/// let none = Plan::tokens(&shape).cost(&shape, 2000)?;
/// assert_eq!(all.per_token, 46_080);
/// assert_eq!((none.per_token, none.fixed), (4, 960));
/// assert!(none.flops > 100 * all.flops);
/// println!("{none}");
/// # Ok(())
/// # }
/// # #[cfg(not(feature = "model"))]
/// # fn main() {}
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Cost {
    /// Tokens of context.
    pub context: usize,
    /// Bytes of a token that is no longer hot and has left all sliding windows.
    pub per_token: usize,
    /// Bytes between steps on top of that: hot entries and sliding windows, slack of buffers, and the position of
    /// each slot.
    pub fixed: usize,
    /// The most bytes that a step of one token holds on top of what is held between steps, even if it rebuilds sliding
    /// windows after a deep truncation or parking.
    pub scratch: usize,
    /// Floating-point operations of a step of one token; a multiplication and an addition are two. The head is left out
    /// if the model's shape does not say its vocabulary.
    pub flops: u64,
    /// Bytes that such a step moves: weights, keys and values, and residuals of the replay.
    pub moved: u64,
    work: Work,
}

/// Operations of a replay in chunks of `chunk` tokens, one field for each measured rate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Work {
    chunk: usize,
    projection: u64,
    block: u64,
    attention: u64,
}

impl Cost {
    /// Bytes between steps.
    #[must_use]
    pub const fn between(&self) -> usize {
        self.context * self.per_token + self.fixed
    }

    /// The most bytes held within a step: what a byte budget must allow.
    #[must_use]
    pub const fn peak(&self) -> usize {
        self.between() + self.scratch
    }

    /// Seconds of a step of one token on a device with this throughput. For a chunk that was not measured, the nearest
    /// measured one counts. Infinite if none was measured and something is replayed.
    #[must_use]
    pub fn seconds(&self, throughput: &Throughput) -> f64 {
        let Work {
            chunk,
            projection,
            block,
            attention,
        } = self.work;
        let chunks = throughput.chunks.iter();
        let nearest = chunks.min_by_key(|measured| measured.tokens.abs_diff(chunk));
        let unknown = match projection + block {
            0 => 0.0,
            _ => f64::INFINITY,
        };
        let replay = nearest.map_or(unknown, |rate| {
            projection as f64 / rate.projection
                + block as f64 / rate.block
                + attention as f64 / rate.attention
        });
        self.moved as f64 / throughput.read + replay
    }
}

impl Plan {
    /// What this plan costs for one sequence of `context` tokens, to which the step adds one, without a byte budget.
    ///
    /// # Errors
    /// [`PlanLayers`](CacheError::PlanLayers) for a plan of another model, [`Context`](CacheError::Context) for more
    /// than 2²⁴ tokens, [`UnknownSize`](CacheError::UnknownSize) if the shape does not say
    /// [`intermediate`](ModelShape::intermediate).
    pub fn cost(&self, shape: &ModelShape, context: usize) -> Result<Cost, CacheError> {
        self.check_cost(shape, context)?;
        Ok(self.cost_of(shape, &StepSize::decode(self, 1, context)))
    }

    /// As [`cost`](Self::cost), in a cache with a byte budget, which keeps more than the plan says
    /// [as long as there is room](crate::residual::ResidualConfig::with_byte_budget).
    ///
    /// # Errors
    /// As [`cost`](Self::cost).
    pub fn cost_within(
        &self,
        shape: &ModelShape,
        context: usize,
        byte_budget: usize,
    ) -> Result<Cost, CacheError> {
        self.check_cost(shape, context)?;
        let layers = rebuilt(shape, self).count();
        let size = |complete| StepSize {
            complete_before: complete,
            complete_after: complete,
            missing: complete < layers && context > self.hot(),
            ..StepSize::decode(self, 1, context)
        };
        let fits = |complete: &usize| Need::of(shape, self, &size(*complete)).peak() <= byte_budget;
        let complete = (0..=layers).rev().find(fits).unwrap_or(0);
        Ok(self.cost_of(shape, &size(complete)))
    }

    fn check_cost(&self, shape: &ModelShape, context: usize) -> Result<(), CacheError> {
        self.check_layers(shape)?;
        shape.known_intermediate()?;
        if context > MOST_TOKENS {
            return Err(CacheError::Context {
                found: context,
                longest: MOST_TOKENS,
            });
        }
        Ok(())
    }

    pub(super) fn cost_of(&self, shape: &ModelShape, size: &StepSize) -> Cost {
        let (before, sequences) = (size.longest().0, size.tokens.len());
        let Need { between, scratch } = Need::of(shape, self, size);
        let tops: Vec<usize> = rebuilt(shape, self)
            .rev()
            .take(size.complete_after)
            .collect();
        let lacks =
            |layer: usize| self.rebuilds(layer) && before > self.hot() && !tops.contains(&layer);
        let (element, entry) = (
            shape.dtype.size(),
            2 * shape.kv_width() * shape.cache_dtype.size(),
        );
        let per_token = self.bytes_per_old_token(shape) + tops.len() * entry;
        let old = before.saturating_sub(self.hot());
        // Rows of the chunk that begins at a token.
        let rows = |from: usize| match shape.own_kernels {
            true => self.chunk().min(old - from),
            false => self.chunk(),
        };
        let mut work = Work {
            chunk: self.chunk(),
            ..Work::default()
        };
        let weights =
            shape.layers() * shape.block_weights() + shape.hidden * shape.vocab.unwrap_or(0);
        let mut read_by: Vec<(Option<usize>, usize)> = Vec::new();
        let (mut moved, mut own) = (weights * element, 2 * sequences * weights);
        for (layer, Flow { enters, leaves }) in self.flow(lacks).into_iter().enumerate() {
            let window = shape.windows[layer].map(|window| window.get());
            let read = window.map_or(before + 1, |window| window.min(before + 1));
            own += sequences * attention_flops(shape, read);
            moved += sequences * read * entry;
            if lacks(layer) {
                // Written where attention reads it.
                moved += sequences * read * entry;
            }
            if !enters {
                continue;
            }
            moved += 2 * sequences * old * shape.hidden * element;
            let carried = sequences * (0..old).step_by(self.chunk()).map(rows).sum::<usize>();
            if lacks(layer) || window.is_some() {
                work.projection += (2 * carried * shape.projection_weights()) as u64;
            }
            if leaves {
                let rest = shape.block_weights() - shape.projection_weights();
                work.block += (2 * carried * rest) as u64;
                let known = read_by.iter().find(|(of, _)| *of == window);
                let slots = known.map_or_else(
                    || attended(old, self.chunk(), window, rows),
                    |known| known.1,
                );
                read_by.push((window, slots));
                let flops = sequences.saturating_mul(attention_flops(shape, slots));
                work.attention = work.attention.saturating_add(flops as u64);
            }
        }
        Cost {
            context: before,
            per_token,
            fixed: between.saturating_sub(before * per_token),
            scratch,
            flops: work
                .attention
                .saturating_add(own as u64 + work.projection + work.block),
            moved: moved as u64,
            work,
        }
    }
}

/// Slots that the queries of a replay of `old` tokens read together: each chunk up to the tile of its last token, in a
/// sliding-window layer from the block where the window begins.
fn attended(
    old: usize,
    chunk: usize,
    window: Option<usize>,
    rows: impl Fn(usize) -> usize,
) -> usize {
    let chunks = (0..old).step_by(chunk).map(|from| {
        let end = (from + chunk).min(old).next_multiple_of(64);
        let start = window.map_or(0, |window| {
            (from + 1).saturating_sub(window) / ATTENTION_BLOCK * ATTENTION_BLOCK
        });
        rows(from) * (end - start)
    });
    chunks.sum()
}

impl fmt::Display for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
        write!(
            f,
            "at {} tokens: {} bytes an old token, {:.2} MiB between steps ({:.2} of them fixed), {:.2} MiB more \
             within a step; {:.2} GFLOP and {:.1} MB moved a step",
            self.context,
            self.per_token,
            mib(self.between()),
            mib(self.fixed),
            mib(self.scratch),
            self.flops as f64 / 1e9,
            self.moved as f64 / 1e6,
        )
    }
}
