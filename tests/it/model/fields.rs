//! Every field of a configuration that changes the maths changes the logits as in the f64 reference.

use std::num::NonZeroUsize;

use kv_direct::model::{Activation, DecoderConfig, RopeScaling};

use crate::support::{
    feed::{apart, whole},
    models::{CHANGED, LENGTH, LLAMA3, TOLERANCE, YARN, config, scaled},
    random::{decoder, tokens, weights},
    reference::{Reference, Weights},
};

type Flip = (&'static str, fn(&mut DecoderConfig));

/// Every field that changes the maths, flipped in one place.
const FLIPS: [Flip; 19] = [
    ("norm_epsilon", |c| c.norm_epsilon = 1e-2),
    ("norm_plus_one", |c| c.norm_plus_one = false),
    ("post_norms", |c| c.post_norms = true),
    ("qk_norm", |c| c.qk_norm = true),
    ("qkv_bias", |c| c.qkv_bias = true),
    ("output_bias", |c| c.output_bias = true),
    ("mlp_bias", |c| c.mlp_bias = true),
    ("query_scale", |c| c.query_scale *= 1.25),
    ("attention_softcap", |c| c.attention_softcap = Some(2.0)),
    ("final_softcap", |c| c.final_softcap = Some(3.0)),
    ("embedding_scale", |c| c.embedding_scale = Some(8.0)),
    ("tied_head", |c| c.tied_head = true),
    ("activation", |c| c.activation = Activation::GeluTanh),
    ("a window more", |c| {
        c.layers[2].window = NonZeroUsize::new(6)
    }),
    ("a window less", |c| c.layers[1].window = None),
    ("a wider window", |c| {
        c.layers[1].window = NonZeroUsize::new(7)
    }),
    ("theta of the first layer", |c| {
        c.layers[0].rope.theta = 100.0
    }),
    ("theta of the last layer", |c| {
        c.layers[2].rope.theta = 100.0
    }),
    ("scaling of one layer", |c| {
        c.layers[1].rope.scaling = RopeScaling::Linear { factor: 2.0 };
    }),
];

/// The decoder's logits, after comparing them with the reference's.
fn agreed(config: &DecoderConfig, weights: &Weights, tokens: &[u32]) -> Vec<f32> {
    let logits = whole(&decoder(config, weights), tokens);
    let expected = Reference::new(config, weights).logits(tokens);
    let delta = apart(&logits, expected.into_iter().flatten());
    assert!(delta <= TOLERANCE, "logits are {delta:e} off: {config:?}");
    logits
}

fn between(ours: &[f32], others: &[f32]) -> f64 {
    apart(ours, others.iter().copied().map(f64::from))
}

#[test]
fn every_flip_changes_the_logits_as_the_reference_does() {
    let mut base = config(4, 2);
    base.norm_plus_one = true;
    base.layers[1].window = NonZeroUsize::new(6);
    let mut all = base.clone();
    (all.post_norms, all.qk_norm, all.qkv_bias) = (true, true, true);
    (all.output_bias, all.mlp_bias) = (true, true);
    let (weights, tokens) = (weights(&all), tokens(2, 24));
    let plain = agreed(&base, &weights, &tokens);
    for (field, flip) in FLIPS {
        let mut config = base.clone();
        flip(&mut config);
        let moved = between(&agreed(&config, &weights, &tokens), &plain);
        assert!(moved > CHANGED, "{field} moves logits by {moved:e} only");
    }
}

#[test]
fn every_number_of_a_rope_scaling_changes_the_logits() {
    let llama3 = |factor, low, high, original| RopeScaling::Llama3 {
        factor,
        low,
        high,
        original,
    };
    let yarn = |factor, fast, slow, original, attention| RopeScaling::Yarn {
        factor,
        fast,
        slow,
        original,
        attention,
    };
    let schemes = [
        vec![
            RopeScaling::None,
            RopeScaling::Linear { factor: 2.0 },
            RopeScaling::Linear { factor: 4.0 },
        ],
        vec![
            LLAMA3,
            llama3(4.0, 1.0, 4.0, 64.0),
            llama3(8.0, 2.0, 4.0, 64.0),
            llama3(8.0, 1.0, 8.0, 64.0),
            llama3(8.0, 1.0, 4.0, 32.0),
            RopeScaling::None,
        ],
        vec![
            YARN,
            yarn(2.0, 4.0, 1.0, 64.0, 1.14),
            yarn(4.0, 1.5, 1.0, 64.0, 1.14),
            yarn(4.0, 4.0, 0.25, 64.0, 1.14),
            yarn(4.0, 4.0, 1.0, 16.0, 1.14),
            yarn(4.0, 4.0, 1.0, 64.0, 1.0),
            RopeScaling::None,
        ],
    ];
    let (weights, tokens) = (weights(&config(4, 2)), tokens(3, LENGTH));
    let logits = |scaling| agreed(&scaled(scaling), &weights, &tokens);
    for scheme in schemes {
        let first = logits(scheme[0]);
        for &other in &scheme[1..] {
            let moved = between(&logits(other), &first);
            assert!(moved > CHANGED, "{other:?} moves logits by {moved:e} only");
        }
    }
}
