//! Rotary positions: frequencies with their scaling, one table, half-split rotation.
//!
//! RoPE: Su et al., arXiv 2104.09864. YaRN: Peng et al., arXiv 2309.00071, section 3.4. The llama3 scheme is that of
//! Meta's reference code. With weights in Hugging Face's layout, a pair consists of one element of each half of a
//! head, not of two neighbours.

use std::sync::OnceLock;

use burn::tensor::{DType, Device, Tensor, TensorData};

use crate::{exact::rotate, positions::Positions};

/// Base and scaling of a layer's rotation.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct RopeConfig {
    /// The base. One position rotates pair `i` by `theta^(-2i / head_dim)` radians.
    pub theta: f64,
    /// How the frequencies are scaled for long contexts.
    pub scaling: RopeScaling,
}

/// How rotary frequencies are scaled for long contexts.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// Positions are divided by `factor`.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Llama 3: long wavelengths are divided by `factor`, short ones stay, with a smooth transition between.
    Llama3 {
        /// The divisor.
        factor: f64,
        /// Wavelengths beyond `original / low` are divided.
        low: f64,
        /// Wavelengths below `original / high` stay.
        high: f64,
        /// Positions of the original training.
        original: f64,
    },
    /// YaRN: fast pairs stay, slow ones are divided by `factor`, with a ramp between. Cosine and sine have a factor.
    Yarn {
        /// The divisor.
        factor: f64,
        /// A pair with more rotations than this over the original positions stays.
        fast: f64,
        /// A pair with fewer rotations than this is divided.
        slow: f64,
        /// Positions of the original training.
        original: f64,
        /// Factor on cosine and sine: [`yarn_attention_factor`] unless the model states another.
        attention: f64,
    },
}

/// YaRN's factor on cosine and sine where the model states none: `0.1 · ln(factor) + 1`.
///
/// ```
/// assert!((kv_direct::model::yarn_attention_factor(4.0) - 1.1386294).abs() < 1e-7);
/// ```
#[must_use]
pub fn yarn_attention_factor(factor: f64) -> f64 {
    if factor <= 1.0 {
        1.0
    } else {
        0.1 * libm::log(factor) + 1.0
    }
}

impl RopeConfig {
    /// A base without scaling.
    #[must_use]
    pub const fn new(theta: f64) -> Self {
        Self {
            theta,
            scaling: RopeScaling::None,
        }
    }

    /// Sets the scaling.
    #[must_use]
    pub const fn with_scaling(mut self, scaling: RopeScaling) -> Self {
        self.scaling = scaling;
        self
    }

    /// Radians by which one position rotates each of the `head_dim / 2` pairs.
    ///
    /// ```
    /// use kv_direct::model::{RopeConfig, RopeScaling};
    ///
    /// // Llama-3.2-1B: pairs 0 to 14 unchanged, 18 to 31 divided by 32.
    /// let scaling = RopeScaling::Llama3 { factor: 32.0, low: 1.0, high: 4.0, original: 8192.0 };
    /// let frequencies = RopeConfig::new(5e5).with_scaling(scaling).frequencies(64);
    /// assert!((frequencies[15] / 1.29054793e-3 - 1.0).abs() < 1e-8);
    /// assert!((frequencies[18] / 1.94616382e-5 - 1.0).abs() < 1e-8);
    /// ```
    #[must_use]
    pub fn frequencies(&self, head_dim: usize) -> Vec<f64> {
        let width = head_dim as f64;
        (0..head_dim / 2)
            .map(|pair| {
                let plain = libm::pow(self.theta, -2.0 * pair as f64 / width);
                match self.scaling {
                    RopeScaling::None => plain,
                    RopeScaling::Linear { factor } => plain / factor,
                    RopeScaling::Llama3 {
                        factor,
                        low,
                        high,
                        original,
                    } => {
                        let rotations = original * plain / std::f64::consts::TAU;
                        let unscaled = ((rotations - low) / (high - low)).clamp(0.0, 1.0);
                        plain * unscaled + plain / factor * (1.0 - unscaled)
                    }
                    RopeScaling::Yarn {
                        factor,
                        fast,
                        slow,
                        original,
                        ..
                    } => {
                        let pair_of = |rotations: f64| {
                            width * libm::log(original / (rotations * std::f64::consts::TAU))
                                / (2.0 * libm::log(self.theta))
                        };
                        let low = pair_of(fast).floor().max(0.0);
                        let high = pair_of(slow).ceil().min(width - 1.0);
                        let ramp = ((pair as f64 - low) / (high - low).max(1e-3)).clamp(0.0, 1.0);
                        plain / factor * ramp + plain * (1.0 - ramp)
                    }
                }
            })
            .collect()
    }

    /// Factor on cosine and sine.
    fn amplitude(&self) -> f64 {
        if let RopeScaling::Yarn { attention, .. } = self.scaling {
            attention
        } else {
            1.0
        }
    }

    /// The numbers that must be positive, by field.
    pub(super) fn factors(&self) -> Vec<(&'static str, Option<f64>)> {
        let mut factors = vec![("rope.theta", Some(self.theta))];
        match self.scaling {
            RopeScaling::None => {}
            RopeScaling::Linear { factor } => factors.push(("rope.factor", Some(factor))),
            RopeScaling::Llama3 {
                factor,
                low,
                high,
                original,
            } => factors.extend([
                ("rope.factor", Some(factor)),
                ("rope.low", Some(low)),
                ("rope.high - rope.low", Some(high - low)),
                ("rope.original", Some(original)),
            ]),
            RopeScaling::Yarn {
                factor,
                fast,
                slow,
                original,
                attention,
            } => factors.extend([
                ("rope.factor", Some(factor)),
                ("rope.fast", Some(fast)),
                ("rope.slow", Some(slow)),
                ("rope.original", Some(original)),
                ("rope.attention", Some(attention)),
            ]),
        }
        factors
    }
}

/// Cosines and sines by absolute position. They are computed on the host on first use, by the functions of the crate
/// `libm`: those of a position have the same bits at every use and on every system. Beyond the context, where only
/// re-indexed entries are, they are computed at each use. There angles are not rounded to f32: at position 1,000,000
/// that would be an error of 0.03 radians.
pub(super) struct RopeTable {
    frequencies: Vec<f64>,
    amplitude: f64,
    /// Blocks of [`BLOCK`] positions: for each position `head_dim / 2` cosines, then sines.
    blocks: Vec<OnceLock<Box<[f32]>>>,
}

const BLOCK: usize = 512;

impl RopeTable {
    pub(super) fn new(config: &RopeConfig, head_dim: usize, positions: usize) -> Self {
        Self {
            frequencies: config.frequencies(head_dim),
            amplitude: config.amplitude(),
            blocks: (0..positions.div_ceil(BLOCK))
                .map(|_| OnceLock::new())
                .collect(),
        }
    }

    /// The angles of `positions`. Pads have those of position 0.
    pub(super) fn angles(&self, positions: &Positions, device: &Device, dtype: DType) -> Angles {
        let half = self.frequencies.len();
        let (sequences, heads) = (positions.sequences(), positions.heads());
        let mut cos = Vec::with_capacity(heads * positions.tokens() * half);
        let mut sin = Vec::with_capacity(cos.capacity());
        for list in 0..heads * sequences {
            for &position in positions.slots(list % sequences, list / sequences) {
                let position = if position == Positions::EMPTY {
                    0
                } else {
                    position
                };
                let (block, at) = (position / BLOCK, position % BLOCK * 2 * half);
                let Some(filled) = self.blocks.get(block) else {
                    let angle = |frequency: f32| position as f64 * f64::from(frequency);
                    cos.extend(self.each(angle, libm::cos));
                    sin.extend(self.each(angle, libm::sin));
                    continue;
                };
                let block = filled.get_or_init(|| self.block(block));
                let (cosines, sines) = block[at..at + 2 * half].split_at(half);
                cos.extend_from_slice(cosines);
                sin.extend_from_slice(sines);
            }
        }
        let shape = [1, heads, positions.tokens(), half];
        let tensor = |data| Tensor::from_data(TensorData::new(data, shape), (device, dtype));
        Angles {
            cos: tensor(cos),
            sin: tensor(sin),
        }
    }

    fn block(&self, block: usize) -> Box<[f32]> {
        (block * BLOCK..(block + 1) * BLOCK)
            .flat_map(|position| {
                // Frequency and angle are rounded to f32 as in transformers, for which the weights were made.
                let angle = move |frequency: f32| f64::from(position as f32 * frequency);
                let cosines = self.each(angle, libm::cos);
                cosines.chain(self.each(angle, libm::sin))
            })
            .collect()
    }

    /// A function of the angle of every pair, with the amplitude.
    fn each(&self, angle: impl Fn(f32) -> f64, of: fn(f64) -> f64) -> impl Iterator<Item = f32> {
        let frequencies = self.frequencies.iter();
        frequencies.map(move |&frequency| (of(angle(frequency as f32)) * self.amplitude) as f32)
    }
}

/// Cosines and sines of the tokens of a step, `[1, heads or 1, tokens, head_dim / 2]`.
#[derive(Clone)]
pub(super) struct Angles {
    cos: Tensor<4>,
    sin: Tensor<4>,
}

impl Angles {
    /// Rotates `[1, heads, tokens, head_dim]`. A pair is one element of each half of a head.
    pub(super) fn rotate(&self, x: Tensor<4>) -> Tensor<4> {
        rotate(x, &self.cos, &self.sin)
    }

    /// The angles that undo a rotation by `self`, its amplitude included.
    pub(super) fn inverse(&self) -> Self {
        let square = self.cos.clone().square() + self.sin.clone().square();
        Self {
            cos: self.cos.clone() / square.clone(),
            sin: -self.sin.clone() / square,
        }
    }
}
