//! The Gemma 3 family, text only. The larger models are stored in a wrapper with a vision tower.

use burn::tensor::{DType, bf16, f16};

use super::{
    family::Family,
    fields::{Fields, Refusal},
    rope::Bases,
    windows::Windows,
};
use crate::model::{Activation, DecoderConfig};

pub(super) const GEMMA3: Family = Family {
    sizes: Some([262_208, 2304, 9216, 26, 8]),
    kv_heads: Some(4),
    head_dim: Some(256),
    positions: 131_072,
    tied: true,
    bases: Bases::Local {
        full: 1e6,
        sliding: 1e4,
    },
    windows: Windows::Sixth,
    bias: false,
    output_bias: true,
    implements: &[
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "hidden_activation",
        "query_pre_attn_scalar",
        "rope_local_base_freq",
        "sliding_window",
        "use_sliding_window",
        "sliding_window_pattern",
        "_sliding_window_pattern",
    ],
    particulars,
};

fn particulars(fields: &Fields, config: &mut DecoderConfig) -> Result<(), Refusal> {
    for field in ["hidden_activation", "hidden_act"] {
        // In Gemma's files the plain name means the tanh approximation, too.
        if !matches!(
            fields.text(field)?.as_deref(),
            None | Some("gelu_pytorch_tanh" | "gelu")
        ) {
            return Err(fields.unsupported(field));
        }
    }
    // transformers does not read this field for Gemma 3, so it is unclear what `false` means.
    if fields.flag("use_sliding_window")? == Some(false) {
        return Err(fields.unsupported("use_sliding_window"));
    }
    config.activation = Activation::GeluTanh;
    (config.norm_plus_one, config.post_norms, config.qk_norm) = (true, true, true);
    let scalar = fields.positive("query_pre_attn_scalar")?.unwrap_or(256.0);
    config.query_scale = 1.0 / scalar.sqrt();
    config.attention_softcap = fields.positive("attn_logit_softcapping")?;
    config.final_softcap = fields.positive("final_logit_softcapping")?;
    config.embedding_scale = Some((config.hidden as f64).sqrt());
    Ok(())
}

/// A factor on the embedding, rounded to the dtype in which the embedding is stored.
pub(super) fn rounded(factor: f64, stored: DType) -> f64 {
    match stored {
        DType::F16 => f16::from_f64(factor).to_f64(),
        DType::BF16 => bf16::from_f64(factor).to_f64(),
        _ => f64::from(factor as f32),
    }
}
