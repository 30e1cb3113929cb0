//! What a plan costs: bytes, operations, and with measured speeds seconds.

use std::fmt;

use super::{
    Plan, Speeds,
    need::{Need, Standing, rebuilt},
    plan::Flow,
    speeds::attention_flops,
};
use crate::{cache::ModelShape, exact::PIECE};

/// Tokens of a context that is priced, at most: products of sizes then fit 64 bits.
pub(super) const MOST_TOKENS: usize = 1 << 24;

/// What a plan costs at a length: bytes held, and a step of one token.
///
/// ```
/// use burn::tensor::DType;
/// use kv_direct::{cache::Plan, model::DecoderConfig};
///
/// let shape = DecoderConfig::new(49_152, 576, 30, 9, 3).shape(DType::F32);
/// let all = Plan::keep_top(&shape, 30)?.price(&shape, 2000);
/// let none = Plan::tokens(&shape).price(&shape, 2000);
/// assert_eq!(all.per_token, 46_080);
/// assert_eq!((none.per_token, none.fixed), (4, 192));
/// assert!(none.flops > 100 * all.flops);
/// println!("{none}");
/// # Ok::<(), kv_direct::cache::CacheError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Price {
    /// Tokens of context.
    pub context: usize,
    /// Bytes of a token that is no longer hot and has left all windows.
    pub per_token: usize,
    /// Bytes between steps on top of that: hot rows and windows, slack of buffers, and which slot holds which
    /// position.
    pub fixed: usize,
    /// The most bytes that a step of one token holds on top of what is held between steps, also where it rebuilds
    /// windows that a deep truncation or parking let go of.
    pub scratch: usize,
    /// Floating point operations of a step of one token; a multiplication and an addition are two.
    pub flops: u64,
    /// Bytes that such a step moves: weights, keys and values, and residuals of the replay.
    pub moved: u64,
    work: Work,
}

/// Operations of a step by the rate they run at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Work {
    chunk: usize,
    projection: u64,
    block: u64,
    attention: u64,
}

impl Price {
    /// Bytes between steps.
    #[must_use]
    pub const fn between(&self) -> usize {
        self.context * self.per_token + self.fixed
    }

    /// The most bytes held within a step: what a budget must allow.
    #[must_use]
    pub const fn peak(&self) -> usize {
        self.between() + self.scratch
    }

    /// Seconds of a step of one token on a device with these speeds: for a replay in calls of another number of
    /// rows than were measured, those of the nearest; infinite where none was.
    #[must_use]
    pub fn seconds(&self, speeds: &Speeds) -> f64 {
        let Work {
            chunk,
            projection,
            block,
            attention,
        } = self.work;
        let nearest = speeds
            .chunks
            .iter()
            .min_by_key(|speed| speed.rows.abs_diff(chunk));
        let unknown = if projection + block == 0 {
            0.0
        } else {
            f64::INFINITY
        };
        let replay = nearest.map_or(unknown, |speed| {
            projection as f64 / speed.projection
                + block as f64 / speed.block
                + attention as f64 / speed.attention
        });
        self.moved as f64 / speeds.read + replay
    }
}

impl Plan {
    /// What this plan costs once `context` tokens are held by one batch row, without a budget.
    ///
    /// # Panics
    /// If it is a plan for a model of other layers, or `context` is more than 2²⁴.
    #[must_use]
    pub fn price(&self, shape: &ModelShape, context: usize) -> Price {
        assert!(context <= MOST_TOKENS, "a context of {context} tokens");
        self.price_of(shape, Standing::steady(self, 1, context))
    }

    /// As [`price`](Self::price) in a cache with a budget, which holds more than the plan says
    /// [as long as it has the room](super::ResidualConfig::with_budget).
    ///
    /// # Panics
    /// As [`price`](Self::price).
    #[must_use]
    pub fn price_within(&self, shape: &ModelShape, context: usize, budget: usize) -> Price {
        assert!(context <= MOST_TOKENS, "a context of {context} tokens");
        let layers = rebuilt(shape, self).count();
        let standing = |whole| Standing {
            held: whole,
            whole,
            missing: whole < layers && context > self.hot(),
            ..Standing::steady(self, 1, context)
        };
        let fits = |whole: &usize| Need::of(shape, self, standing(*whole)).peak() <= budget;
        self.price_of(shape, standing((0..=layers).rev().find(fits).unwrap_or(0)))
    }

    pub(super) fn price_of(&self, shape: &ModelShape, standing: Standing) -> Price {
        let Standing { before, rows, .. } = standing;
        let Need { between, scratch } = Need::of(shape, self, standing);
        let tops: Vec<usize> = rebuilt(shape, self).rev().take(standing.whole).collect();
        let lacks =
            |layer: usize| self.rebuilds(layer) && before > self.hot() && !tops.contains(&layer);
        let (element, width) = (shape.dtype.size(), 2 * shape.kv_width());
        let per_token = self.bytes_per_old_token(shape) + tops.len() * width * element;
        let old = before.saturating_sub(self.hot());
        let mut work = Work {
            chunk: self.chunk(),
            ..Work::default()
        };
        let weights = shape.layers() * shape.block_weights() + shape.hidden * shape.vocab;
        let mut read_by: Vec<(Option<usize>, usize)> = Vec::new();
        let (mut moved, mut own) = (weights * element, 2 * rows * weights);
        for (layer, Flow { enters, leaves }) in self.flow(lacks).into_iter().enumerate() {
            let window = shape.windows[layer].map(|window| window.get());
            let read = window.map_or(before + 1, |window| window.min(before + 1));
            own += rows * attention_flops(shape, read);
            moved += rows * read * width * element;
            if lacks(layer) {
                // Written to where attention reads it.
                moved += rows * read * width * element;
            }
            if !enters {
                continue;
            }
            moved += 2 * rows * old * shape.hidden * element;
            let carried = rows * old.next_multiple_of(self.chunk());
            if lacks(layer) || window.is_some() {
                work.projection += (2 * carried * shape.projection_weights()) as u64;
            }
            if leaves {
                let rest = shape.block_weights() - shape.projection_weights();
                work.block += (2 * carried * rest) as u64;
                let known = read_by.iter().find(|(of, _)| *of == window);
                let slots =
                    known.map_or_else(|| attended(old, self.chunk(), window), |known| known.1);
                read_by.push((window, slots));
                let flops = rows.saturating_mul(attention_flops(shape, slots));
                work.attention = work.attention.saturating_add(flops as u64);
            }
        }
        Price {
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

/// Slots that the queries of a replay of `old` rows read, all together: each call up to the tile of its last
/// row, and in a layer with a window from the piece where that begins.
fn attended(old: usize, chunk: usize, window: Option<usize>) -> usize {
    let calls = (0..old).step_by(chunk).map(|from| {
        let end = (from + chunk).min(old).next_multiple_of(64);
        let start = window.map_or(0, |window| {
            (from + 1).saturating_sub(window) / PIECE * PIECE
        });
        chunk * (end - start)
    });
    calls.sum()
}

impl Standing {
    /// A step of one token after `context` tokens in each of `rows` batch rows.
    pub(super) fn steady(plan: &Plan, rows: usize, context: usize) -> Self {
        Self {
            rows,
            before: context,
            after: context + 1,
            recent: 1,
            held: 0,
            whole: 0,
            missing: context > plan.hot(),
            windows: true,
            certified: false,
            differing: 0,
        }
    }
}

impl fmt::Display for Price {
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
