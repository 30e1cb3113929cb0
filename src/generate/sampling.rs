//! Which id comes next: settings that cannot be bad, and the arithmetic over a slice of logits.

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
    /// The setting has a value that means nothing.
    #[error("{field} is {value}; accepted is {accepted}")]
    OutOfRange {
        /// The setting.
        field: &'static str,
        /// What was given.
        value: f64,
        /// What would have worked.
        accepted: &'static str,
    },
}

/// How ids are drawn. Starts as greedy decoding; every setting is checked when it is made.
///
/// The settings act in the order of transformers: repetition penalty, temperature, top-k, top-p,
/// min-p. Those that were not set do nothing.
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
    seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self::new()
    }
}

impl Sampling {
    /// Temperature 0, nothing cut off, no penalty, seed 0.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            temperature: 0.0,
            top_k: usize::MAX,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            seed: 0,
        }
    }

    /// Divides the logits by `temperature`; at 0 the largest is taken, whatever the seed.
    ///
    /// # Errors
    /// [`SamplingError`] unless it is 0 or more and finite.
    pub fn with_temperature(mut self, temperature: f64) -> Result<Self, SamplingError> {
        let good = temperature >= 0.0 && temperature.is_finite();
        self.temperature = accept("temperature", temperature, good, "0 or more, and finite")?;
        Ok(self)
    }

    /// Leaves only the `top_k` largest logits; of equal ones the lowest ids.
    ///
    /// transformers leaves all that equal the last of them, so it may leave more.
    ///
    /// # Errors
    /// [`SamplingError`] if it is 0.
    pub fn with_top_k(mut self, top_k: usize) -> Result<Self, SamplingError> {
        accept("top_k", top_k as f64, top_k > 0, "1 or more")?;
        self.top_k = top_k;
        Ok(self)
    }

    /// Leaves the most probable ids that reach the probability `top_p` together: as few as do, one
    /// at least, of equal ones the lowest ids.
    ///
    /// # Errors
    /// [`SamplingError`] unless it is above 0 and at most 1.
    pub fn with_top_p(mut self, top_p: f64) -> Result<Self, SamplingError> {
        let good = top_p > 0.0 && top_p <= 1.0;
        self.top_p = accept("top_p", top_p, good, "above 0, at most 1")?;
        Ok(self)
    }

    /// Leaves the ids whose probability is at least `min_p` times that of the most probable one.
    ///
    /// # Errors
    /// [`SamplingError`] unless it is from 0 to 1.
    pub fn with_min_p(mut self, min_p: f64) -> Result<Self, SamplingError> {
        let good = (0.0..=1.0).contains(&min_p);
        self.min_p = accept("min_p", min_p, good, "from 0 to 1")?;
        Ok(self)
    }

    /// Makes ids that were seen before less likely (or, below 1, more): their logit is divided by
    /// `penalty`, a negative one multiplied.
    ///
    /// # Errors
    /// [`SamplingError`] unless it is above 0 and finite.
    pub fn with_repetition_penalty(mut self, penalty: f64) -> Result<Self, SamplingError> {
        let good = penalty > 0.0 && penalty.is_finite();
        self.repetition_penalty =
            accept("repetition_penalty", penalty, good, "above 0, and finite")?;
        Ok(self)
    }

    /// Same seed, same logits, same ids, on every platform.
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

/// Draws ids by a [`Sampling`]: a random generator, and the ids seen so far.
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

    /// The same ids seen, drawn from now on by `sampling`, from its seed.
    #[must_use]
    pub fn with_sampling(mut self, sampling: Sampling) -> Self {
        self.random = ChaCha12Rng::seed_from_u64(sampling.seed);
        self.sampling = sampling;
        self
    }

    /// Takes note of ids for the repetition penalty. Those outside the vocabulary do nothing.
    pub fn see(&mut self, ids: &[u32]) {
        self.seen.extend(ids);
    }

    /// The next id, which counts as seen from then on; `None` if a logit is not finite or there is
    /// none.
    ///
    /// # Cost
    /// A pass over the logits at temperature 0. Otherwise a copy in f64, and a sort of it for top-p,
    /// of `top_k` numbers where that is set too.
    pub fn choose(&mut self, logits: &[f32]) -> Option<u32> {
        let largest = argmax(logits)?;
        let Sampling { temperature, .. } = self.sampling;
        let id = if temperature == 0.0 && self.sampling.repetition_penalty == 1.0 {
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

    /// Every id with its logit after the repetition penalty.
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
        scores
    }

    fn draw(&mut self, mut scores: Vec<(u32, f64)>) -> Option<u32> {
        let sampling = &self.sampling;
        if sampling.top_k < scores.len() {
            scores.select_nth_unstable_by(sampling.top_k - 1, better);
            scores.truncate(sampling.top_k);
        }
        let sorted = sampling.top_p < 1.0;
        // The order decides which id a random number means, so it has to be a fixed one.
        if sorted {
            scores.sort_unstable_by(better);
        } else {
            scores.sort_unstable_by_key(|&(id, _)| id);
        }
        let max = scores.iter().map(|s| s.1).fold(f64::MIN, f64::max);
        // From here on weights: probabilities up to a factor, 1 for the most probable.
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
        // 53 random bits: every number in steps of 2^-53 from 0 to below 1.
        let unit = (self.random.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        let mut left = unit * sum(&scores);
        let drawn = scores.iter().find(|(_, weight)| {
            left -= weight;
            left < 0.0
        });
        // Rounding can leave a little over: that belongs to the last.
        drawn.or(scores.last()).map(|&(id, _)| id)
    }
}

/// The larger score first, of equal ones the lower id.
fn better(a: &(u32, f64), b: &(u32, f64)) -> Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

fn sum(scores: &[(u32, f64)]) -> f64 {
    scores.iter().map(|s| s.1).sum()
}
