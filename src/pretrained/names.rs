//! The names of tensors in Hugging Face's files for the neutral names of `DecoderConfig::weights`.

use super::weights::Weights;

/// How a folder names its tensors.
pub(super) struct Names {
    /// Prefix of every name except that of the head.
    prefix: &'static str,
    pub(super) head: &'static str,
    /// Whether blocks have four norms. Then `post_attention_layernorm` follows attention. In blocks with two norms it
    /// precedes the feed-forward layer.
    post_norms: bool,
}

/// The prefix of the text model in a wrapper, and the name of its head, in two versions of the files.
const WITHIN: [(&str, &str); 2] = [
    ("language_model.model.", "language_model.lm_head.weight"),
    ("model.language_model.", "lm_head.weight"),
];

/// The prefixes of a wrapper's other tensors, which process images and are not read.
const IMAGES: [&str; 4] = [
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
];

impl Names {
    pub(super) const fn plain(post_norms: bool) -> Self {
        Self {
            prefix: "model.",
            head: "lm_head.weight",
            post_norms,
        }
    }

    /// The names of a text model in a wrapper: those of the version that `weights` has.
    pub(super) fn wrapped(post_norms: bool, weights: &Weights) -> Self {
        let stored = |prefix: &str| weights.contains(&format!("{prefix}embed_tokens.weight"));
        let found = WITHIN.iter().find(|(prefix, _)| stored(prefix));
        let (prefix, head) = *found.unwrap_or(&WITHIN[0]);
        let heads = [head, "lm_head.weight"];
        let head = heads.into_iter().find(|name| weights.contains(name));
        Self {
            prefix,
            head: head.unwrap_or(heads[0]),
            post_norms,
        }
    }

    /// Whether a tensor that the model does not need may be stored.
    pub(super) fn ignored(&self, name: &str) -> bool {
        let wrapped = self.prefix != "model.";
        name == self.head
            || name.ends_with("rotary_emb.inv_freq")
            || wrapped && IMAGES.iter().any(|images| name.starts_with(images))
    }

    /// The name in the files for a neutral name.
    pub(super) fn tensor(&self, neutral: &str) -> String {
        if neutral == "head" {
            return self.head.into();
        }
        let (layer, name) = match neutral
            .strip_prefix("layers.")
            .and_then(|rest| rest.split_once('.'))
        {
            Some((layer, name)) => (format!("layers.{layer}."), name),
            None => (String::new(), neutral),
        };
        let (name, kind) = name
            .strip_suffix(".bias")
            .map_or((name, "weight"), |name| (name, "bias"));
        let own = match name {
            "embedding" => "embed_tokens",
            "final_norm" => "norm",
            "attention_norm" => "input_layernorm",
            "feed_forward_norm" if self.post_norms => "pre_feedforward_layernorm",
            "feed_forward_norm" | "post_attention_norm" => "post_attention_layernorm",
            "post_feed_forward_norm" => "post_feedforward_layernorm",
            "query" => "self_attn.q_proj",
            "key" => "self_attn.k_proj",
            "value" => "self_attn.v_proj",
            "output" => "self_attn.o_proj",
            "query_norm" => "self_attn.q_norm",
            "key_norm" => "self_attn.k_norm",
            "gate" => "mlp.gate_proj",
            "up" => "mlp.up_proj",
            "down" => "mlp.down_proj",
            other => other,
        };
        format!("{}{layer}{own}.{kind}", self.prefix)
    }
}
