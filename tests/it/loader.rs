//! Model folders, good and bad: every error names the file and both sides.

use std::{collections::BTreeMap, fs};

use burn::tensor::{Device, bf16, f16};
use kv_direct::{
    model::DecoderConfig,
    pretrained::{LoadError, load_with_progress},
};
use safetensors::Dtype;
use serde_json::{Value, json};

use crate::{
    allocator::measure,
    folder::{Folder, ONE, Tensor, logits},
    random::weights,
};

const FIRST: &str = "model-00001-of-00002.safetensors";
const SECOND: &str = "model-00002-of-00002.safetensors";
const KEY: &str = "model.layers.1.self_attn.k_proj.weight";

#[test]
fn shards_load_whatever_their_order_and_stray_files_are_ignored() {
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
fn half_precision_is_read_as_the_floats_it_stands_for() {
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
fn a_folder_without_config_or_weights() {
    let folder = Folder::new("missing");
    fs::remove_file(folder.0.join(ONE)).expect("removed");
    assert!(matches!(folder.refused(), LoadError::NoWeights { .. }));
    fs::remove_file(folder.0.join("config.json")).expect("removed");
    let error = folder.refused();
    assert!(
        matches!(&error, LoadError::Io { path, .. } if path.ends_with("config.json")),
        "{error}"
    );
}

#[test]
fn missing_and_unexpected_tensors_are_named_all_at_once() {
    let folder = Folder::new("tensors");
    folder.weights(|mut all| {
        let key = all.remove(KEY).expect("there");
        all.remove("model.norm.weight").expect("there");
        all.insert("model.layers.1.self_attn.k_proj.bias".into(), key);
        vec![(ONE, all.into_iter().collect())]
    });
    let LoadError::Tensors {
        missing,
        unexpected,
        ..
    } = folder.refused()
    else {
        panic!("tensors")
    };
    assert_eq!(missing, [KEY, "model.norm.weight"]);
    assert_eq!(unexpected, ["model.layers.1.self_attn.k_proj.bias"]);
}

#[test]
fn a_tensor_of_another_shape_or_dtype() {
    let folder = Folder::new("shape");
    folder.weights(|mut all| {
        all.get_mut(KEY).expect("there").shape = vec![64, 32];
        vec![(ONE, all.into_iter().collect())]
    });
    let expected = format!(
        "{KEY} in {} has shape [64, 32], the configuration asks for [32, 64]",
        folder.0.join(ONE).display()
    );
    assert_eq!(folder.refused().to_string(), expected);

    let folder = Folder::new("dtype");
    folder.weights(|mut all| {
        all.get_mut(KEY).expect("there").dtype = Dtype::I32;
        vec![(ONE, all.into_iter().collect())]
    });
    assert!(
        matches!(folder.refused(), LoadError::Dtype { tensor, found, .. } if tensor == KEY && found == "I32")
    );
}

#[test]
fn damaged_files() {
    let folder = Folder::new("damaged");
    let path = folder.0.join(ONE);
    let good = fs::read(&path).expect("there");
    let header = u64::from_le_bytes(good[..8].try_into().expect("eight")) as usize;
    let length = |found: usize| move |e: &LoadError| matches!(e, LoadError::Length { found: f, .. } if *f == found as u64);
    let refused = |bytes: &[u8], expected: &dyn Fn(&LoadError) -> bool| {
        fs::write(&path, bytes).expect("written");
        let error = folder.refused();
        assert!(expected(&error), "{error:?}");
    };
    for cut in [0, 5, 8, 8 + header / 2, 8 + header, good.len() - 1] {
        refused(&good[..cut], &length(cut));
    }
    refused(&[&good[..], &[0]].concat(), &length(good.len() + 1));
    let huge = [&u64::MAX.to_le_bytes()[..], &good[8..]].concat();
    refused(&huge, &length(good.len()));
    let mut garbled = good.clone();
    garbled[8..12].copy_from_slice(b"\xff{[!");
    let header = |e: &LoadError| matches!(e, LoadError::Header { .. });
    refused(&garbled, &header);
    // Offsets that overlap: the header's own check.
    let text = String::from_utf8(
        good[8..]
            .iter()
            .copied()
            .take_while(|&b| b != b'}')
            .collect(),
    )
    .expect("text");
    let at = text.find("data_offsets").expect("offsets");
    let mut moved = good;
    let digit = moved[8 + at..]
        .iter()
        .position(u8::is_ascii_digit)
        .expect("a digit")
        + 8
        + at;
    moved[digit] = b'9';
    refused(&moved, &header);
}

#[test]
fn ends_of_text_are_those_of_all_files_and_nothing_else_passes_for_one() {
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
fn progress_names_each_tensor_once_when_it_is_in_place_and_ends_at_the_total() {
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
fn files_beyond_any_model_are_not_read() {
    let folder = Folder::new("large");
    let grow = |file: &str, to: u64| {
        let file = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(folder.0.join(file));
        file.expect("a file").set_len(to).expect("a sparse file");
        folder.refused()
    };
    let too_large = |error: &LoadError, file: &str, size: u64| {
        assert!(
            matches!(error, LoadError::TooLarge { path, bytes, .. }
                if path.ends_with(file) && *bytes == size),
            "{error}"
        );
    };
    let index = "model.safetensors.index.json";
    too_large(&grow(index, (64 << 20) + 1), index, (64 << 20) + 1);
    for file in ["generation_config.json", "config.json"] {
        too_large(&grow(file, (16 << 20) + 1), file, (16 << 20) + 1);
    }
}

#[test]
fn loading_holds_little_more_than_the_weights_even_where_one_is_most_of_them() {
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
