//! The Llama family: `config.json` to [`DecoderConfig`], and tensor names. Llama 2 and 3, TinyLlama,
//! SmolLM2.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

use crate::model::{
    Activation, DecoderConfig, LayerConfig, RopeConfig, RopeScaling, yarn_attention_factor,
};

/// Why a configuration is refused.
#[derive(Debug)]
pub(super) enum Refusal {
    /// A field has a value that is not implemented.
    Unsupported { field: String, value: String },
    /// A field is missing that another one calls for.
    Missing { field: String },
}

/// `config.json`, with the defaults of transformers' `LlamaConfig`.
#[derive(Debug, Deserialize)]
pub(super) struct LlamaConfig {
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    max_position_embeddings: Option<usize>,
    rms_norm_eps: Option<f64>,
    rope_theta: Option<f64>,
    rope_scaling: Option<Rope>,
    rope_parameters: Option<Rope>,
    rope_interleaved: Option<bool>,
    partial_rotary_factor: Option<f64>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    hidden_act: Option<String>,
    tie_word_embeddings: Option<bool>,
    sliding_window: Option<Value>,
    layer_types: Option<Vec<String>>,
}

/// `rope_scaling`, or the newer `rope_parameters`, which also holds the base.
#[derive(Debug, PartialEq, Deserialize)]
struct Rope {
    rope_type: Option<String>,
    #[serde(rename = "type")]
    old_type: Option<String>,
    rope_theta: Option<f64>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<f64>,
    beta_fast: Option<f64>,
    beta_slow: Option<f64>,
    attention_factor: Option<f64>,
    partial_rotary_factor: Option<f64>,
    mscale: Option<f64>,
    mscale_all_dim: Option<f64>,
    truncate: Option<bool>,
    /// Any other field could change the mathematics.
    #[serde(flatten)]
    unknown: BTreeMap<String, Value>,
}

impl LlamaConfig {
    /// The neutral description, or the first field that stands against it.
    pub(super) fn decoder(self) -> Result<DecoderConfig, Refusal> {
        let positions = self.max_position_embeddings.unwrap_or(2048);
        let refuse = |field: &str, value: String| {
            Err(Refusal::Unsupported {
                field: field.into(),
                value,
            })
        };
        if self.rope_interleaved == Some(true) {
            return refuse("rope_interleaved", "true".into());
        }
        if let Some(factor) = self.partial_rotary_factor.filter(|&factor| factor != 1.0) {
            return refuse("partial_rotary_factor", factor.to_string());
        }
        if let Some(window) = self.sliding_window.filter(|window| !window.is_null()) {
            return refuse("sliding_window", window.to_string());
        }
        if let Some(kind) = self
            .layer_types
            .iter()
            .flatten()
            .find(|kind| *kind != "full_attention")
        {
            return refuse("layer_types", kind.clone());
        }
        let activation = match self.hidden_act.as_deref() {
            None | Some("silu" | "swish") => Activation::Silu,
            Some("gelu_pytorch_tanh") => Activation::GeluTanh,
            Some(other) => return refuse("hidden_act", other.into()),
        };
        let rope = match (&self.rope_parameters, &self.rope_scaling) {
            (Some(new), Some(old)) if new != old => {
                return refuse(
                    "rope_scaling beside another rope_parameters",
                    format!("{old:?}"),
                );
            }
            (new, old) => new.as_ref().or(old.as_ref()),
        };
        let theta = rope
            .and_then(|rope| rope.rope_theta)
            .or(self.rope_theta)
            .unwrap_or(10_000.0);
        let scaling = rope.map_or(Ok(RopeScaling::None), |rope| rope.scaling(positions))?;
        let layer = LayerConfig::full(RopeConfig::new(theta).with_scaling(scaling));

        let (heads, hidden) = (self.num_attention_heads, self.hidden_size);
        let kv_heads = self.num_key_value_heads.unwrap_or(heads);
        if self.num_hidden_layers > MOST_LAYERS {
            return refuse("num_hidden_layers", self.num_hidden_layers.to_string());
        }
        let mut config = DecoderConfig::new(self.vocab_size, hidden, 0, heads, kv_heads);
        config.layers = vec![layer; self.num_hidden_layers];
        config.intermediate = self.intermediate_size;
        config.head_dim = self.head_dim.unwrap_or(config.head_dim);
        config.query_scale = 1.0 / (config.head_dim as f64).sqrt();
        config.max_positions = positions;
        config.norm_epsilon = self.rms_norm_eps.unwrap_or(1e-6);
        config.qkv_bias = self.attention_bias.unwrap_or(false);
        config.output_bias = config.qkv_bias;
        config.mlp_bias = self.mlp_bias.unwrap_or(false);
        config.tied_head = self.tie_word_embeddings.unwrap_or(false);
        config.activation = activation;
        Ok(config)
    }
}

impl Rope {
    fn scaling(&self, positions: usize) -> Result<RopeScaling, Refusal> {
        let refuse = |field: &str, value: String| {
            let field = format!("rope_scaling.{field}");
            Err(Refusal::Unsupported { field, value })
        };
        let needed = |field: &str, value: Option<f64>| {
            value.ok_or_else(|| Refusal::Missing {
                field: format!("rope_scaling.{field}"),
            })
        };
        let mut unknown = self.unknown.iter().filter(|(_, value)| !value.is_null());
        if let Some((field, value)) = unknown.next() {
            return refuse(field, value.to_string());
        }
        if let Some(factor) = self.partial_rotary_factor.filter(|&factor| factor != 1.0) {
            return refuse("partial_rotary_factor", factor.to_string());
        }
        let original = self.original_max_position_embeddings;
        match self
            .rope_type
            .as_deref()
            .or(self.old_type.as_deref())
            .unwrap_or("default")
        {
            "default" => Ok(RopeScaling::None),
            "linear" => Ok(RopeScaling::Linear {
                factor: needed("factor", self.factor)?,
            }),
            "llama3" => Ok(RopeScaling::Llama3 {
                factor: needed("factor", self.factor)?,
                low: needed("low_freq_factor", self.low_freq_factor)?,
                high: needed("high_freq_factor", self.high_freq_factor)?,
                original: needed("original_max_position_embeddings", original)?,
            }),
            "yarn" => {
                if let Some(mscale) = self.mscale.or(self.mscale_all_dim) {
                    return refuse("mscale", mscale.to_string());
                }
                if self.truncate == Some(false) {
                    return refuse("truncate", "false".into());
                }
                let factor = needed("factor", self.factor)?;
                Ok(RopeScaling::Yarn {
                    factor,
                    fast: self.beta_fast.unwrap_or(32.0),
                    slow: self.beta_slow.unwrap_or(1.0),
                    original: original.unwrap_or(positions as f64),
                    attention: self
                        .attention_factor
                        .unwrap_or_else(|| yarn_attention_factor(factor)),
                })
            }
            other => refuse("rope_type", other.into()),
        }
    }
}

/// More is a damaged file.
const MOST_LAYERS: usize = 10_000;

/// The family's name of a neutral one.
pub(super) fn tensor_name(neutral: &str) -> String {
    let (prefix, name) = match neutral
        .strip_prefix("layers.")
        .and_then(|rest| rest.split_once('.'))
    {
        Some((layer, name)) => (format!("model.layers.{layer}."), name),
        None => (String::new(), neutral),
    };
    let (name, kind) = name
        .strip_suffix(".bias")
        .map_or((name, "weight"), |name| (name, "bias"));
    let own = match name {
        "embedding" => "model.embed_tokens",
        "final_norm" => "model.norm",
        "head" => "lm_head",
        "attention_norm" => "input_layernorm",
        "feed_forward_norm" => "post_attention_layernorm",
        "query" => "self_attn.q_proj",
        "key" => "self_attn.k_proj",
        "value" => "self_attn.v_proj",
        "output" => "self_attn.o_proj",
        "gate" => "mlp.gate_proj",
        "up" => "mlp.up_proj",
        "down" => "mlp.down_proj",
        other => other,
    };
    format!("{prefix}{own}.{kind}")
}
