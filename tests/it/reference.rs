//! A decoder-only transformer in f64 with plain loops and no cache, written from the formulas alone:
//! it shares no code with the crate beyond `DecoderConfig`, so that a mistake has to be made twice
//! to go unseen.

use std::{collections::HashMap, f64::consts::PI};

use kv_direct::model::{Activation, DecoderConfig, RopeConfig, RopeScaling};

/// Weights by the names of `DecoderConfig::weights`. More than a configuration needs do no harm.
pub type Weights = HashMap<String, Vec<f32>>;

type Rows = Vec<Vec<f64>>;

/// The model itself: a configuration and its weights.
pub struct Reference {
    config: DecoderConfig,
    weights: HashMap<String, Vec<f64>>,
}

impl Reference {
    pub fn new(config: &DecoderConfig, weights: &Weights) -> Self {
        let widened = |values: &Vec<f32>| values.iter().copied().map(f64::from).collect();
        Self {
            config: config.clone(),
            weights: weights
                .iter()
                .map(|(name, values)| (name.clone(), widened(values)))
                .collect(),
        }
    }

    /// Logits of every token, causal and within each layer's window.
    pub fn logits(&self, tokens: &[u32]) -> Rows {
        self.logits_where(tokens, |layer, query, key| {
            let window = self.config.layers[layer].window;
            key <= query && window.is_none_or(|window| query - key < window.get())
        })
    }

    /// Logits where `visible(layer, query, key)` alone decides what a query reads. It is asked about
    /// every pair of positions, later keys included.
    pub fn logits_where(
        &self,
        tokens: &[u32],
        visible: impl Fn(usize, usize, usize) -> bool,
    ) -> Rows {
        let c = &self.config;
        let scale = c.embedding_scale.unwrap_or(1.0);
        let embedding = self.weight("embedding");
        let mut residual: Rows = tokens
            .iter()
            .map(|&token| {
                let row = &embedding[token as usize * c.hidden..][..c.hidden];
                row.iter().map(|x| x * scale).collect()
            })
            .collect();
        for layer in 0..c.layers.len() {
            let name = |name: &str| format!("layers.{layer}.{name}");
            let normed = self.norm(&name("attention_norm"), &residual);
            let mut attended = self.attention(layer, &normed, |q, k| visible(layer, q, k));
            if c.post_norms {
                attended = self.norm(&name("post_attention_norm"), &attended);
            }
            add(&mut residual, &attended);
            let normed = self.norm(&name("feed_forward_norm"), &residual);
            let mut fed = self.feed_forward(layer, &normed);
            if c.post_norms {
                fed = self.norm(&name("post_feed_forward_norm"), &fed);
            }
            add(&mut residual, &fed);
        }
        let normed = self.norm("final_norm", &residual);
        let head = if c.tied_head { "embedding" } else { "head" };
        let mut logits = self.linear(head, false, &normed);
        for logit in logits.iter_mut().flatten() {
            *logit = capped(*logit, c.final_softcap);
        }
        logits
    }

    fn attention(
        &self,
        layer: usize,
        normed: &[Vec<f64>],
        visible: impl Fn(usize, usize) -> bool,
    ) -> Rows {
        let c = &self.config;
        let name = |name: &str| format!("layers.{layer}.{name}");
        let mut queries = self.linear(&name("query"), c.qkv_bias, normed);
        let mut keys = self.linear(&name("key"), c.qkv_bias, normed);
        let values = self.linear(&name("value"), c.qkv_bias, normed);
        let (turns, amplitude) = frequencies(&c.layers[layer].rope, c.head_dim);
        for (rows, norm) in [(&mut queries, "query_norm"), (&mut keys, "key_norm")] {
            for (position, row) in rows.iter_mut().enumerate() {
                for head in row.chunks_exact_mut(c.head_dim) {
                    if c.qk_norm {
                        head.copy_from_slice(&self.norm_row(&name(norm), head));
                    }
                    rotate(head, position, &turns, amplitude);
                }
            }
        }
        let group = c.heads / c.kv_heads;
        let mut mixed = vec![vec![0.0; c.heads * c.head_dim]; normed.len()];
        for (query, mixed) in mixed.iter_mut().enumerate() {
            for head in 0..c.heads {
                let of_head =
                    |row: &[f64], head: usize| row[head * c.head_dim..][..c.head_dim].to_vec();
                let asked = of_head(&queries[query], head);
                let seen: Vec<usize> = (0..keys.len()).filter(|&k| visible(query, k)).collect();
                let scores: Vec<f64> = seen
                    .iter()
                    .map(|&key| {
                        let score = dot(&asked, &of_head(&keys[key], head / group));
                        capped(score * c.query_scale, c.attention_softcap)
                    })
                    .collect();
                let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let shares: Vec<f64> = scores.iter().map(|s| (s - largest).exp()).collect();
                let total: f64 = shares.iter().sum();
                for (&key, share) in seen.iter().zip(&shares) {
                    let value = of_head(&values[key], head / group);
                    for (d, v) in value.iter().enumerate() {
                        mixed[head * c.head_dim + d] += share / total * v;
                    }
                }
            }
        }
        self.linear(&name("output"), c.output_bias, &mixed)
    }

    fn feed_forward(&self, layer: usize, normed: &[Vec<f64>]) -> Rows {
        let c = &self.config;
        let project = |name: &str, rows: &[Vec<f64>]| {
            self.linear(&format!("layers.{layer}.{name}"), c.mlp_bias, rows)
        };
        let mut inner = project("gate", normed);
        let up = project("up", normed);
        for (x, up) in inner.iter_mut().flatten().zip(up.iter().flatten()) {
            *x = activated(*x, c.activation) * up;
        }
        project("down", &inner)
    }

    fn weight(&self, name: &str) -> &[f64] {
        let weight = self.weights.get(name);
        weight.unwrap_or_else(|| panic!("no weight is named {name}"))
    }

    /// `x · Wᵀ + b`, `W` as `[out, in]`.
    fn linear(&self, name: &str, biased: bool, rows: &[Vec<f64>]) -> Rows {
        let weight = self.weight(name);
        let bias = biased.then(|| self.weight(&format!("{name}.bias")));
        let project = |row: &Vec<f64>| {
            let columns = weight.chunks_exact(row.len()).enumerate();
            columns
                .map(|(out, column)| dot(row, column) + bias.map_or(0.0, |bias| bias[out]))
                .collect()
        };
        rows.iter().map(project).collect()
    }

    fn norm(&self, name: &str, rows: &[Vec<f64>]) -> Rows {
        rows.iter().map(|row| self.norm_row(name, row)).collect()
    }

    fn norm_row(&self, name: &str, row: &[f64]) -> Vec<f64> {
        let root = (dot(row, row) / row.len() as f64 + self.config.norm_epsilon).sqrt();
        let plus = if self.config.norm_plus_one { 1.0 } else { 0.0 };
        let weights = self.weight(name);
        assert_eq!(weights.len(), row.len(), "{name} fits what it scales");
        row.iter()
            .zip(weights)
            .map(|(x, w)| x / root * (plus + w))
            .collect()
    }
}

fn add(to: &mut [Vec<f64>], more: &[Vec<f64>]) {
    for (to, more) in to.iter_mut().flatten().zip(more.iter().flatten()) {
        *to += more;
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len(), "both vectors are as long");
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn capped(x: f64, cap: Option<f64>) -> f64 {
    cap.map_or(x, |cap| cap * (x / cap).tanh())
}

fn activated(x: f64, activation: Activation) -> f64 {
    match activation {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::GeluTanh => {
            0.5 * x * (1.0 + ((2.0 / PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
        }
        other => panic!("the reference has no {other:?}"),
    }
}

fn rotate(head: &mut [f64], position: usize, turns: &[f64], amplitude: f64) {
    let (first, second) = head.split_at_mut(turns.len());
    for ((x1, x2), turn) in first.iter_mut().zip(second).zip(turns) {
        let (sin, cos) = (position as f64 * turn).sin_cos();
        let (sin, cos) = (sin * amplitude, cos * amplitude);
        (*x1, *x2) = (*x1 * cos - *x2 * sin, *x2 * cos + *x1 * sin);
    }
}

/// Radians a position turns each pair, and the factor on cosine and sine.
fn frequencies(rope: &RopeConfig, head_dim: usize) -> (Vec<f64>, f64) {
    let width = head_dim as f64;
    let plain = (0..head_dim / 2).map(|i| rope.theta.powf(-2.0 * i as f64 / width));
    let plain: Vec<f64> = plain.collect();
    let scaled = match rope.scaling {
        RopeScaling::None => plain,
        RopeScaling::Linear { factor } => plain.iter().map(|f| f / factor).collect(),
        RopeScaling::Llama3 {
            factor,
            low,
            high,
            original,
        } => {
            let scale = |f: &f64| match 2.0 * PI / f {
                wavelength if wavelength < original / high => *f,
                wavelength if wavelength > original / low => f / factor,
                wavelength => {
                    let smooth = (original / wavelength - low) / (high - low);
                    f * smooth + (1.0 - smooth) * f / factor
                }
            };
            plain.iter().map(scale).collect()
        }
        RopeScaling::Yarn {
            factor,
            fast,
            slow,
            original,
            attention,
        } => {
            // The pair, as a fraction, that turns `turns` times over the original length.
            let pair =
                |turns: f64| width * (original / (turns * 2.0 * PI)).ln() / (2.0 * rope.theta.ln());
            let from = pair(fast).floor().max(0.0);
            let mut to = pair(slow).ceil().min(width - 1.0);
            if from == to {
                to += 0.001;
            }
            let scale = |(i, f): (usize, &f64)| {
                let ramp = ((i as f64 - from) / (to - from)).clamp(0.0, 1.0);
                f / factor * ramp + f * (1.0 - ramp)
            };
            return (plain.iter().enumerate().map(scale).collect(), attention);
        }
        other => panic!("the reference has no {other:?}"),
    };
    (scaled, 1.0)
}
