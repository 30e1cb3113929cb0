//! Folders with random weights against the f64 reference, whose configuration is written by hand.
//! The loader must give the formulas the same fields and tensors.

use std::num::NonZeroUsize;

use kv_direct::model::{Activation, DecoderConfig, RopeConfig, RopeScaling};
use serde_json::{Value, json};

use crate::support::{
    feed::{apart, whole},
    folder::{Folder, ONE},
    models::{self, LENGTH, TOLERANCE},
    random::{VOCAB, tokens, weights},
    reference::Reference,
};

/// Loads `json` with the weights `by_hand` needs, and compares its logits with the reference's.
#[track_caller]
fn assert_agrees(test: &str, json: &Value, by_hand: &DecoderConfig) {
    let weights = weights(by_hand);
    let folder = Folder::made(test, json, by_hand, &weights);
    let model = folder.load().expect("a good folder");
    let tokens = tokens(1, LENGTH);
    let expected = Reference::new(by_hand, &weights).logits(&tokens);
    let found = whole(&model.decoder, &tokens);
    let delta = apart(&found, expected.into_iter().flatten());
    assert!(delta <= TOLERANCE, "{test}: logits are {delta:e} off");
}

fn sizes(model_type: &str) -> Value {
    json!({ "model_type": model_type, "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256, "rope_theta": 1e4, "tie_word_embeddings": false })
}

fn by_hand() -> DecoderConfig {
    let mut config = models::config(4, 2);
    config.max_positions = 256;
    config
}

fn scaled(scaling: RopeScaling) -> DecoderConfig {
    let mut config = models::scaled(scaling);
    config.max_positions = 256;
    config
}

#[test]
fn qwen2_has_qkv_biases_though_no_field_says_so() {
    let mut config = by_hand();
    config.qkv_bias = true;
    assert_agrees("qwen2-bias", &sizes("qwen2"), &config);
}

#[test]
fn attention_bias_of_llama_and_qwen3_is_on_the_output_too() {
    let mut json = sizes("llama");
    json["attention_bias"] = json!(true);
    json["mlp_bias"] = json!(true);
    let mut config = by_hand();
    (config.qkv_bias, config.output_bias, config.mlp_bias) = (true, true, true);
    assert_agrees("llama-bias", &json, &config);

    let mut json = sizes("qwen3");
    json["attention_bias"] = json!(true);
    json["head_dim"] = json!(24);
    let mut config = by_hand();
    (config.qkv_bias, config.output_bias, config.qk_norm) = (true, true, true);
    config.head_dim = 24;
    config.query_scale = 24f64.powf(-0.5);
    assert_agrees("qwen3-bias", &json, &config);
}

#[test]
fn llama3_linear_and_yarn_scalings_equal_the_formulas() {
    let mut json = sizes("llama");
    json["rope_scaling"] = json!({ "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64 });
    let llama3 = RopeScaling::Llama3 {
        factor: 8.0,
        low: 1.0,
        high: 4.0,
        original: 64.0,
    };
    assert_agrees("llama3", &json, &scaled(llama3));

    json["rope_scaling"] = json!({ "type": "linear", "factor": 4.0 });
    assert_agrees(
        "linear",
        &json,
        &scaled(RopeScaling::Linear { factor: 4.0 }),
    );

    let mut json = sizes("qwen2");
    json["rope_scaling"] =
        json!({ "type": "yarn", "beta_fast": 4, "original_max_position_embeddings": 64 });
    let mut config = scaled(RopeScaling::Yarn {
        factor: 4.0,
        fast: 4.0,
        slow: 1.0,
        original: 64.0,
        attention: 0.1 * 4f64.ln() + 1.0,
    });
    config.qkv_bias = true;
    assert_agrees("yarn", &json, &config);
}

/// A Gemma with heads of 24 and a window of 12. Only full-attention layers divide positions by 8.
fn gemma(full: [bool; 3]) -> (Value, DecoderConfig) {
    let kinds = full.map(|full| {
        if full {
            "full_attention"
        } else {
            "sliding_attention"
        }
    });
    let mut json = sizes("gemma3_text");
    for (field, value) in [
        ("head_dim", json!(24)),
        ("layer_types", json!(kinds)),
        ("sliding_window", json!(12)),
        ("rope_local_base_freq", json!(100.0)),
        (
            "rope_scaling",
            json!({ "rope_type": "linear", "factor": 8.0 }),
        ),
        ("query_pre_attn_scalar", json!(16)),
        ("attn_logit_softcapping", json!(2.0)),
        ("final_logit_softcapping", json!(3.0)),
        ("tie_word_embeddings", Value::Null),
    ] {
        json[field] = value;
    }
    let mut config = by_hand();
    config.head_dim = 24;
    config.query_scale = 0.25;
    config.embedding_scale = Some(8.0);
    (config.attention_softcap, config.final_softcap) = (Some(2.0), Some(3.0));
    config.activation = Activation::GeluTanh;
    (config.norm_plus_one, config.post_norms) = (true, true);
    (config.qk_norm, config.tied_head) = (true, true);
    for (layer, full) in config.layers.iter_mut().zip(full) {
        let linear = RopeScaling::Linear { factor: 8.0 };
        if full {
            layer.rope.scaling = linear;
        } else {
            layer.window = NonZeroUsize::new(12);
            layer.rope = RopeConfig::new(100.0);
        }
    }
    (json, config)
}

#[test]
fn gemma_scales_rotation_in_full_attention_layers_only() {
    for full in [[false, true, false], [true, false, true]] {
        let (json, config) = gemma(full);
        assert_agrees(&format!("gemma-{}", full[0]), &json, &config);
    }
}

#[test]
fn qwen_slides_from_max_window_layers_on() {
    let mut json = sizes("qwen3");
    json["head_dim"] = json!(16);
    json["use_sliding_window"] = json!(true);
    (json["sliding_window"], json["max_window_layers"]) = (json!(7), json!(1));
    let mut config = by_hand();
    config.qk_norm = true;
    for layer in &mut config.layers[1..] {
        layer.window = NonZeroUsize::new(7);
    }
    assert_agrees("qwen3-window", &json, &config);
}

#[test]
fn a_wrapped_text_model_equals_the_unwrapped_one() {
    let (mut text, config) = gemma([false, true, false]);
    let weights = weights(&config);
    let plain = Folder::made("unwrapped", &text, &config, &weights);
    let plain = plain.load().expect("a good folder");
    let logits = |model: &kv_direct::model::Decoder| whole(model, &tokens(1, LENGTH));
    let expected = logits(&plain.decoder);
    text["eos_token_id"] = json!(106);
    for (prefix, head, tower) in [
        (
            "language_model.model.",
            "language_model.lm_head.weight",
            "vision_tower.",
        ),
        (
            "model.language_model.",
            "lm_head.weight",
            "model.vision_tower.",
        ),
    ] {
        let folder = Folder::empty("wrapped");
        let json = json!({ "model_type": "gemma3", "text_config": text, "eos_token_id": [1],
            "vision_config": { "model_type": "siglip_vision_model" } });
        folder.write("config.json", &json);
        folder.fill(&config, &weights, prefix);
        let add = |name: &str| {
            folder.weights(|mut all| {
                let more = all[&format!("{prefix}embed_tokens.weight")].clone();
                all.insert(name.into(), more);
                vec![(ONE, all.into_iter().collect())]
            });
        };
        add(&format!("{tower}patch.weight"));
        add(&format!(
            "{}multi_modal_projector.weight",
            &tower[..tower.len() - "vision_tower.".len()]
        ));
        let model = folder.load().expect("vision tensors are skipped");
        assert!(logits(&model.decoder) == expected, "{prefix}");
        assert_eq!(model.eos, [1, 106]);
        // A separate head, stored beside such names.
        folder.config(|json| json["text_config"]["tie_word_embeddings"] = json!(false));
        add(head);
        let untied = folder.load().expect("a head");
        assert!(!untied.decoder.config().tied_head && logits(&untied.decoder) == expected);
        add("audio_tower.weight");
        let error = folder.refused();
        assert!(error.to_string().contains("audio_tower.weight"), "{error}");
    }
}
