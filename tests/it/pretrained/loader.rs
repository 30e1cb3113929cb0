//! Good model folders: shards, dtypes, ends of text, progress and memory.

use std::{collections::BTreeMap, fs};

use burn::tensor::{Device, bf16, f16};
use kv_direct::{
    model::DecoderConfig,
    pretrained::{LoadError, Warning, load_with_progress},
};
use safetensors::Dtype;
use serde_json::{Value, json};

use crate::support::{
    allocator::measure,
    folder::{Folder, ONE, Tensor, logits},
    random::weights,
};

const FIRST: &str = "model-00001-of-00002.safetensors";

const SECOND: &str = "model-00002-of-00002.safetensors";

#[test]
fn shards_load_in_any_order_without_stray_files() {
    let folder = Folder::new("shards");
    let whole = logits(&folder.load().expect("a good folder"));
    let mut map = BTreeMap::new();
    folder.weights(|all| {
        let (mut first, mut second) = (Vec::new(), Vec::new());
        for (index, (name, tensor)) in all.into_iter().enumerate() {
            map.insert(name.clone(), if index % 2 == 0 { SECOND } else { FIRST });
            if index % 2 == 0 {
                &mut second
            } else {
                &mut first
            }
            .push((name, tensor));
        }
        let stray = vec![("stray.weight".to_owned(), first[0].1.clone())];
        vec![
            (FIRST, first),
            (SECOND, second),
            ("stray.safetensors", stray),
        ]
    });
    let index = folder.0.join("model.safetensors.index.json");
    fs::write(&index, json!({ "weight_map": map }).to_string()).expect("written");
    assert!(logits(&folder.load().expect("a good folder")) == whole);

    fs::remove_file(folder.0.join(SECOND)).expect("removed");
    let error = folder.refused();
    assert!(
        matches!(&error, LoadError::MissingShard { shard, .. } if shard == SECOND),
        "{error}"
    );
    let escape = map
        .into_keys()
        .map(|name| (name, "../model.safetensors"))
        .collect::<BTreeMap<_, _>>();
    fs::write(&index, json!({ "weight_map": escape }).to_string()).expect("written");
    assert!(
        matches!(folder.refused(), LoadError::MissingShard { .. }),
        "a shard outside the folder"
    );
}

#[test]
fn a_single_file_wins_over_an_index() {
    let folder = Folder::new("both");
    let whole = logits(&folder.load().expect("a good folder"));
    let index = folder.0.join("model.safetensors.index.json");
    let stale = json!({ "weight_map": { "model.norm.weight": FIRST } });
    fs::write(&index, stale.to_string()).expect("written");
    let loaded = folder.load().expect("the single file");
    assert!(logits(&loaded) == whole);
    assert!(loaded.warnings.contains(&Warning::IndexIgnored { index }));
}

#[test]
fn numbers_that_are_no_json_matter_only_where_they_are_read() {
    let folder = Folder::new("infinity");
    let path = folder.0.join("config.json");
    let good = fs::read_to_string(&path).expect("a configuration");
    let open = good.trim_start().strip_prefix('{').expect("an object");
    let with = |fields: &str| fs::write(&path, format!("{{{fields}, {open}")).expect("written");
    with(r#""nobody": [NaN, -Infinity], "text": "Infinity""#);
    folder.load().expect("nobody reads it");
    let number = good.find("\"rope_theta\"").expect("a field");
    let end = good[number..].find([',', '}']).expect("an end") + number;
    let bad = format!("{}\"rope_theta\": NaN{}", &good[..number], &good[end..]);
    fs::write(&path, bad).expect("written");
    let error = folder.refused().to_string();
    assert!(error.contains("rope_theta"), "{error}");
}

#[test]
fn shards_without_an_index_are_all_read() {
    let folder = Folder::new("no-index");
    let whole = logits(&folder.load().expect("a good folder"));
    folder.weights(|all| {
        let (first, second) = all
            .into_iter()
            .partition(|(name, _)| name.contains("layers.1"));
        vec![(FIRST, first), (SECOND, second)]
    });
    assert!(logits(&folder.load().expect("a good folder")) == whole);
    fs::copy(folder.0.join(FIRST), folder.0.join("copy.safetensors")).expect("copied");
    assert!(matches!(folder.refused(), LoadError::Duplicate { .. }));
}

#[test]
fn half_precision_is_read_as_exact_floats() {
    for dtype in [Dtype::BF16, Dtype::F16] {
        let (stored, rounded) = (
            Folder::new(&format!("{dtype:?}")),
            Folder::new(&format!("{dtype:?}-f32")),
        );
        let halve = |tensor: &Tensor, wide: bool| {
            let data = tensor.floats().flat_map(|value| match (dtype, wide) {
                (Dtype::BF16, false) => bf16::from_f32(value).to_le_bytes().to_vec(),
                (Dtype::BF16, true) => bf16::from_f32(value).to_f32().to_le_bytes().to_vec(),
                (_, false) => f16::from_f32(value).to_le_bytes().to_vec(),
                (_, true) => f16::from_f32(value).to_f32().to_le_bytes().to_vec(),
            });
            let dtype = if wide { Dtype::F32 } else { dtype };
            Tensor {
                dtype,
                data: data.collect(),
                shape: tensor.shape.clone(),
            }
        };
        for (folder, wide) in [(&stored, false), (&rounded, true)] {
            let each = |all: BTreeMap<String, Tensor>| {
                all.into_iter().map(|(n, t)| (n, halve(&t, wide))).collect()
            };
            folder.weights(|all| vec![(ONE, each(all))]);
        }
        let [stored, rounded] =
            [&stored, &rounded].map(|folder| logits(&folder.load().expect("a good folder")));
        assert!(stored == rounded, "{dtype:?}");
    }
}

#[test]
fn ends_of_text_are_the_valid_ids_of_all_files() {
    let folder = Folder::new("eos");
    let ends = |config: Value, generation: Value| {
        folder.config(|fields| fields["eos_token_id"] = config);
        folder.write(
            "generation_config.json",
            &json!({ "eos_token_id": generation }),
        );
        folder.load().map(|model| model.eos)
    };
    for (config, generation, expected) in [
        (json!(2), json!([5, 2, 7]), vec![2, 5, 7]),
        (json!([106, 1]), Value::Null, vec![1, 106]),
        (Value::Null, json!(3), vec![3]),
        (Value::Null, Value::Null, vec![]),
    ] {
        let found = ends(config, generation).expect("a good folder");
        assert_eq!(found, expected);
    }
    for bad in [
        json!("</s>"),
        json!(-1),
        json!(1.5),
        json!([1, null]),
        json!(1_u64 << 32),
    ] {
        for (config, generation, file) in [
            (bad.clone(), Value::Null, "config.json"),
            (Value::Null, bad.clone(), "generation_config.json"),
        ] {
            let error = ends(config, generation)
                .map(|_| ())
                .expect_err("no token id");
            assert!(
                matches!(&error, LoadError::InvalidField { path, field, .. }
                    if field == "eos_token_id" && path.ends_with(file)),
                "{error}"
            );
        }
    }
}

#[test]
fn progress_names_each_tensor_once_and_ends_at_the_total() {
    let folder = Folder::new("progress");
    let (mut names, mut seen) = (Vec::new(), Vec::new());
    let model = load_with_progress(&folder.0, &Device::flex(), |loaded| {
        names.push(loaded.tensor.to_owned());
        seen.push((loaded.bytes, loaded.total));
    });
    let config = model.expect("a good folder").decoder.config().clone();
    let needed = config.weights().expect("it was loaded").len();
    assert_eq!(names.len(), needed);
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), needed, "no tensor twice");
    let weights = fs::metadata(folder.0.join(ONE)).expect("there").len();
    let last = seen.last().expect("tensors");
    assert!(seen.is_sorted() && last.0 == last.1 && last.1 < weights);

    // A tensor that cannot be built is not reported.
    folder.config(|fields| fields["rms_norm_eps"] = json!(0));
    let refused = load_with_progress(&folder.0, &Device::flex(), |_| {
        panic!("nothing is in place")
    });
    assert!(matches!(refused, Err(LoadError::Build { .. })));
}

#[test]
fn loading_holds_little_more_than_the_weights() {
    let mut config = DecoderConfig::new(20_000, 64, 1, 4, 2);
    config.tied_head = true;
    let weights = weights(&config);
    let json = json!({ "model_type": "llama", "vocab_size": 20_000, "hidden_size": 64,
        "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "rope_theta": 1e4, "rms_norm_eps": 1e-5, "tie_word_embeddings": true });
    let folder = Folder::made("peak", &json, &config, &weights);
    let floats: usize = weights.values().map(Vec::len).sum();
    for dtype in [Dtype::F32, Dtype::BF16] {
        if dtype == Dtype::BF16 {
            folder.weights(|all| {
                let halved = all.into_iter().map(|(name, tensor)| {
                    let data = tensor.floats();
                    let data = data.flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect();
                    let shape = tensor.shape.clone();
                    (name, Tensor { dtype, shape, data })
                });
                vec![(ONE, halved.collect())]
            });
        }
        let (model, peak, _) = measure(|| folder.load());
        model.expect("a good folder");
        let most = floats * 4 * 11 / 10;
        assert!(
            peak <= most,
            "{peak} bytes for {floats} weights as {dtype:?}"
        );
    }
}
