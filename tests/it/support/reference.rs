//! A decoder-only transformer in f64 with plain loops and no cache, written from the formulas alone.
//! It shares no code with the crate beyond `DecoderConfig`, so that a mistake must be made twice to stay unseen.

use std::{collections::HashMap, f64::consts::PI};

use kv_direct::model::{Activation, DecoderConfig, RopeConfig, RopeScaling};

/// Weights by the names of `DecoderConfig::weights`. There may be more than a configuration needs.
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
        let windows = self.config.layers.iter();
        let windows = windows.map(|layer| layer.window.map_or(usize::MAX, |window| window.get()));
        self.logits_of(tokens, &mut Causal(windows.collect()))
    }

    /// Logits where `view` alone decides what a query attends to.
    pub fn logits_of(&self, tokens: &[u32], view: &mut impl View) -> Rows {
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
            let mut attended = self.attention(layer, &normed, view);
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

    fn attention(&self, layer: usize, normed: &[Vec<f64>], view: &mut impl View) -> Rows {
        let c = &self.config;
        let name = |name: &str| format!("layers.{layer}.{name}");
        let mut queries = self.linear(&name("query"), c.qkv_bias, normed);
        let mut keys = self.linear(&name("key"), c.qkv_bias, normed);
        let values = self.linear(&name("value"), c.qkv_bias, normed);
        if c.qk_norm {
            for (rows, norm) in [(&mut queries, "query_norm"), (&mut keys, "key_norm")] {
                for row in rows.iter_mut() {
                    for head in row.chunks_exact_mut(c.head_dim) {
                        head.copy_from_slice(&self.norm_row(&name(norm), head));
                    }
                }
            }
        }
        let (turns, amplitude) = frequencies(&c.layers[layer].rope, c.head_dim);
        let rotated = |row: &[f64], head: usize, position: usize| {
            let mut head = of_head(row, head, c.head_dim).to_vec();
            rotate(&mut head, position, &turns, amplitude);
            head
        };
        // Most keys are read at their own positions by every query.
        let at_home: Vec<Rows> = keys
            .iter()
            .enumerate()
            .map(|(key, row)| (0..c.kv_heads).map(|h| rotated(row, h, key)).collect())
            .collect();
        let group = c.heads / c.kv_heads;
        let mut mixed = vec![vec![0.0; c.heads * c.head_dim]; normed.len()];
        for (query, mixed) in mixed.iter_mut().enumerate() {
            for head in 0..c.heads {
                let kv_head = head / group;
                let asked = rotated(&queries[query], head, view.place(layer, query, query));
                let score = |key: usize| {
                    if !view.sees(layer, kv_head, query, key) {
                        return f64::NEG_INFINITY;
                    }
                    let place = view.place(layer, query, key);
                    let product = if place == key {
                        dot(&asked, &at_home[key][kv_head])
                    } else {
                        dot(&asked, &rotated(&keys[key], kv_head, place))
                    };
                    capped(product * c.query_scale, c.attention_softcap)
                };
                let scores: Vec<f64> = (0..keys.len()).map(score).collect();
                let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let mut shares: Vec<f64> = scores.iter().map(|s| (s - largest).exp()).collect();
                let total: f64 = shares.iter().sum();
                shares.iter_mut().for_each(|share| *share /= total);
                for (row, share) in values.iter().zip(&shares) {
                    let value = of_head(row, kv_head, c.head_dim);
                    for (d, v) in value.iter().enumerate() {
                        mixed[head * c.head_dim + d] += share * v;
                    }
                }
                view.gave(layer, head, query, &shares);
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

/// What queries attend to. Called layer by layer, then query by query, then head by head. So a view may
/// decide by the probabilities of earlier queries of the layer.
pub trait View {
    /// Whether a query attends to a key at the query heads of this KV head. Called for later keys too.
    fn sees(&self, layer: usize, kv_head: usize, query: usize, key: usize) -> bool;

    /// The position a key has for a query; for `key == query` that of the query itself.
    fn place(&self, _layer: usize, _query: usize, key: usize) -> usize {
        key
    }

    /// Receives the probabilities of every key for one head of a query; 0 where it does not attend.
    fn gave(&mut self, _layer: usize, _head: usize, _query: usize, _shares: &[f64]) {}
}

/// Each layer's window; without one, longer than any text.
struct Causal(Vec<usize>);

impl View for Causal {
    fn sees(&self, layer: usize, _: usize, query: usize, key: usize) -> bool {
        key <= query && query - key < self.0[layer]
    }
}

fn of_head(row: &[f64], head: usize, width: usize) -> &[f64] {
    &row[head * width..][..width]
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
