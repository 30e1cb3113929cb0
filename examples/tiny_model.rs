//! Makes the small built-in model in `examples/tiny`: a Llama with random weights over bytes.
//! `cargo run --example tiny_model` writes the same files every time.

#[path = "common/mod.rs"]
#[allow(dead_code, reason = "only the folder's name is wanted here")]
mod common;

use std::{collections::BTreeMap, fs, path::Path};

use anyhow::{Result, anyhow};
use burn::tensor::bf16;
use kv_direct::model::DecoderConfig;
use safetensors::{Dtype, serialize, tensor::TensorView};
use serde_json::json;
use tokenizers::{
    Tokenizer,
    models::bpe::{BPE, Vocab},
    pre_tokenizers::byte_level::ByteLevel,
};

fn main() -> Result<()> {
    let dir = Path::new(common::BUILT_IN);
    fs::create_dir_all(dir)?;
    let config = json!({
        "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 160,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": true, "eos_token_id": null,
    });
    fs::write(
        dir.join("config.json"),
        serde_json::to_string_pretty(&config)? + "\n",
    )?;

    let template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}\
                    {% if add_generation_prompt %}assistant: {% endif %}";
    let chat = json!({ "chat_template": template });
    fs::write(
        dir.join("tokenizer_config.json"),
        serde_json::to_string_pretty(&chat)? + "\n",
    )?;

    let mut shape = DecoderConfig::new(256, 64, 4, 4, 2);
    (shape.intermediate, shape.tied_head) = (160, true);
    let mut noise = Noise(7);
    let mut tensors = BTreeMap::new();
    for (neutral, shape) in shape.weights()? {
        // Attention is made sharp, so that it matters which entries a cache holds.
        let (middle, spread) = match &shape[..] {
            [_] => (1.0, 0.2),
            [_, _] if neutral == "embedding" => (0.0, 1.0),
            [_, width] if neutral.ends_with("query") || neutral.ends_with("key") => {
                (0.0, 4.0 / (*width as f32).sqrt())
            }
            [_, width] => (0.0, 2.0 / (*width as f32).sqrt()),
            _ => unreachable!("weights are vectors and matrices"),
        };
        let weights = (0..shape.iter().product())
            .flat_map(|_| bf16::from_f32(middle + spread * noise.next()).to_le_bytes());
        let weights: Vec<u8> = weights.collect();
        tensors.insert(name(&neutral), (shape, weights));
    }
    let views: Vec<_> = tensors
        .iter()
        .map(|(name, (shape, data))| Ok((name, TensorView::new(Dtype::BF16, shape.clone(), data)?)))
        .collect::<Result<_>>()?;
    fs::write(dir.join("model.safetensors"), serialize(views, None)?)?;

    let mut alphabet: Vec<char> = ByteLevel::alphabet().into_iter().collect();
    alphabet.sort_unstable();
    let vocab = alphabet
        .into_iter()
        .zip(0..)
        .map(|(byte, id)| (byte.to_string(), id));
    let model = BPE::builder()
        .vocab_and_merges(vocab.collect::<Vocab>(), vec![])
        .build();
    let mut tokenizer = Tokenizer::new(model.map_err(|error| anyhow!(error))?);
    let bytes = ByteLevel::new(false, true, false);
    tokenizer
        .with_pre_tokenizer(Some(bytes))
        .with_decoder(Some(bytes));
    tokenizer
        .save(dir.join("tokenizer.json"), false)
        .map_err(|error| anyhow!(error))
}

/// The Llama family's name of a weight.
fn name(neutral: &str) -> String {
    let own = [
        ("embedding", "model.embed_tokens"),
        ("final_norm", "model.norm"),
        ("attention_norm", "input_layernorm"),
        ("feed_forward_norm", "post_attention_layernorm"),
        ("query", "self_attn.q_proj"),
        ("key", "self_attn.k_proj"),
        ("value", "self_attn.v_proj"),
        ("output", "self_attn.o_proj"),
        ("gate", "mlp.gate_proj"),
        ("up", "mlp.up_proj"),
        ("down", "mlp.down_proj"),
    ];
    let (prefix, last) = neutral
        .rsplit_once('.')
        .map_or((String::new(), neutral), |(layer, last)| {
            (format!("model.{layer}."), last)
        });
    let own = own
        .iter()
        .find(|(ours, _)| *ours == last)
        .map_or(last, |(_, theirs)| theirs);
    format!("{prefix}{own}.weight")
}

/// Uniform in -1 .. 1, by xorshift.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> f32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}
