//! Every field of `config.json` that changes the maths is flipped once, and changes the logits of what is loaded.

use kv_direct::model::{DecoderConfig, RopeConfig};
use serde_json::{Value, json};

use crate::support::{
    feed::{apart, whole},
    folder::Folder,
    models::{CHANGED, LENGTH},
    random::{VOCAB, tokens, weights},
};

/// A family's fields, and which weights lie in the folder: a flip may need more or fewer.
struct Base {
    json: Value,
    weights: DecoderConfig,
}

impl Base {
    fn new(model_type: &str, more: Value) -> Self {
        let mut json = json!({ "model_type": model_type, "vocab_size": VOCAB, "hidden_size": 64, "head_dim": 16,
            "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
            "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "max_position_embeddings": 256,
            "rope_theta": 1e4, "tie_word_embeddings": false });
        set(&mut json, more);
        let mut weights = DecoderConfig::new(VOCAB, 64, 3, 4, 2);
        weights.intermediate = 96;
        Self { json, weights }
    }

    fn logits(&self, test: &str) -> Vec<f32> {
        let weights = weights(&self.weights);
        let folder = Folder::made(test, &self.json, &self.weights, &weights);
        let model = folder.load();
        let model = model.unwrap_or_else(|error| panic!("{test}: {error}"));
        whole(&model.decoder, &tokens(2, LENGTH))
    }

    /// Each flip, weights included, moves the logits.
    #[track_caller]
    fn assert_moves(&self, flips: &[Flip]) {
        let family = self.json["model_type"].as_str().expect("a type");
        let plain = self.logits(family);
        for (what, fields, weights) in flips {
            let mut flipped = Self {
                json: self.json.clone(),
                weights: self.weights.clone(),
            };
            set(&mut flipped.json, fields.clone());
            weights(&mut flipped.weights);
            let logits = flipped.logits(&format!("{family}-{what}"));
            let moved = apart(&logits, plain.iter().copied().map(f64::from));
            assert!(
                moved > CHANGED,
                "{family}: {what} moves logits by {moved:e} only"
            );
        }
    }
}

/// What is flipped, the fields it sets, and the change of the weights.
type Flip<'a> = (&'a str, Value, fn(&mut DecoderConfig));

/// Sets fields, and those of objects that are fields.
fn set(json: &mut Value, fields: Value) {
    match fields {
        Value::Object(fields) if json.is_object() => {
            for (field, value) in fields {
                set(&mut json[field], value);
            }
        }
        value => *json = value,
    }
}

const SAME: fn(&mut DecoderConfig) = |_| {};

const BIASED: fn(&mut DecoderConfig) = |c| (c.qkv_bias, c.output_bias) = (true, true);

#[test]
fn every_field_of_llama_changes_the_logits() {
    let llama3 = json!({ "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64 });
    Base::new("llama", json!({ "rope_scaling": llama3 })).assert_moves(&[
        ("rope_theta", json!({ "rope_theta": 100.0 }), SAME),
        ("factor", json!({ "rope_scaling": { "factor": 4.0 } }), SAME),
        (
            "low",
            json!({ "rope_scaling": { "low_freq_factor": 2.0 } }),
            SAME,
        ),
        (
            "high",
            json!({ "rope_scaling": { "high_freq_factor": 8.0 } }),
            SAME,
        ),
        (
            "original",
            json!({ "rope_scaling": { "original_max_position_embeddings": 32 } }),
            SAME,
        ),
        (
            "rope_type",
            json!({ "rope_scaling": { "rope_type": "linear" } }),
            SAME,
        ),
        ("rope_scaling", json!({ "rope_scaling": null }), SAME),
        ("rms_norm_eps", json!({ "rms_norm_eps": 1e-2 }), SAME),
        (
            "hidden_act",
            json!({ "hidden_act": "gelu_pytorch_tanh" }),
            SAME,
        ),
        ("attention_bias", json!({ "attention_bias": true }), BIASED),
        ("mlp_bias", json!({ "mlp_bias": true }), |c| {
            c.mlp_bias = true
        }),
        ("tied", json!({ "tie_word_embeddings": true }), SAME),
        (
            "heads",
            json!({ "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32 }),
            SAME,
        ),
        ("kv_heads", json!({ "num_key_value_heads": 4 }), |c| {
            c.kv_heads = 4
        }),
        ("model_type", json!({ "model_type": "qwen2" }), |c| {
            c.qkv_bias = true
        }),
        ("qwen3", json!({ "model_type": "qwen3" }), |c| {
            c.qk_norm = true
        }),
    ]);
    Base::new(
        "llama",
        json!({ "rope_scaling": { "type": "linear", "factor": 2.0 } }),
    )
    .assert_moves(&[
        ("linear", json!({ "rope_scaling": { "factor": 4.0 } }), SAME),
        ("type", json!({ "rope_scaling": { "type": "yarn" } }), SAME),
    ]);
    Base::new("llama", json!({ "rope_parameters": { "rope_theta": 1e4 } })).assert_moves(&[(
        "newer-theta",
        json!({ "rope_theta": null, "rope_parameters": { "rope_theta": 100.0 } }),
        SAME,
    )]);
}

#[test]
fn every_field_of_qwen2_changes_the_logits() {
    let mut base = Base::new(
        "qwen2",
        json!({ "use_sliding_window": true, "sliding_window": 6, "max_window_layers": 1,
            "rope_scaling": { "type": "yarn", "beta_fast": 4, "original_max_position_embeddings": 64 } }),
    );
    base.weights.qkv_bias = true;
    let (full, slide) = ("full_attention", "sliding_attention");
    base.assert_moves(&[
        (
            "use_sliding_window",
            json!({ "use_sliding_window": false }),
            SAME,
        ),
        ("sliding_window", json!({ "sliding_window": 7 }), SAME),
        ("no-window", json!({ "sliding_window": null }), SAME),
        ("max_window_layers", json!({ "max_window_layers": 2 }), SAME),
        (
            "layer_types",
            json!({ "layer_types": [slide, full, slide] }),
            SAME,
        ),
        ("pattern", json!({ "sliding_window_pattern": 2 }), SAME),
        ("attention_bias", json!({ "attention_bias": false }), |c| {
            c.qkv_bias = false
        }),
        ("rope_theta", json!({ "rope_theta": 100.0 }), SAME),
        ("factor", json!({ "rope_scaling": { "factor": 2.0 } }), SAME),
        (
            "beta_fast",
            json!({ "rope_scaling": { "beta_fast": 1.5 } }),
            SAME,
        ),
        (
            "beta_slow",
            json!({ "rope_scaling": { "beta_slow": 0.25 } }),
            SAME,
        ),
        (
            "attention_factor",
            json!({ "rope_scaling": { "attention_factor": 1.0 } }),
            SAME,
        ),
        (
            "original",
            json!({ "rope_scaling": { "original_max_position_embeddings": 16 } }),
            SAME,
        ),
        ("positions", json!({ "max_position_embeddings": 512 }), SAME),
        ("rms_norm_eps", json!({ "rms_norm_eps": 1e-2 }), SAME),
        (
            "hidden_act",
            json!({ "hidden_act": "gelu_pytorch_tanh" }),
            SAME,
        ),
        ("tied", json!({ "tie_word_embeddings": true }), SAME),
    ]);
}

#[test]
fn every_field_of_qwen3_changes_the_logits() {
    let mut base = Base::new(
        "qwen3",
        json!({ "use_sliding_window": true, "sliding_window": 6, "max_window_layers": 1 }),
    );
    base.weights.qk_norm = true;
    base.assert_moves(&[
        (
            "use_sliding_window",
            json!({ "use_sliding_window": false }),
            SAME,
        ),
        ("sliding_window", json!({ "sliding_window": 7 }), SAME),
        ("max_window_layers", json!({ "max_window_layers": 2 }), SAME),
        ("attention_bias", json!({ "attention_bias": true }), BIASED),
        ("head_dim", json!({ "head_dim": 24 }), |c| c.head_dim = 24),
        ("rope_theta", json!({ "rope_theta": 100.0 }), SAME),
        (
            "rope_scaling",
            json!({ "rope_scaling": { "type": "linear", "factor": 2.0 } }),
            SAME,
        ),
        ("rms_norm_eps", json!({ "rms_norm_eps": 1e-2 }), SAME),
        (
            "model_type",
            json!({ "model_type": "llama", "use_sliding_window": false,
            "sliding_window": null }),
            |c| c.qk_norm = false,
        ),
    ]);
}

#[test]
fn every_field_of_gemma3_changes_the_logits() {
    let mut base = Base::new(
        "gemma3_text",
        json!({ "sliding_window": 6, "sliding_window_pattern": 2, "rope_local_base_freq": 50.0,
            "query_pre_attn_scalar": 16, "rope_scaling": { "rope_type": "linear", "factor": 8.0 } }),
    );
    (base.weights.norm_plus_one, base.weights.post_norms) = (true, true);
    base.weights.qk_norm = true;
    base.weights.layers[1].rope = RopeConfig::new(1e4);
    let (full, slide) = ("full_attention", "sliding_attention");
    base.assert_moves(&[
        ("rope_theta", json!({ "rope_theta": 100.0 }), SAME),
        (
            "rope_local_base_freq",
            json!({ "rope_local_base_freq": 1e4 }),
            SAME,
        ),
        ("factor", json!({ "rope_scaling": { "factor": 2.0 } }), SAME),
        ("rope_scaling", json!({ "rope_scaling": null }), SAME),
        ("sliding_window", json!({ "sliding_window": 7 }), SAME),
        ("pattern", json!({ "sliding_window_pattern": 3 }), SAME),
        (
            "older-pattern",
            json!({ "sliding_window_pattern": null, "_sliding_window_pattern": 3 }),
            SAME,
        ),
        (
            "no-pattern",
            json!({ "sliding_window_pattern": null }),
            SAME,
        ),
        (
            "layer_types",
            json!({ "layer_types": [full, slide, full] }),
            SAME,
        ),
        (
            "query_pre_attn_scalar",
            json!({ "query_pre_attn_scalar": 24 }),
            SAME,
        ),
        (
            "class-scalar",
            json!({ "query_pre_attn_scalar": null }),
            SAME,
        ),
        (
            "attn_logit_softcapping",
            json!({ "attn_logit_softcapping": 2.0 }),
            SAME,
        ),
        (
            "final_logit_softcapping",
            json!({ "final_logit_softcapping": 3.0 }),
            SAME,
        ),
        ("attention_bias", json!({ "attention_bias": true }), BIASED),
        ("head_dim", json!({ "head_dim": 24 }), |c| c.head_dim = 24),
        ("rms_norm_eps", json!({ "rms_norm_eps": 1e-2 }), SAME),
        ("tied", json!({ "tie_word_embeddings": null }), SAME),
        (
            "newer-local-theta",
            json!({ "rope_local_base_freq": null,
                "rope_parameters": { "sliding_attention": { "rope_theta": 1e4 } } }),
            SAME,
        ),
        (
            "newer-theta",
            json!({ "rope_theta": null, "rope_scaling": null,
                "rope_parameters": { "full_attention": { "rope_theta": 100.0, "rope_type": "linear",
                    "factor": 8.0 } } }),
            SAME,
        ),
    ]);
}
