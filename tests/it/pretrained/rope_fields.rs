//! Rotary base and scaling from `config.json`, in the older and the newer form.

use kv_direct::{model::RopeScaling, pretrained::LoadError};
use serde_json::{Value, json};

use crate::support::config_json::{TYPES, good, names, refused};

#[test]
fn a_missing_theta_is_refused_unless_the_family_has_one() {
    for family in ["qwen2", "qwen3"] {
        let error = refused(family, &json!({ "rope_theta": null }));
        assert!(
            matches!(&error, LoadError::MissingField { field, .. } if field == "rope_theta"),
            "{error}"
        );
    }
    let full = json!({ "full_attention": { "rope_theta": 1e6 } });
    let mut config = json!({ "rope_theta": null, "rope_parameters": full, "use_sliding_window": true,
        "sliding_window": 8, "max_window_layers": 3 });
    good("qwen3", &config);
    config["max_window_layers"] = json!(2);
    let error = refused("qwen3", &config);
    assert!(
        matches!(&error, LoadError::MissingField { field, .. }
            if field == "rope_parameters.sliding_attention.rope_theta"),
        "{error}"
    );
    let config = good(
        "gemma3_text",
        &json!({ "rope_theta": null, "num_hidden_layers": 6 }),
    );
    assert_eq!(config.layers[5].rope.theta, 1e6);
    assert_eq!(config.layers[0].rope.theta, 1e4);
    let twice = json!({ "rope_parameters": { "rope_theta": 1e4 } });
    for family in TYPES {
        let error = refused(family, &twice);
        names(&error, "rope_parameters.rope_theta", "10000.0");
    }
}

#[test]
fn a_scaling_without_a_type_or_with_unknown_fields_is_refused() {
    let cases = [
        (
            json!({ "rope_type": "longrope", "factor": 4.0 }),
            "rope_type",
            "longrope",
        ),
        (
            json!({ "type": "dynamic", "factor": 4.0 }),
            "type",
            "dynamic",
        ),
        (json!({ "rope_type": "mrope" }), "rope_type", "mrope"),
        (
            json!({ "rope_type": "default", "mrope_section": [8] }),
            "mrope_section",
            "[8]",
        ),
        (
            json!({ "rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5 }),
            "partial_rotary_factor",
            "0.5",
        ),
        (
            json!({ "rope_type": "yarn", "factor": 4.0, "mscale": 0.7 }),
            "mscale",
            "0.7",
        ),
        (
            json!({ "rope_type": "yarn", "factor": 4.0, "mscale_all_dim": 1.0 }),
            "mscale_all_dim",
            "1.0",
        ),
        (
            json!({ "rope_type": "yarn", "factor": 4.0, "truncate": false }),
            "truncate",
            "false",
        ),
        (
            json!({ "rope_type": "yarn", "type": "linear", "factor": 4.0 }),
            "type",
            "linear",
        ),
    ];
    for family in TYPES {
        for outer in ["rope_scaling", "rope_parameters"] {
            for (scaling, field, value) in &cases {
                let error = refused(family, &json!({ outer: scaling }));
                names(&error, &format!("{outer}.{field}"), value);
            }
            for (scaling, missing) in [
                (json!({ "rope_type": "linear" }), "factor"),
                (json!({ "rope_type": "yarn" }), "factor"),
                (json!({ "factor": 2.0 }), "rope_type"),
                (
                    json!({ "rope_type": "llama3", "factor": 8.0 }),
                    "low_freq_factor",
                ),
            ] {
                let error = refused(family, &json!({ outer: scaling }));
                let full = format!("{outer}.{missing}");
                assert!(
                    matches!(&error, LoadError::MissingField { field, .. } if field.ends_with(&full)),
                    "{error}"
                );
            }
        }
    }
    let nested =
        json!({ "rope_parameters": { "full_attention": { "rope_theta": 1e6 }, "factor": 2.0 } });
    names(
        &refused("gemma3_text", &nested),
        "rope_parameters.factor",
        "2.0",
    );
}

#[test]
fn absent_yarn_numbers_have_their_defaults() {
    let read = |fields: Value| {
        let fields = json!({ "max_position_embeddings": 256, "rope_scaling": fields });
        match good("qwen2", &fields).layers[0].rope.scaling {
            RopeScaling::Yarn {
                factor,
                fast,
                slow,
                original,
                attention,
            } => [factor, fast, slow, original, attention],
            other => panic!("{other:?}"),
        }
    };
    let near = |found: [f64; 5], expected: [f64; 5]| {
        let close = found
            .iter()
            .zip(expected)
            .all(|(a, b)| (a - b).abs() < 1e-7);
        assert!(close, "{found:?} for {expected:?}");
    };
    let original = "original_max_position_embeddings";
    near(
        read(json!({ "type": "yarn", original: 64 })),
        [4.0, 32.0, 1.0, 64.0, 1.138_629_4],
    );
    near(
        read(json!({ "type": "yarn", "factor": 2.0 })),
        [2.0, 32.0, 1.0, 256.0, 1.069_314_7],
    );
    near(
        read(
            json!({ "type": "yarn", "factor": 8.0, original: 64, "beta_fast": 16, "beta_slow": 2,
            "attention_factor": 1.5 }),
        ),
        [8.0, 16.0, 2.0, 64.0, 1.5],
    );
}

#[test]
fn the_older_and_the_newer_form_give_the_same_config() {
    let scaling = json!({ "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64 });
    let with_base = |base: f64| {
        let mut scaling = scaling.clone();
        scaling["rope_theta"] = json!(base);
        scaling
    };
    for family in ["llama", "qwen2", "qwen3"] {
        let older = good(
            family,
            &json!({ "rope_theta": 5e5, "rope_scaling": scaling }),
        );
        assert_eq!(older.layers[0].rope.theta, 5e5);
        assert!(matches!(
            older.layers[2].rope.scaling,
            RopeScaling::Llama3 { .. }
        ));
        let flat = with_base(5e5);
        let both = json!({ "full_attention": flat, "sliding_attention": flat });
        for newer in [
            json!({ "rope_theta": null, "rope_parameters": flat }),
            json!({ "rope_theta": null, "rope_parameters": both }),
            json!({ "rope_theta": 5e5, "rope_parameters": flat, "rope_scaling": scaling }),
        ] {
            assert_eq!(good(family, &newer), older, "{family} {newer}");
        }
        let error = refused(
            family,
            &json!({ "rope_scaling": scaling, "rope_parameters": { "rope_type": "default" } }),
        );
        assert!(matches!(error, LoadError::Conflict { .. }), "{error}");
    }
    for family in ["gemma3_text", "gemma3"] {
        let older = good(
            family,
            &json!({ "rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": scaling,
                "sliding_window_pattern": 2 }),
        );
        assert_eq!(older.layers[0].rope.theta, 2e4);
        assert_eq!(
            older.layers[0].rope.scaling,
            RopeScaling::None,
            "full layers only"
        );
        assert!(matches!(
            older.layers[1].rope.scaling,
            RopeScaling::Llama3 { .. }
        ));
        let newer = json!({ "rope_theta": null, "sliding_window_pattern": 2, "rope_parameters": {
            "full_attention": with_base(5e5),
            "sliding_attention": { "rope_type": "default", "rope_theta": 2e4 } } });
        assert_eq!(good(family, &newer), older);
    }
}
