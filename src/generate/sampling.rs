//! How the next id is chosen: checked settings, and the arithmetic over a slice of logits.

use std::{cmp::Ordering, collections::BTreeSet};

use rand_chacha::{
    ChaCha12Rng,
    rand_core::{RngCore, SeedableRng},
};

use super::argmax;

/// A sampling setting outside its range.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SamplingError {
    /// The value is outside the range of the setting.
    #[error("{field} is {value}; accepted is {accepted}")]
    OutOfRange {
        /// The setting.
        field: &'static str,
        /// Its value.
        value: f64,
        /// The range.
        accepted: &'static str,
    },
}

/// How ids are drawn. The default is greedy decoding. Every setting is checked when it is made.
///
/// The settings are applied in the order of transformers: repetition penalty, temperature, top-k, top-p, min-p. Those
/// that were not made have no effect.
///
/// ```
/// use kv_direct::generate::Sampling;
///
/// let sampling = Sampling::new().with_temperature(0.7)?.with_top_p(0.9)?.with_seed(7);
/// assert!(sampling.with_top_p(1.5).is_err());
/// # Ok::<(), kv_direct::generate::SamplingError>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Sampling {
    temperature: f64,
    top_k: usize,
    top_p: f64,
    min_p: f64,
    repetition_penalty: f64,
    banned: BTreeSet<u32>,
    seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self::new()
    }
}

impl Sampling {
    /// Greedy decoding: temperature 0, no limit on the ids, no penalty, seed 0.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            temperature: 0.0,
            top_k: usize::MAX,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            banned: BTreeSet::new(),
            seed: 0,
        }
    }

    /// Divides the logits by `temperature`. At 0 the largest is chosen, whatever the seed.
    ///
    /// # Errors
    /// [`SamplingError`] unless it is 0 or more and finite.
    pub fn with_temperature(mut self, temperature: f64) -> Result<Self, SamplingError> {
        let good = temperature >= 0.0 && temperature.is_finite();
        self.temperature = accept("temperature", temperature, good, "0 or more, and finite")?;
        Ok(self)
    }

    /// Limits the choice to the `top_k` largest logits; of equal ones, to the lowest ids.
    ///
    /// transformers keeps all logits that equal the smallest of them, so it may keep more.
    ///
    /// # Errors
    /// [`SamplingError`] if it is 0.
    pub fn with_top_k(mut self, top_k: usize) -> Result<Self, SamplingError> {
        accept("top_k", top_k as f64, top_k > 0, "1 or more")?;
        self.top_k = top_k;
        Ok(self)
    }

    /// Limits the choice to the most probable ids whose probabilities add up to `top_p`: as few as possible, at least
    /// one; of equal ones, to the lowest ids.
    ///
    /// # Errors
    /// [`SamplingError`] unless it is above 0 and at most 1.
    pub fn with_top_p(mut self, top_p: f64) -> Result<Self, SamplingError> {
        let good = top_p > 0.0 && top_p <= 1.0;
        self.top_p = accept("top_p", top_p, good, "above 0, at most 1")?;
        Ok(self)
    }

    /// Limits the choice to ids whose probability is at least `min_p` times that of the most probable one.
    ///
    /// # Errors
    /// [`SamplingError`] unless it is from 0 to 1.
    pub fn with_min_p(mut self, min_p: f64) -> Result<Self, SamplingError> {
        let good = (0.0..=1.0).contains(&min_p);
        self.min_p = accept("min_p", min_p, good, "from 0 to 1")?;
        Ok(self)
    }

    /// Makes ids that were seen before less likely, or more likely with a penalty below 1. A positive logit is
    /// divided by `penalty`, a negative one multiplied by it.
    ///
    /// # Errors
    /// [`SamplingError`] unless it is above 0 and finite.
    pub fn with_repetition_penalty(mut self, penalty: f64) -> Result<Self, SamplingError> {
        let good = penalty > 0.0 && penalty.is_finite();
        self.repetition_penalty =
            accept("repetition_penalty", penalty, good, "above 0, and finite")?;
        Ok(self)
    }

    /// Bans ids: they are never chosen. Further bans add to these, and ids outside the vocabulary have no effect.
    ///
    /// ```
    /// use kv_direct::generate::{Sampler, Sampling};
    ///
    /// let mut sampler = Sampler::new(Sampling::new().with_banned([1]));
    /// assert_eq!(sampler.choose(&[1.0, 1.5, -1.0]), Some(0));
    /// ```
    #[must_use]
    pub fn with_banned(mut self, ids: impl IntoIterator<Item = u32>) -> Self {
        self.banned.extend(ids);
        self
    }

    /// Sets the seed. With the same seed and the same logits, the ids are the same on every platform.
    #[must_use]
    pub const fn with_seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }
}

fn accept(
    field: &'static str,
    value: f64,
    good: bool,
    accepted: &'static str,
) -> Result<f64, SamplingError> {
    good.then_some(value).ok_or(SamplingError::OutOfRange {
        field,
        value,
        accepted,
    })
}

/// Draws ids by a [`Sampling`]. Holds a random generator and the ids seen so far.
///
/// ```
/// use kv_direct::generate::{Sampler, Sampling};
///
/// let penalty = Sampling::new().with_repetition_penalty(2.0)?;
/// let mut sampler = Sampler::new(penalty);
/// assert_eq!(sampler.choose(&[1.0, 1.5, -1.0]), Some(1));
/// // The second logit now counts as 0.75.
/// assert_eq!(sampler.choose(&[1.0, 1.5, -1.0]), Some(0));
/// # Ok::<(), kv_direct::generate::SamplingError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Sampler {
    sampling: Sampling,
    random: ChaCha12Rng,
    seen: BTreeSet<u32>,
}

impl Sampler {
    /// A sampler that has seen nothing.
    #[must_use]
    pub fn new(sampling: Sampling) -> Self {
        let random = ChaCha12Rng::seed_from_u64(sampling.seed);
        Self {
            sampling,
            random,
            seen: BTreeSet::new(),
        }
    }

    /// Draws by `sampling` from now on, starting from its seed. The ids seen so far stay.
    #[must_use]
    pub fn with_sampling(mut self, sampling: Sampling) -> Self {
        self.random = ChaCha12Rng::seed_from_u64(sampling.seed);
        self.sampling = sampling;
        self
    }

    /// Marks ids as seen, for the repetition penalty. Ids outside the vocabulary have no effect.
    pub fn see(&mut self, ids: &[u32]) {
        self.seen.extend(ids);
    }

    /// Chooses the next id and marks it as seen. A logit of negative infinity is a ban. `None` if a logit is NaN or
    /// infinity, or if there is none to choose from.
    ///
    /// # Cost
    /// Without a penalty and bans, one pass over the logits at temperature 0. Else a copy in f64; at temperature above 0
    /// also a sort, of `top_k` numbers if that is set.
    pub fn choose(&mut self, logits: &[f32]) -> Option<u32> {
        let largest = argmax(logits)?;
        let temperature = self.sampling.temperature;
        let plain = self.sampling.repetition_penalty == 1.0 && self.sampling.banned.is_empty();
        let id = if temperature == 0.0 && plain {
            largest
        } else {
            let scores = self.penalised(logits);
            if temperature == 0.0 {
                let first = scores.into_iter().min_by(better)?;
                first.0
            } else {
                self.draw(scores)?
            }
        };
        self.seen.insert(id);
        Some(id)
    }

    /// Every id that is not banned, with its logit after the repetition penalty.
    fn penalised(&self, logits: &[f32]) -> Vec<(u32, f64)> {
        let mut scores: Vec<(u32, f64)> = (0..).zip(logits.iter().map(|&l| l.into())).collect();
        let penalty = self.sampling.repetition_penalty;
        for &id in &self.seen {
            if let Some((_, score)) = scores.get_mut(id as usize) {
                let changed = if *score < 0.0 {
                    *score * penalty
                } else {
                    *score / penalty
                };
                *score = changed.clamp(f64::MIN, f64::MAX);
            }
        }
        let banned = |id: u32| {
            logits[id as usize] == f32::NEG_INFINITY || self.sampling.banned.contains(&id)
        };
        scores.retain(|&(id, _)| !banned(id));
        scores
    }

    fn draw(&mut self, mut scores: Vec<(u32, f64)>) -> Option<u32> {
        let sampling = &self.sampling;
        if sampling.top_k < scores.len() {
            scores.select_nth_unstable_by(sampling.top_k - 1, better);
            scores.truncate(sampling.top_k);
        }
        let sorted = sampling.top_p < 1.0;
        // The order decides which id a random number selects, so it must be fixed.
        if sorted {
            scores.sort_unstable_by(better);
        } else {
            scores.sort_unstable_by_key(|&(id, _)| id);
        }
        let max = scores.iter().map(|s| s.1).fold(f64::MIN, f64::max);
        // From here on the scores are weights: probabilities up to a factor, 1 for the most probable id.
        for (_, score) in &mut scores {
            *score = libm::exp((*score - max) / sampling.temperature);
        }
        if sorted {
            let aim = sampling.top_p * sum(&scores);
            let mut reached = 0.0;
            let short = scores.iter().take_while(|(_, weight)| {
                let short = reached < aim;
                reached += weight;
                short
            });
            let count = short.count();
            scores.truncate(count.max(1));
        }
        scores.retain(|&(_, weight)| weight >= sampling.min_p && weight > 0.0);
        // 53 random bits: a multiple of 2^-53, from 0 to below 1.
        let unit = (self.random.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        let mut left = unit * sum(&scores);
        let drawn = scores.iter().find(|(_, weight)| {
            left -= weight;
            left < 0.0
        });
        // Rounding can leave a remainder, which belongs to the last id.
        drawn.or(scores.last()).map(|&(id, _)| id)
    }
}

/// Orders the larger score first; of equal ones, the lower id.
fn better(a: &(u32, f64), b: &(u32, f64)) -> Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

fn sum(scores: &[(u32, f64)]) -> f64 {
    scores.iter().map(|s| s.1).sum()
}
