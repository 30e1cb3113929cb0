//! The Qwen families. Qwen2 and 2.5 have biases on queries, keys and values, Qwen3 has a norm on queries and keys.

use super::{
    family::{Family, hidden_act},
    rope::Bases,
    windows::Windows,
};

pub(super) const QWEN2: Family = Family {
    sizes: None,
    kv_heads: Some(32),
    head_dim: None,
    positions: 32_768,
    tied: false,
    bases: Bases::Required,
    windows: Windows::Switched,
    bias: true,
    output_bias: false,
    implements: &WINDOWS,
    particulars: |fields, config| {
        config.activation = hidden_act(fields)?;
        Ok(())
    },
};

pub(super) const QWEN3: Family = Family {
    head_dim: Some(128),
    bias: false,
    output_bias: true,
    particulars: |fields, config| {
        config.activation = hidden_act(fields)?;
        config.qk_norm = true;
        Ok(())
    },
    ..QWEN2
};

const WINDOWS: [&str; 4] = [
    "sliding_window",
    "use_sliding_window",
    "sliding_window_pattern",
    "_sliding_window_pattern",
];
