//! A model family as data: the defaults of its class in transformers, and the fields that only this family reads. The
//! common fields of `config.json` are mapped here.

use super::{
    fields::{Fields, Refusal},
    neutral,
    rope::{Bases, Ropes},
    warning::Warning,
    windows::Windows,
};
use crate::model::{Activation, DecoderConfig, LayerConfig};

/// What differs between families.
pub(super) struct Family {
    /// Defaults of `vocab_size`, `hidden_size`, `intermediate_size`, `num_hidden_layers` and `num_attention_heads`.
    /// `None` if `config.json` must state them.
    pub(super) sizes: Option<[usize; 5]>,
    /// Default number of KV heads; `None` for as many as query heads.
    pub(super) kv_heads: Option<usize>,
    /// Default width of a head; `None` for `hidden_size / num_attention_heads`.
    pub(super) head_dim: Option<usize>,
    pub(super) positions: usize,
    pub(super) tied: bool,
    pub(super) bases: Bases,
    pub(super) windows: Windows,
    /// Default of `attention_bias`.
    pub(super) bias: bool,
    /// Whether `attention_bias` includes a bias of the output projection.
    pub(super) output_bias: bool,
    /// Fields that this family implements and others must not have.
    pub(super) implements: &'static [&'static str],
    /// Reads the fields that only this family has.
    pub(super) particulars: fn(&Fields, &mut DecoderConfig) -> Result<(), Refusal>,
}

impl Family {
    /// The neutral description, or the first field that is refused.
    pub(super) fn decoder(
        &self,
        fields: &Fields,
    ) -> Result<(DecoderConfig, Vec<Warning>), Refusal> {
        neutral::check(fields, self.implements)?;
        let size = |index: usize, field: &str| {
            let default = self.sizes.map(|sizes| sizes[index]);
            let found = fields.size(field)?.or(default);
            found.ok_or_else(|| fields.missing(field))
        };
        let vocab = size(0, "vocab_size")?;
        let hidden = size(1, "hidden_size")?;
        let intermediate = size(2, "intermediate_size")?;
        let layers = size(3, "num_hidden_layers")?;
        let heads = size(4, "num_attention_heads")?;
        if layers > MOST_LAYERS {
            return Err(fields.unsupported("num_hidden_layers"));
        }
        let default = self
            .kv_heads
            .filter(|_| !fields.is_null("num_key_value_heads"));
        let kv_heads = fields.size("num_key_value_heads")?;
        let kv_heads = kv_heads.or(default).unwrap_or(heads);
        let positions = fields
            .size("max_position_embeddings")?
            .unwrap_or(self.positions);
        let ropes = Ropes::read(fields, &self.bases, positions)?;
        let windows = self.windows.read(fields, layers)?;

        let mut config = DecoderConfig::new(vocab, hidden, 0, heads, kv_heads);
        for window in windows {
            let rope = match (window, ropes.sliding) {
                (None, _) => ropes.full,
                (Some(_), Some(rope)) => rope,
                (Some(_), None) => {
                    return Err(fields.missing("rope_parameters.sliding_attention.rope_theta"));
                }
            };
            config.layers.push(LayerConfig { window, rope });
        }
        config.intermediate = intermediate;
        let head_dim = fields.size("head_dim")?.or(self.head_dim);
        config.head_dim = head_dim.unwrap_or(config.head_dim);
        config.query_scale = 1.0 / (config.head_dim as f64).sqrt();
        config.max_positions = ropes.positions(positions);
        config.norm_epsilon = fields.number("rms_norm_eps")?.unwrap_or(1e-6);
        config.qkv_bias = fields.flag("attention_bias")?.unwrap_or(self.bias);
        config.output_bias = config.qkv_bias && self.output_bias;
        config.tied_head = fields.flag("tie_word_embeddings")?.unwrap_or(self.tied);
        (self.particulars)(fields, &mut config)?;
        let warnings = ropes.assumed.map(|theta| Warning::DefaultTheta { theta });
        Ok((config, warnings.into_iter().collect()))
    }
}

/// The activation in the families where the field is `hidden_act`.
pub(super) fn hidden_act(fields: &Fields) -> Result<Activation, Refusal> {
    match fields.text("hidden_act")?.as_deref() {
        None | Some("silu" | "swish") => Ok(Activation::Silu),
        Some("gelu_pytorch_tanh") => Ok(Activation::GeluTanh),
        Some(_) => Err(fields.unsupported("hidden_act")),
    }
}

/// The most layers. More mean a damaged file.
const MOST_LAYERS: usize = 1000;
