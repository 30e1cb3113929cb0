//! Fields of `config.json` that change the maths and are not implemented: errors that name field and value.

use kv_direct::pretrained::LoadError;
use serde_json::{Value, json};

use crate::support::config_json::{TYPES, base, good, names, read, refused};

#[test]
fn no_family_loads_with_a_field_it_does_not_implement() {
    let everywhere = [
        ("rope_interleaved", json!(true), json!(false)),
        ("partial_rotary_factor", json!(0.5), json!(1)),
        ("rotary_dim", json!(8), Value::Null),
        ("no_rope_layers", json!([1, 1, 0]), Value::Null),
        ("no_rope_layer_interval", json!(4), Value::Null),
        ("use_bidirectional_attention", json!(true), json!(false)),
        ("is_causal", json!(false), json!(true)),
        ("attention_chunk_size", json!(8192), Value::Null),
        (
            "dual_chunk_attention_config",
            json!({ "chunk_size": 8 }),
            Value::Null,
        ),
        ("is_encoder_decoder", json!(true), json!(false)),
        ("use_qk_norm", json!(true), json!(false)),
        ("clip_qkv", json!(8.0), Value::Null),
        ("logit_scale", json!(0.0625), json!(1.0)),
        ("logits_scaling", json!(8), json!(1)),
        ("residual_multiplier", json!(0.22), json!(1.0)),
        ("embedding_multiplier", json!(12), json!(1)),
        ("attention_multiplier", json!(0.015), json!(1.0)),
        ("num_experts", json!(8), json!(0)),
        ("num_local_experts", json!(8), Value::Null),
        ("quantization_config", json!({ "bits": 4 }), Value::Null),
    ];
    for model_type in TYPES {
        for (field, bad, neutral) in &everywhere {
            let error = refused(model_type, &json!({ *field: bad }));
            names(&error, field, &bad.to_string());
            assert!(matches!(error, LoadError::Unsupported { .. }), "{error}");
            good(model_type, &json!({ *field: neutral }));
            good(model_type, &json!({ *field: null }));
        }
    }
    let mut wrapper = base("gemma3");
    wrapper["quantization_config"] = json!({ "bits": 4 });
    names(
        &read(&wrapper).expect_err("a quantised model"),
        "quantization_config",
        r#"{"bits":4}"#,
    );
    good(
        "llama",
        &json!({ "use_cache": true, "a_field_of_tomorrow": [1] }),
    );
}

#[test]
fn a_field_of_another_family_is_refused() {
    let cases: [(&[&str], &str, Value); 12] = [
        (
            &["llama", "qwen2", "qwen3"],
            "query_pre_attn_scalar",
            json!(256),
        ),
        (
            &["llama", "qwen2", "qwen3"],
            "attn_logit_softcapping",
            json!(50.0),
        ),
        (
            &["llama", "qwen2", "qwen3"],
            "final_logit_softcapping",
            json!(30.0),
        ),
        (
            &["llama", "qwen2", "qwen3"],
            "rope_local_base_freq",
            json!(1e4),
        ),
        (
            &["llama", "qwen2", "qwen3"],
            "hidden_activation",
            json!("silu"),
        ),
        (
            &["qwen2", "qwen3", "gemma3_text", "gemma3"],
            "mlp_bias",
            json!(true),
        ),
        (&["llama"], "sliding_window", json!(4096)),
        (&["llama"], "use_sliding_window", json!(true)),
        (&["llama"], "sliding_window_pattern", json!(2)),
        (
            &["gemma3_text", "gemma3"],
            "use_sliding_window",
            json!(false),
        ),
        (&TYPES[..3], "hidden_act", json!("gelu")),
        (
            &["gemma3_text", "gemma3"],
            "hidden_activation",
            json!("silu"),
        ),
    ];
    for (families, field, bad) in cases {
        for family in families {
            let error = refused(family, &json!({ field: bad }));
            names(&error, field, bad.as_str().unwrap_or(&bad.to_string()));
        }
    }
    for name in ["gelu", "gelu_pytorch_tanh"] {
        good("gemma3_text", &json!({ "hidden_activation": name }));
    }
}

#[test]
fn other_model_types_are_refused_with_the_supported_ones() {
    for found in [
        json!("smollm3"),
        json!("qwen3_moe"),
        json!("qwen2_vl"),
        json!("gemma2"),
        json!("gemma3n"),
        json!(7),
        Value::Null,
    ] {
        let mut json = base("llama");
        json["model_type"] = found.clone();
        let error = read(&json).expect_err("another family");
        let LoadError::ModelType { found: shown, .. } = &error else {
            panic!("{error}")
        };
        assert!(shown.is_some() || found.is_null());
        assert!(
            TYPES.iter().all(|name| error.to_string().contains(name)),
            "{error}"
        );
    }
    let inner = refused("gemma3", &json!({ "model_type": "gemma2" }));
    names(&inner, "model_type", "gemma2");
    let error = read(&json!({ "model_type": "gemma3" })).expect_err("an empty wrapper");
    assert!(
        matches!(&error, LoadError::MissingField { field, .. } if field == "text_config"),
        "{error}"
    );
}

#[test]
fn values_of_another_kind_name_their_field() {
    for (field, bad) in [
        ("hidden_size", json!("wide")),
        ("hidden_size", json!(-64)),
        ("num_key_value_heads", json!(2.5)),
        ("rms_norm_eps", json!("small")),
        ("attention_bias", json!(1)),
        ("tie_word_embeddings", json!("yes")),
        ("layer_types", json!("full_attention")),
        ("rope_theta", json!([1e4])),
        ("rope_scaling", json!("yarn")),
    ] {
        for model_type in TYPES {
            let error = refused(model_type, &json!({ field: bad }));
            names(&error, field, bad.as_str().unwrap_or(&bad.to_string()));
            assert!(matches!(error, LoadError::InvalidField { .. }), "{error}");
        }
    }
    for field in [
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "query_pre_attn_scalar",
    ] {
        for bad in [0.0, -30.0] {
            let error = refused("gemma3_text", &json!({ field: bad }));
            names(&error, field, &json!(bad).to_string());
        }
        good("gemma3_text", &json!({ field: null }));
    }
    let missing = refused("llama", &json!({ "num_attention_heads": null }));
    assert!(
        matches!(&missing, LoadError::MissingField { field, .. } if field == "num_attention_heads"),
        "{missing}"
    );
    names(
        &refused("llama", &json!({ "num_hidden_layers": 1001 })),
        "num_hidden_layers",
        "1001",
    );
}
