//! Damaged and made-up files: whatever the bytes, a folder loads or is refused, and allocates no more than its files
//! justify. `KV_DIRECT_FUZZ_CASES` asks for more cases.

use std::{cell::Cell, fs};

use kv_direct::model::DecoderConfig;
use proptest::{prelude::*, sample::select};
use serde_json::{Value, json};

use crate::support::{
    allocator::measure,
    cases::{check, runner},
    folder::{Folder, ONE},
    fuzz::{CONSTANT, FACTOR, bytes, fuzz_cases},
    random::weights,
};

const CONFIG: &str = "config.json";

const INDEX: &str = "model.safetensors.index.json";

/// A model small enough to load a thousand times a second.
fn folder(test: &str) -> Folder {
    let mut config = DecoderConfig::new(16, 8, 1, 2, 1);
    config.intermediate = 8;
    let json = json!({ "model_type": "gemma3_text", "vocab_size": 16, "hidden_size": 8, "head_dim": 4,
        "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 64, "rope_theta": 1e4, "rope_local_base_freq": 1e4, "rms_norm_eps": 1e-6,
        "sliding_window": 4, "sliding_window_pattern": 2, "layer_types": ["sliding_attention"],
        "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 4, "tie_word_embeddings": false,
        "final_logit_softcapping": 30.0, "attention_bias": false, "eos_token_id": [1, 106],
        "rope_scaling": { "rope_type": "yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 1,
            "original_max_position_embeddings": 16, "attention_factor": 1.1 } });
    (config.post_norms, config.qk_norm) = (true, true);
    Folder::made(test, &json, &config, &weights(&config))
}

/// Loads the folder once for each case, after `write`. Some cases must load and some must be refused, or
/// nothing is tested.
fn loads_or_refuses<S: Strategy>(folder: &Folder, strategy: S, write: impl Fn(S::Value)) {
    folder.load().expect("a good folder");
    let (loaded, refused) = (Cell::new(0_u32), Cell::new(0_u32));
    check(runner(fuzz_cases(300)), &strategy, |case| {
        write(case);
        let (good, peak, _) = measure(|| folder.load().is_ok());
        let counter = if good { &loaded } else { &refused };
        counter.set(counter.get() + 1);
        let entries = fs::read_dir(&folder.0).expect("a folder");
        let sizes = entries.map(|entry| entry.and_then(|e| e.metadata()).expect("a file").len());
        let bytes = sizes.sum::<u64>() as usize;
        let most = bytes * FACTOR + CONSTANT;
        prop_assert!(
            peak <= most,
            "{peak} bytes were allocated for {bytes} of files"
        );
        Ok(())
    });
    assert!(
        loaded.get() > 0 && refused.get() > 0,
        "{} loaded, {} refused",
        loaded.get(),
        refused.get()
    );
}

#[test]
fn any_bytes_of_a_configuration_load_or_are_refused() {
    for file in [CONFIG, "generation_config.json"] {
        let folder = folder(&format!("fuzz-{file}"));
        let path = folder.0.join(file);
        let good = fs::read(&path).unwrap_or_else(|_| br#"{"eos_token_id":[1,2,3]}"#.to_vec());
        loads_or_refuses(&folder, bytes(good), |bytes| {
            fs::write(&path, bytes).expect("written")
        });
    }
}

/// Here every file is still JSON: one value in place of another, or of another type.
#[test]
fn any_values_of_a_configuration_load_or_are_refused() {
    let folder = folder("fuzz-values");
    let path = folder.0.join(CONFIG);
    let good: Value = serde_json::from_slice(&fs::read(&path).expect("there")).expect("JSON");
    let fields: Vec<String> = good.as_object().expect("fields").keys().cloned().collect();
    let scaling = good["rope_scaling"].clone();
    let inner: Vec<String> = scaling
        .as_object()
        .expect("fields")
        .keys()
        .cloned()
        .collect();
    let value = prop_oneof![
        select(vec![
            json!(null),
            json!(true),
            json!(false),
            json!([]),
            json!({}),
            json!("default")
        ]),
        select(vec![
            "llama", "qwen2", "qwen3", "gemma3", "linear", "llama3", "yarn", "gelu"
        ])
        .prop_map(|text| json!(text)),
        any::<i64>().prop_map(|number| json!(number)),
        (0_u64..40).prop_map(|number| json!(number)),
        (0_u32..64).prop_map(|shift| json!(1_u64 << shift)),
        any::<f64>().prop_map(|number| json!(number)),
        (-4.0..4.0).prop_map(|number: f64| json!(number)),
        select(vec![
            json!(["full_attention"]),
            json!(["sliding_attention"]),
            json!([1, 2]),
            json!([null])
        ]),
    ];
    let place = prop_oneof![
        2 => select(fields).prop_map(|field| format!("/{field}")),
        1 => select(inner).prop_map(|field| format!("/rope_scaling/{field}")),
    ];
    let changes = prop::collection::vec((place, value), 1..4);
    loads_or_refuses(&folder, changes, |changes| {
        let mut json = good.clone();
        for (place, value) in changes {
            if let Some(field) = json.pointer_mut(&place) {
                *field = value;
            }
        }
        fs::write(&path, json.to_string()).expect("written");
    });
}

#[test]
fn any_bytes_of_an_index_load_or_are_refused() {
    let folder = folder("fuzz-index");
    // A file of this name would be read without the index.
    let shard = "model-00001-of-00001.safetensors";
    let good = fs::read(folder.0.join(ONE)).expect("there");
    fs::rename(folder.0.join(ONE), folder.0.join(shard)).expect("renamed");
    let file = safetensors::SafeTensors::deserialize(&good).expect("safetensors");
    let map: serde_json::Map<String, Value> = file
        .names()
        .into_iter()
        .map(|name| (name.to_owned(), json!(shard)))
        .collect();
    let good = json!({ "metadata": { "total_size": 1 }, "weight_map": map }).to_string();
    loads_or_refuses(&folder, bytes(good.into_bytes()), |bytes| {
        fs::write(folder.0.join(INDEX), bytes).expect("written");
    });
}

#[test]
fn any_bytes_of_a_header_load_or_are_refused() {
    let folder = folder("fuzz-header");
    let path = folder.0.join(ONE);
    let good = fs::read(&path).expect("there");
    let length = u64::from_le_bytes(good[..8].try_into().expect("eight")) as usize;
    let (header, data) = good[8..].split_at(length);
    // Most cases keep a length that fits, so that the header itself is read.
    let headers = (
        bytes(header.to_vec()),
        prop::option::weighted(0.1, any::<u64>()),
    );
    loads_or_refuses(&folder, headers, |(header, length)| {
        let length = length.unwrap_or(header.len() as u64);
        let file = [&length.to_le_bytes()[..], &header, data].concat();
        fs::write(&path, file).expect("written");
    });
}

#[test]
fn the_densest_files_allocate_a_bounded_multiple() {
    let many = |part: &str| vec![part; 200_000].join(",");
    let folder = folder("dense");
    let refused = |file: &str, bytes: Vec<u8>| {
        fs::write(folder.0.join(file), &bytes).expect("written");
        let (error, peak, _) = measure(|| folder.load().map(|_| ()).is_err());
        assert!(error, "{file}");
        let most = bytes.len() * FACTOR + CONSTANT;
        assert!(peak <= most, "{file}: {peak} for {} bytes", bytes.len());
    };
    let header = |json: &str| [&(json.len() as u64).to_le_bytes()[..], json.as_bytes()].concat();
    for part in ["[]", "{}", "\"\"", "0", "{\"\":0}"] {
        let list = format!("[{}]", many(part));
        refused(ONE, header(&format!(r#"{{"a":{list}}}"#)));
        refused(INDEX, format!(r#"{{"weight_map":{list}}}"#).into_bytes());
        fs::remove_file(folder.0.join(INDEX)).expect("removed");
        let config = fs::read(folder.0.join(CONFIG)).expect("there");
        refused(CONFIG, format!(r#"{{"model_type":{list}}}"#).into_bytes());
        refused(
            CONFIG,
            format!(r#"{{"model_type":"gemma3_text","layer_types":{list}}}"#).into_bytes(),
        );
        fs::write(folder.0.join(CONFIG), config).expect("written");
    }
    let entries = |value: &str| {
        let entries: Vec<String> = (0..200_000).map(|i| format!("\"{i:x}\":{value}")).collect();
        format!("{{{}}}", entries.join(","))
    };
    let empty = r#"{"dtype":"F32","shape":[0],"data_offsets":[0,0]}"#;
    refused(ONE, header(&entries(empty)));
    refused(ONE, header(&entries("0")));
    let map = entries("\"a\"");
    refused(INDEX, format!(r#"{{"weight_map":{map}}}"#).into_bytes());
    refused(CONFIG, entries("0").into_bytes());
}
