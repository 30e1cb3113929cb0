//! Which layers have a window, by `config.json`.

use kv_direct::pretrained::LoadError;
use serde_json::{Value, json};

use crate::support::config_json::{TYPES, good, names, refused};

const FULL: &str = "full_attention";

const SLIDE: &str = "sliding_attention";

/// Each layer's window, 0 for none.
#[track_caller]
fn windows(family: &str, fields: &Value) -> Vec<usize> {
    let config = good(family, fields);
    let windows = config.layers.iter().map(|layer| layer.window);
    windows.map(|w| w.map_or(0, usize::from)).collect()
}

#[test]
fn layer_types_win_over_a_pattern_and_a_pattern_over_the_rule() {
    for family in ["gemma3_text", "gemma3"] {
        let gemma = |fields: Value| windows(family, &fields);
        assert_eq!(gemma(json!({})), [4096; 3], "the class's own window");
        assert_eq!(
            gemma(json!({ "num_hidden_layers": 7, "sliding_window": 8 })),
            [8, 8, 8, 8, 8, 0, 8]
        );
        for field in ["sliding_window_pattern", "_sliding_window_pattern"] {
            assert_eq!(gemma(json!({ "sliding_window": 8, field: 2 })), [8, 0, 8]);
        }
        let both = json!({ "sliding_window": 8, "sliding_window_pattern": 2,
            "layer_types": [FULL, SLIDE, FULL] });
        assert_eq!(gemma(both), [0, 8, 0]);
    }
}

#[test]
fn qwen_slides_from_a_layer_on_and_only_if_switched_on() {
    for family in ["qwen2", "qwen3"] {
        let off = |fields: Value| windows(family, &fields);
        let on = |mut fields: Value| {
            fields["use_sliding_window"] = json!(true);
            windows(family, &fields)
        };
        let first = json!({ "sliding_window": 8, "max_window_layers": 1 });
        assert_eq!(off(first.clone()), [0; 3]);
        assert_eq!(on(first), [0, 8, 8]);
        assert_eq!(
            on(json!({ "sliding_window": 8 })),
            [0; 3],
            "28 layers come first"
        );
        assert_eq!(on(json!({ "max_window_layers": 2 })), [0, 0, 4096]);
        let none = json!({ "sliding_window": null, "max_window_layers": 0 });
        assert_eq!(on(none), [0; 3]);
        let pattern = json!({ "sliding_window": 8, "sliding_window_pattern": 3 });
        assert_eq!(off(pattern.clone()), [0; 3]);
        assert_eq!(on(pattern), [8, 8, 0]);
        let types = json!({ "sliding_window": 8, "layer_types": [SLIDE, FULL, FULL] });
        assert_eq!(on(types), [8, 0, 0]);
    }
}

#[test]
fn a_window_without_a_sliding_layer_does_nothing() {
    let full = json!({ "sliding_window": 8, "layer_types": [FULL, FULL, FULL] });
    for family in ["qwen2", "qwen3", "gemma3_text", "gemma3"] {
        assert_eq!(windows(family, &full), [0; 3]);
    }
    assert_eq!(
        windows("llama", &json!({ "layer_types": [FULL, FULL, FULL] })),
        [0; 3]
    );
}

#[test]
fn a_sliding_layer_without_a_usable_window_is_refused() {
    let missing = |error: &LoadError| {
        assert!(
            matches!(error, LoadError::MissingField { field, .. } if field.ends_with("sliding_window")),
            "{error}"
        );
    };
    let types = json!([SLIDE, FULL, FULL]);
    for family in ["qwen2", "qwen3"] {
        let off = json!({ "sliding_window": 8, "layer_types": types });
        names(&refused(family, &off), "layer_types", SLIDE);
        let none =
            json!({ "use_sliding_window": true, "sliding_window": null, "layer_types": types });
        missing(&refused(family, &none));
    }
    for family in ["gemma3_text", "gemma3"] {
        names(
            &refused(family, &json!({ "sliding_window": 0 })),
            "sliding_window",
            "0",
        );
        missing(&refused(family, &json!({ "sliding_window": null })));
    }
    names(
        &refused("llama", &json!({ "layer_types": types })),
        "layer_types",
        SLIDE,
    );
}

#[test]
fn layer_types_and_patterns_that_fit_no_model_are_refused() {
    for family in TYPES {
        let short = json!([FULL, FULL]);
        let error = refused(family, &json!({ "layer_types": short }));
        names(&error, "layer_types", &short.to_string());
        let unknown = json!([FULL, "chunked_attention", FULL]);
        let error = refused(family, &json!({ "layer_types": unknown }));
        names(&error, "layer_types", "chunked_attention");
    }
    for field in ["sliding_window_pattern", "_sliding_window_pattern"] {
        names(&refused("gemma3_text", &json!({ field: 0 })), field, "0");
    }
}

/// Beyond all positions that a model can have, every window is the same.
#[test]
fn a_huge_window_is_bounded() {
    for huge in [usize::MAX, usize::MAX - 511, 1 << 62] {
        let found = windows("gemma3_text", &json!({ "sliding_window": huge }));
        assert_eq!(found, [1 << 24; 3], "{huge}");
    }
}
