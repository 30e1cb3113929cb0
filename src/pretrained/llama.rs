//! The Llama family: Llama 2 and 3, TinyLlama, SmolLM2.

use super::{
    family::{Family, hidden_act},
    rope::Bases,
    windows::Windows,
};

pub(super) const LLAMA: Family = Family {
    sizes: None,
    kv_heads: None,
    head_dim: None,
    positions: 2048,
    tied: false,
    // Llama 2 was published before the field existed.
    bases: Bases::Assumed(10_000.0),
    windows: Windows::Never,
    bias: false,
    output_bias: true,
    implements: &["mlp_bias"],
    particulars: |fields, config| {
        config.activation = hidden_act(fields)?;
        config.mlp_bias = fields.flag("mlp_bias")?.unwrap_or(false);
        Ok(())
    },
};
