//! `DecoderConfig`: one neutral description of every decoder that the crate runs. A model family is a mapping to it.

use std::num::NonZeroUsize;

use burn::tensor::DType;

use super::rope::RopeConfig;
use crate::{
    cache::ModelShape,
    exact::{Activation, KernelShapes},
};

/// A decoder-only transformer: pre-norm, rotary positions, grouped queries, gated feed-forward layer.
///
/// [`new`](Self::new) returns a plain Llama. Every field can then be changed. [`validate`](Self::validate) reports
/// fields that do not fit one another.
///
/// ```
/// use kv_direct::model::DecoderConfig;
///
/// let mut config = DecoderConfig::new(97, 64, 3, 4, 2);
/// config.validate()?;
/// config.kv_heads = 3;
/// assert_eq!(
///     config.validate().unwrap_err().to_string(),
///     "heads = 4 is not a multiple of kv_heads = 3"
/// );
/// # Ok::<(), kv_direct::model::ConfigError>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct DecoderConfig {
    /// Size of the vocabulary.
    pub vocab: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width inside the feed-forward layer.
    pub intermediate: usize,
    /// Query heads.
    pub heads: usize,
    /// KV heads; query head `h` reads KV head `h / (heads / kv_heads)`.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Positions of the model. A step beyond them is refused.
    pub max_positions: usize,
    /// What differs between layers, one element for each.
    pub layers: Vec<LayerConfig>,
    /// Epsilon of all norms.
    pub norm_epsilon: f64,
    /// Whether norm weights count as `1 + weight` (Gemma).
    pub norm_plus_one: bool,
    /// Whether a norm follows attention, and another the feed-forward layer, before each residual add (Gemma).
    pub post_norms: bool,
    /// Whether each head of queries and keys has an RMSNorm before rotation (Qwen3, Gemma 3).
    pub qk_norm: bool,
    /// Whether the query, key and value projections have biases (Qwen2).
    pub qkv_bias: bool,
    /// Whether the output projection has a bias.
    pub output_bias: bool,
    /// Whether the feed-forward layer has biases.
    pub mlp_bias: bool,
    /// Factor on the attention scores.
    pub query_scale: f64,
    /// Soft cap on the attention scores.
    pub attention_softcap: Option<f64>,
    /// Soft cap on the logits.
    pub final_softcap: Option<f64>,
    /// Factor on the embedding (Gemma), already rounded to the dtype of the weights.
    pub embedding_scale: Option<f64>,
    /// Whether the head is the embedding.
    pub tied_head: bool,
    /// Activation of the feed-forward gate.
    pub activation: Activation,
}

/// What differs between the layers of a decoder.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct LayerConfig {
    /// How many keys a query sees, its own included; `None` for a full-attention layer.
    pub window: Option<NonZeroUsize>,
    /// Rotary base and scaling.
    pub rope: RopeConfig,
}

impl LayerConfig {
    /// A full-attention layer.
    #[must_use]
    pub const fn full(rope: RopeConfig) -> Self {
        Self { window: None, rope }
    }
}

impl DecoderConfig {
    /// A Llama with heads of width `hidden / heads`, a feed-forward layer four times as wide as the residual stream,
    /// RoPE base 10,000 and 2,048 positions.
    #[must_use]
    pub fn new(vocab: usize, hidden: usize, layers: usize, heads: usize, kv_heads: usize) -> Self {
        let head_dim = hidden / heads.max(1);
        Self {
            vocab,
            hidden,
            intermediate: hidden.saturating_mul(4),
            heads,
            kv_heads,
            head_dim,
            max_positions: 2048,
            layers: vec![LayerConfig::full(RopeConfig::new(10_000.0)); layers],
            norm_epsilon: 1e-5,
            norm_plus_one: false,
            post_norms: false,
            qk_norm: false,
            qkv_bias: false,
            output_bias: false,
            mlp_bias: false,
            query_scale: 1.0 / (head_dim as f64).sqrt(),
            attention_softcap: None,
            final_softcap: None,
            embedding_scale: None,
            tied_head: false,
            activation: Activation::Silu,
        }
    }

    /// Checks that the fields fit one another.
    ///
    /// # Errors
    /// [`ConfigError`], naming the fields.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let sizes = [
            ("vocab", self.vocab),
            ("hidden", self.hidden),
            ("intermediate", self.intermediate),
            ("heads", self.heads),
            ("kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("max_positions", self.max_positions),
            ("layers", self.layers.len()),
        ];
        if let Some(&(field, _)) = sizes.iter().find(|(_, size)| *size == 0) {
            return Err(ConfigError::Zero { field });
        }
        if let Some(&(field, size)) = sizes.iter().find(|(_, size)| *size > LARGEST) {
            return Err(ConfigError::TooLarge {
                field,
                size,
                largest: LARGEST,
            });
        }
        let width = self.heads * self.head_dim;
        if width > LARGEST {
            return Err(ConfigError::TooLarge {
                field: "heads · head_dim",
                size: width,
                largest: LARGEST,
            });
        }
        let inner = self.intermediate.max(self.vocab).max(width);
        let elements = self.hidden.saturating_mul(inner);
        if elements > MOST_ELEMENTS {
            return Err(ConfigError::TooLarge {
                field: "hidden · the widest other size",
                size: elements,
                largest: MOST_ELEMENTS,
            });
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(ConfigError::HeadGroups {
                heads: self.heads,
                kv_heads: self.kv_heads,
            });
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(ConfigError::OddHead {
                head_dim: self.head_dim,
            });
        }
        let positive = [
            ("norm_epsilon", Some(self.norm_epsilon)),
            ("query_scale", Some(self.query_scale)),
            ("attention_softcap", self.attention_softcap),
            ("final_softcap", self.final_softcap),
            ("embedding_scale", self.embedding_scale),
        ];
        let ropes = self.layers.iter().flat_map(|layer| layer.rope.factors());
        let bad = |&(_, value): &(&'static str, Option<f64>)| {
            value.is_some_and(|v| !v.is_finite() || v <= 0.0)
        };
        match positive.into_iter().chain(ropes).find(bad) {
            Some((field, value)) => Err(ConfigError::NotPositive {
                field,
                value: value.unwrap_or(f64::NAN),
            }),
            None => Ok(()),
        }
    }

    /// The neutral name of every weight that the decoder needs, with its shape in Hugging Face's orientation
    /// (`[out, in]`).
    ///
    /// # Errors
    /// As [`validate`](Self::validate).
    ///
    /// ```
    /// let weights = kv_direct::model::DecoderConfig::new(97, 64, 3, 4, 2).weights()?;
    /// assert_eq!(weights.len(), 3 + 3 * 9);
    /// assert!(weights.contains(&("layers.2.key".into(), vec![32, 64])));
    /// # Ok::<(), kv_direct::model::ConfigError>(())
    /// ```
    pub fn weights(&self) -> Result<Vec<(String, Vec<usize>)>, ConfigError> {
        self.validate()?;
        let embedding = vec![self.vocab, self.hidden];
        let mut weights = vec![("embedding".to_owned(), embedding.clone())];
        if !self.tied_head {
            weights.push(("head".to_owned(), embedding));
        }
        let block = self.block_weights();
        for layer in 0..self.layers.len() {
            weights.extend(
                block
                    .iter()
                    .map(|(name, shape)| (format!("layers.{layer}.{name}"), shape.clone())),
            );
        }
        weights.push(("final_norm".to_owned(), vec![self.hidden]));
        Ok(weights)
    }

    /// The sizes that a cache needs for a decoder of this configuration that computes in `dtype`. They suffice to
    /// compute the cost of a context, without any weights.
    ///
    /// ```
    /// use burn::tensor::DType;
    /// use kv_direct::{model::DecoderConfig, residual::Plan};
    ///
    /// let shape = DecoderConfig::new(49_152, 576, 30, 9, 3).shape(DType::F32);
    /// assert_eq!(shape.keys_values_per_token(), 46_080);
    /// assert_eq!(Plan::retain_top(&shape, 15)?.bytes_per_old_token(&shape), 23_044);
    /// # Ok::<(), kv_direct::cache::CacheError>(())
    /// ```
    #[must_use]
    pub fn shape(&self, dtype: DType) -> ModelShape {
        let (queries, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let mut kernels = KernelShapes::new(self.heads, self.kv_heads, self.head_dim);
        kernels.linears = vec![
            [self.hidden, queries],
            [self.hidden, 2 * kv],
            [queries, self.hidden],
            [self.hidden, 2 * self.intermediate],
            [self.intermediate, self.hidden],
            [self.hidden, self.vocab],
        ];
        kernels.norms = vec![self.hidden];
        if self.qk_norm {
            kernels.norms.push(self.head_dim);
        }
        let mut shape = ModelShape::new(self.layers.len(), self.hidden, dtype, kernels);
        shape.windows = self.layers.iter().map(|layer| layer.window).collect();
        shape.block.native = true;
        (shape.intermediate, shape.vocab) = (Some(self.intermediate), Some(self.vocab));
        shape
    }

    /// The weights of one block.
    pub(super) fn block_weights(&self) -> Vec<(&'static str, Vec<usize>)> {
        let (hidden, inner) = (self.hidden, self.intermediate);
        let (queries, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let head = self.head_dim;
        let all = [
            ("attention_norm", vec![hidden], true),
            ("query", vec![queries, hidden], true),
            ("key", vec![kv, hidden], true),
            ("value", vec![kv, hidden], true),
            ("output", vec![hidden, queries], true),
            ("query.bias", vec![queries], self.qkv_bias),
            ("key.bias", vec![kv], self.qkv_bias),
            ("value.bias", vec![kv], self.qkv_bias),
            ("output.bias", vec![hidden], self.output_bias),
            ("query_norm", vec![head], self.qk_norm),
            ("key_norm", vec![head], self.qk_norm),
            ("post_attention_norm", vec![hidden], self.post_norms),
            ("feed_forward_norm", vec![hidden], true),
            ("gate", vec![inner, hidden], true),
            ("up", vec![inner, hidden], true),
            ("down", vec![hidden, inner], true),
            ("gate.bias", vec![inner], self.mlp_bias),
            ("up.bias", vec![inner], self.mlp_bias),
            ("down.bias", vec![hidden], self.mlp_bias),
            ("post_feed_forward_norm", vec![hidden], self.post_norms),
        ];
        all.into_iter()
            .filter(|(.., wanted)| *wanted)
            .map(|(name, shape, _)| (name, shape))
            .collect()
    }
}

/// The largest size that is accepted. A larger one means a damaged file. The product of two still fits `usize`.
const LARGEST: usize = 1 << 24;

/// The most elements of a weight. More mean a damaged file.
const MOST_ELEMENTS: usize = 1 << 36;

/// Fields of a configuration that do not fit one another.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A size is 0.
    #[error("{field} is 0")]
    Zero {
        /// The field.
        field: &'static str,
    },
    /// A size that no model has.
    #[error("{field} = {size} is larger than {largest}")]
    TooLarge {
        /// The field.
        field: &'static str,
        /// Its value.
        size: usize,
        /// The largest that is accepted.
        largest: usize,
    },
    /// Query heads cannot be divided evenly among the KV heads.
    #[error("heads = {heads} is not a multiple of kv_heads = {kv_heads}")]
    HeadGroups {
        /// Query heads.
        heads: usize,
        /// KV heads.
        kv_heads: usize,
    },
    /// Half-split rotation needs an even width.
    #[error("head_dim = {head_dim} is odd")]
    OddHead {
        /// Width of a head.
        head_dim: usize,
    },
    /// A factor is zero, negative or not a number.
    #[error("{field} = {value} is not a positive number")]
    NotPositive {
        /// The field.
        field: &'static str,
        /// Its value.
        value: f64,
    },
}
