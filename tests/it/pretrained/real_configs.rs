//! `config.json` of real models, each with the whole configuration it must give.

use std::num::NonZeroUsize;

use kv_direct::{
    model::{
        Activation, DecoderConfig, LayerConfig, RopeConfig, RopeScaling, yarn_attention_factor,
    },
    pretrained::config,
};
use serde_json::{Value, json};

use crate::support::{folder::Folder, models::llama3};

#[track_caller]
fn assert_gives(test: &str, json: &Value, expected: &DecoderConfig) {
    let folder = Folder::empty(test);
    folder.write("config.json", json);
    assert_eq!(&config(&folder.0).expect("a real configuration"), expected);
}

/// `sizes`: vocabulary, residual stream, feed-forward layer, layers, heads, KV heads, width of a head,
/// positions.
fn decoder(sizes: [usize; 8], epsilon: f64, rope: RopeConfig) -> DecoderConfig {
    let [
        vocab,
        hidden,
        inner,
        layers,
        heads,
        kv_heads,
        head_dim,
        positions,
    ] = sizes;
    let mut config = DecoderConfig::new(vocab, hidden, layers, heads, kv_heads);
    config.intermediate = inner;
    config.head_dim = head_dim;
    config.query_scale = 1.0 / (head_dim as f64).sqrt();
    config.max_positions = positions;
    config.norm_epsilon = epsilon;
    config.layers = vec![LayerConfig::full(rope); layers];
    config
}

/// Gemma 3: every sixth layer is a full-attention layer; `embedding` is the rounded root of `hidden`.
fn gemma(sizes: [usize; 8], window: usize, scaling: RopeScaling, embedding: f64) -> DecoderConfig {
    let mut config = decoder(sizes, 1e-6, RopeConfig::new(1e6).with_scaling(scaling));
    for (index, layer) in config.layers.iter_mut().enumerate() {
        if index % 6 != 5 {
            layer.window = NonZeroUsize::new(window);
            layer.rope = RopeConfig::new(1e4);
        }
    }
    (config.norm_plus_one, config.post_norms, config.qk_norm) = (true, true, true);
    config.activation = Activation::GeluTanh;
    config.query_scale = 1.0 / 16.0;
    config.embedding_scale = Some(embedding);
    config.tied_head = true;
    config
}

#[test]
fn llama_3_is_read_whole() {
    let scaling = |factor: f64| {
        json!({ "factor": factor, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3" })
    };
    let small = json!({ "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": 128000, "eos_token_id": 128001, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072,
        "mlp_bias": false, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16,
        "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-5, "rope_scaling": scaling(32.0),
        "rope_theta": 500000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16", "use_cache": true,
        "vocab_size": 128256 });
    let rope = |factor| RopeConfig::new(5e5).with_scaling(llama3(factor));
    let sizes = [128_256, 2048, 8192, 16, 32, 8, 64, 131_072];
    let mut expected = decoder(sizes, 1e-5, rope(32.0));
    expected.tied_head = true;
    assert_gives("llama-3.2-1b", &small, &expected);

    let large = json!({ "architectures": ["LlamaForCausalLM"], "attention_bias": false, "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
        "rms_norm_eps": 1e-5, "rope_scaling": scaling(8.0), "rope_theta": 500000.0,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16", "vocab_size": 128256 });
    let sizes = [128_256, 4096, 14_336, 32, 32, 8, 128, 131_072];
    assert_gives("llama-3.1-8b", &large, &decoder(sizes, 1e-5, rope(8.0)));
}

#[test]
fn llama_2_and_its_relatives_are_read_whole() {
    let llama2 = json!({ "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008,
        "max_position_embeddings": 4096, "model_type": "llama", "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 32, "pretraining_tp": 1, "rms_norm_eps": 1e-5,
        "rope_scaling": null, "tie_word_embeddings": false, "torch_dtype": "float16", "vocab_size": 32000 });
    let sizes = [32_000, 4096, 11_008, 32, 32, 32, 128, 4096];
    let expected = decoder(sizes, 1e-5, RopeConfig::new(1e4));
    assert_gives("llama-2-7b", &llama2, &expected);

    let tiny = json!({ "architectures": ["LlamaForCausalLM"], "attention_bias": false, "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5632,
        "max_position_embeddings": 2048, "model_type": "llama", "num_attention_heads": 32,
        "num_hidden_layers": 22, "num_key_value_heads": 4, "pretraining_tp": 1, "rms_norm_eps": 1e-5,
        "rope_scaling": null, "rope_theta": 10000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
        "vocab_size": 32000 });
    let sizes = [32_000, 2048, 5632, 22, 32, 4, 64, 2048];
    assert_gives(
        "tinyllama-1.1b",
        &tiny,
        &decoder(sizes, 1e-5, RopeConfig::new(1e4)),
    );

    let smol = json!({ "architectures": ["LlamaForCausalLM"], "attention_bias": false, "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
        "intermediate_size": 1536, "is_llama_config": true, "max_position_embeddings": 8192, "mlp_bias": false,
        "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
        "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-5, "rope_interleaved": false,
        "rope_scaling": null, "rope_theta": 100000, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
        "use_cache": true, "vocab_size": 49152 });
    let sizes = [49_152, 576, 1536, 30, 9, 3, 64, 8192];
    let mut expected = decoder(sizes, 1e-5, RopeConfig::new(1e5));
    expected.tied_head = true;
    assert_gives("smollm2-135m", &smol, &expected);
}

#[test]
fn qwen_2_5_and_3_are_read_whole() {
    let qwen2 = json!({ "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
        "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24,
        "model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": true,
        "torch_dtype": "bfloat16", "use_mrope": false, "use_sliding_window": false, "vocab_size": 151936 });
    let sizes = [151_936, 896, 4864, 24, 14, 2, 64, 32_768];
    let mut expected = decoder(sizes, 1e-6, RopeConfig::new(1e6));
    (expected.qkv_bias, expected.tied_head) = (true, true);
    assert_gives("qwen2.5-0.5b", &qwen2, &expected);

    // The model card gives this for texts beyond 32,768 tokens.
    let mut long = qwen2;
    long["rope_scaling"] =
        json!({ "factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn" });
    expected.max_positions = 131_072;
    for layer in &mut expected.layers {
        layer.rope.scaling = RopeScaling::Yarn {
            factor: 4.0,
            fast: 32.0,
            slow: 1.0,
            original: 32_768.0,
            attention: yarn_attention_factor(4.0),
        };
    }
    assert_gives("qwen2.5-0.5b-long", &long, &expected);

    let qwen3 = json!({ "architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3072,
        "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
        "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-6,
        "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null, "tie_word_embeddings": true,
        "torch_dtype": "bfloat16", "use_cache": true, "use_sliding_window": false, "vocab_size": 151936 });
    let sizes = [151_936, 1024, 3072, 28, 16, 8, 128, 40_960];
    let mut expected = decoder(sizes, 1e-6, RopeConfig::new(1e6));
    (expected.qk_norm, expected.tied_head) = (true, true);
    assert_gives("qwen3-0.6b", &qwen3, &expected);
    let mut without_width = qwen3;
    without_width["head_dim"] = Value::Null;
    assert_gives("qwen3-0.6b-without-width", &without_width, &expected);
}

#[test]
fn gemma_3_text_is_read_whole() {
    let kinds: Vec<&str> = (0..18)
        .map(|layer| {
            if layer % 6 == 5 {
                "full_attention"
            } else {
                "sliding_attention"
            }
        })
        .collect();
    let smallest = json!({ "_sliding_window_pattern": 6, "architectures": ["Gemma3ForCausalLM"],
        "attention_bias": false, "attention_dropout": 0.0, "attn_logit_softcapping": null, "bos_token_id": 2,
        "eos_token_id": 1, "final_logit_softcapping": null, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 640, "initializer_range": 0.02,
        "intermediate_size": 2048, "layer_types": kinds, "max_position_embeddings": 32768,
        "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 18,
        "num_key_value_heads": 1, "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000.0, "rope_scaling": null, "rope_theta": 1000000.0, "sliding_window": 512,
        "torch_dtype": "bfloat16", "use_bidirectional_attention": false, "use_cache": true,
        "vocab_size": 262144 });
    let sizes = [262_144, 640, 2048, 18, 4, 1, 256, 32_768];
    let expected = gemma(sizes, 512, RopeScaling::None, 25.25);
    assert_gives("gemma-3-270m", &smallest, &expected);

    let small = json!({ "architectures": ["Gemma3ForCausalLM"], "attention_bias": false,
        "attention_dropout": 0.0, "attn_logit_softcapping": null, "bos_token_id": 2,
        "cache_implementation": "hybrid", "eos_token_id": [1, 106], "final_logit_softcapping": null,
        "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152,
        "initializer_range": 0.02, "intermediate_size": 6912, "max_position_embeddings": 32768,
        "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26,
        "num_key_value_heads": 1, "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000, "rope_scaling": null, "rope_theta": 1000000, "sliding_window": 512,
        "sliding_window_pattern": 6, "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 262144 });
    let sizes = [262_144, 1152, 6912, 26, 4, 1, 256, 32_768];
    let expected = gemma(sizes, 512, RopeScaling::None, 34.0);
    assert_gives("gemma-3-1b", &small, &expected);
}

#[test]
fn gemma_3_is_read_whole_from_its_wrapper() {
    let wrapper = |text: Value| {
        json!({ "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999,
            "eoi_token_index": 256000, "eos_token_id": [1, 106], "image_token_index": 262144,
            "initializer_range": 0.02, "mm_tokens_per_image": 256, "model_type": "gemma3", "text_config": text,
            "torch_dtype": "bfloat16", "vision_config": { "hidden_size": 1152, "image_size": 896,
                "intermediate_size": 4304, "model_type": "siglip_vision_model", "num_attention_heads": 16,
                "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": false } })
    };
    let linear = RopeScaling::Linear { factor: 8.0 };
    let text = json!({ "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
        "num_hidden_layers": 34, "rope_scaling": { "factor": 8.0, "rope_type": "linear" },
        "sliding_window": 1024 });
    let sizes = [262_208, 2560, 10_240, 34, 8, 4, 256, 131_072];
    let expected = gemma(sizes, 1024, linear, 50.5);
    assert_gives("gemma-3-4b", &wrapper(text), &expected);

    let text = json!({ "head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504,
        "model_type": "gemma3_text", "num_attention_heads": 32, "num_hidden_layers": 62,
        "num_key_value_heads": 16, "query_pre_attn_scalar": 168,
        "rope_scaling": { "factor": 8.0, "rope_type": "linear" }, "sliding_window": 1024 });
    let sizes = [262_208, 5376, 21_504, 62, 32, 16, 128, 131_072];
    let mut expected = gemma(sizes, 1024, linear, 73.5);
    expected.query_scale = 1.0 / 168f64.sqrt();
    assert_gives("gemma-3-27b", &wrapper(text), &expected);
}

#[test]
fn gemma_scales_the_embedding_by_the_rounded_root_of_its_width() {
    let folder = Folder::empty("roots");
    let scale = |width: usize, dtype: &str| {
        folder.write(
            "config.json",
            &json!({ "model_type": "gemma3_text", "hidden_size": width, "dtype": dtype }),
        );
        let config = config(&folder.0).expect("a good configuration");
        config.embedding_scale.expect("Gemma has one")
    };
    let rounded = [
        (640, 25.25),
        (1152, 34.0),
        (2560, 50.5),
        (3072, 55.5),
        (3840, 62.0),
        (5376, 73.5),
    ];
    for (width, expected) in rounded {
        assert_eq!(scale(width, "bfloat16"), expected);
        let exact = (width as f64).sqrt();
        assert_eq!(scale(width, "float32"), f64::from(exact as f32));
        let half = scale(width, "float16");
        assert!(half != exact && (half / exact - 1.0).abs() < 1.0 / 2048.0);
    }
}
