//! Fields of `config.json` that can change the mathematics in ways that the crate does not implement. Each must be
//! absent, be `null`, or have the value that changes nothing.

use super::fields::{Fields, Refusal};

/// The value that changes nothing.
enum Neutral {
    /// There is none: the field must be absent or `null`.
    Absent,
    Is(bool),
    Number(f64),
}

/// The fields and their neutral values. A family is not checked for the fields that it implements.
const NEUTRAL: &[(&str, Neutral)] = {
    use Neutral::{Absent, Is, Number};
    &[
        // Rotation.
        ("rope_interleaved", Is(false)),
        ("rope_interleave", Is(false)),
        ("partial_rotary_factor", Number(1.0)),
        ("rotary_pct", Number(1.0)),
        ("rotary_dim", Absent),
        ("rope_local_base_freq", Absent),
        ("no_rope_layers", Absent),
        ("no_rope_layer_interval", Absent),
        ("alibi", Is(false)),
        // Which keys a query sees.
        ("use_bidirectional_attention", Is(false)),
        ("is_causal", Is(true)),
        ("use_sliding_window", Is(false)),
        ("sliding_window", Absent),
        ("sliding_window_pattern", Number(1.0)),
        ("_sliding_window_pattern", Number(1.0)),
        ("attention_chunk_size", Absent),
        ("dual_chunk_attention_config", Absent),
        ("num_kv_shared_layers", Number(0.0)),
        ("is_encoder_decoder", Is(false)),
        ("add_cross_attention", Is(false)),
        ("cross_attention_layers", Absent),
        // Scores, norms, biases and factors.
        ("query_pre_attn_scalar", Absent),
        ("attn_logit_softcapping", Absent),
        ("final_logit_softcapping", Absent),
        ("use_qk_norm", Is(false)),
        ("qk_layernorm", Is(false)),
        ("clip_qkv", Absent),
        ("mlp_bias", Is(false)),
        ("hidden_activation", Absent),
        ("use_parallel_residual", Is(false)),
        ("parallel_attn", Is(false)),
        ("logit_scale", Number(1.0)),
        ("logits_scaling", Number(1.0)),
        ("lm_head_multiplier", Number(1.0)),
        ("residual_multiplier", Number(1.0)),
        ("embedding_multiplier", Number(1.0)),
        ("attention_multiplier", Number(1.0)),
        // Experts and stored forms.
        ("num_experts", Number(0.0)),
        ("num_local_experts", Number(0.0)),
        ("n_routed_experts", Number(0.0)),
        ("num_experts_per_tok", Number(0.0)),
        ("quantization_config", Absent),
        ("compression_config", Absent),
    ]
};

/// Refuses the first field whose value changes something. Fields in `implemented` are not checked.
pub(super) fn check(fields: &Fields, implemented: &[&str]) -> Result<(), Refusal> {
    let changes = |field: &str, neutral: &Neutral| match neutral {
        Neutral::Absent => true,
        Neutral::Is(flag) => !matches!(fields.flag(field), Ok(Some(found)) if found == *flag),
        Neutral::Number(number) => {
            !matches!(fields.number(field), Ok(Some(found)) if found == *number)
        }
    };
    let unmet = NEUTRAL.iter().find(|(field, neutral)| {
        fields.get(field).is_some() && !implemented.contains(field) && changes(field, neutral)
    });
    unmet.map_or(Ok(()), |(field, _)| Err(fields.unsupported(field)))
}
