//! The configuration of a decoder as named fields, for its fingerprint.

use super::{
    DecoderConfig, LayerConfig,
    rope::{RopeConfig, RopeScaling},
};
use crate::{exact::Activation, fields::Fields};

impl DecoderConfig {
    /// Every field. A field that is `None` is left out.
    pub(super) fn fields(&self) -> Fields {
        // Every field is named, so that a new one is not forgotten.
        let Self {
            vocab,
            hidden,
            intermediate,
            heads,
            kv_heads,
            head_dim,
            max_positions,
            layers,
            norm_epsilon,
            norm_plus_one,
            post_norms,
            qk_norm,
            qkv_bias,
            output_bias,
            mlp_bias,
            query_scale,
            attention_softcap,
            final_softcap,
            embedding_scale,
            tied_head,
            activation,
        } = self;
        let mut fields = Fields::new();
        let mut add = |name: &str, value: &dyn ToString| {
            fields.insert(name.into(), value.to_string());
        };
        add("vocab", vocab);
        add("hidden", hidden);
        add("intermediate", intermediate);
        add("heads", heads);
        add("kv_heads", kv_heads);
        add("head_dim", head_dim);
        add("max_positions", max_positions);
        add("layers", &layers.len());
        add("norm_epsilon", norm_epsilon);
        add("norm_plus_one", norm_plus_one);
        add("post_norms", post_norms);
        add("qk_norm", qk_norm);
        add("qkv_bias", qkv_bias);
        add("output_bias", output_bias);
        add("mlp_bias", mlp_bias);
        add("query_scale", query_scale);
        add("tied_head", tied_head);
        add("activation", &activation_word(*activation));
        let factors = [
            ("attention_softcap", attention_softcap),
            ("final_softcap", final_softcap),
            ("embedding_scale", embedding_scale),
        ];
        for (name, factor) in factors {
            if let Some(factor) = factor {
                add(name, factor);
            }
        }
        for (index, layer) in layers.iter().enumerate() {
            layer.add_fields(&mut |name, value| add(&format!("layers.{index}.{name}"), value));
        }
        fields
    }
}

impl LayerConfig {
    fn add_fields(&self, add: &mut dyn FnMut(&str, &dyn ToString)) {
        let Self { window, rope } = self;
        let RopeConfig { theta, scaling } = rope;
        if let Some(window) = window {
            add("window", window);
        }
        add("rope.theta", theta);
        match scaling {
            RopeScaling::None => {}
            RopeScaling::Linear { factor } => {
                add("rope.scaling", &"linear");
                add("rope.factor", factor);
            }
            RopeScaling::Llama3 {
                factor,
                low,
                high,
                original,
            } => {
                add("rope.scaling", &"llama3");
                add("rope.factor", factor);
                add("rope.low", low);
                add("rope.high", high);
                add("rope.original", original);
            }
            RopeScaling::Yarn {
                factor,
                fast,
                slow,
                original,
                attention,
            } => {
                add("rope.scaling", &"yarn");
                add("rope.factor", factor);
                add("rope.fast", fast);
                add("rope.slow", slow);
                add("rope.original", original);
                add("rope.attention", attention);
            }
        }
    }
}

const fn activation_word(activation: Activation) -> &'static str {
    match activation {
        Activation::Silu => "silu",
        Activation::GeluTanh => "gelu_tanh",
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use super::*;

    /// These texts are hashed into the fingerprints in files: they never change.
    #[test]
    fn the_texts_are_those_of_all_files() {
        let mut config = DecoderConfig::new(97, 64, 2, 4, 2);
        config.final_softcap = Some(30.0);
        config.activation = Activation::GeluTanh;
        config.layers[1].window = NonZeroUsize::new(5);
        config.layers[1].rope.scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low: 1.0,
            high: 4.0,
            original: 8192.0,
        };
        let expected = [
            ("activation", "gelu_tanh"),
            ("final_softcap", "30"),
            ("head_dim", "16"),
            ("heads", "4"),
            ("hidden", "64"),
            ("intermediate", "256"),
            ("kv_heads", "2"),
            ("layers", "2"),
            ("layers.0.rope.theta", "10000"),
            ("layers.1.rope.factor", "8"),
            ("layers.1.rope.high", "4"),
            ("layers.1.rope.low", "1"),
            ("layers.1.rope.original", "8192"),
            ("layers.1.rope.scaling", "llama3"),
            ("layers.1.rope.theta", "10000"),
            ("layers.1.window", "5"),
            ("max_positions", "2048"),
            ("mlp_bias", "false"),
            ("norm_epsilon", "0.00001"),
            ("norm_plus_one", "false"),
            ("output_bias", "false"),
            ("post_norms", "false"),
            ("qk_norm", "false"),
            ("qkv_bias", "false"),
            ("query_scale", "0.25"),
            ("tied_head", "false"),
            ("vocab", "97"),
        ];
        let fields = config.fields();
        let found = fields.iter().map(|(name, value)| (&name[..], &value[..]));
        assert_eq!(found.collect::<Vec<_>>(), expected);
    }
}
