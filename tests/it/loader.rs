//! Model folders, good and bad: every error names the file and both sides.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use burn::tensor::{Device, bf16, f16};
use kv_direct::{
    cache::FullKv,
    model::{Activation, RopeScaling},
    pretrained::{LoadError, Pretrained, load, load_with_progress},
};
use safetensors::{Dtype, SafeTensors, serialize_to_file, tensor::TensorView};
use serde_json::{Value, json};

use crate::support::{bits, feed, tokens};

/// A copy of the golden Llama folder that a test may damage; gone when dropped.
struct Folder(PathBuf);

impl Folder {
    fn new(test: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("kv-direct-{}-{test}", std::process::id()));
        fs::create_dir_all(&dir).expect("a folder");
        for file in ["config.json", "model.safetensors"] {
            fs::copy(golden().join(file), dir.join(file)).expect("a copy");
        }
        Self(dir)
    }

    fn load(&self) -> Result<Pretrained, LoadError> {
        load(&self.0, &Device::flex())
    }

    /// What the folder is refused with.
    fn refused(&self) -> LoadError {
        self.load().map(|_| ()).expect_err("a damaged folder")
    }

    fn config(&self, change: impl FnOnce(&mut Value)) {
        let path = self.0.join("config.json");
        let mut config: Value =
            serde_json::from_slice(&fs::read(&path).expect("there")).expect("JSON");
        change(&mut config);
        fs::write(path, config.to_string()).expect("written");
    }

    /// Rewrites the weights after `change`, in the shards it returns.
    fn weights(
        &self,
        change: impl FnOnce(BTreeMap<String, Tensor>) -> Vec<(&'static str, Vec<(String, Tensor)>)>,
    ) {
        let path = self.0.join("model.safetensors");
        let bytes = fs::read(&path).expect("there");
        let file = SafeTensors::deserialize(&bytes).expect("safetensors");
        let all = file
            .iter()
            .map(|(name, view)| (name.to_owned(), Tensor::from(&view)))
            .collect();
        fs::remove_file(&path).expect("removed");
        for (file, tensors) in change(all) {
            let views = tensors.iter().map(|(name, tensor)| (name, tensor.view()));
            serialize_to_file(views, None, &self.0.join(file)).expect("written");
        }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[derive(Clone)]
struct Tensor {
    dtype: Dtype,
    shape: Vec<usize>,
    data: Vec<u8>,
}

impl From<&TensorView<'_>> for Tensor {
    fn from(view: &TensorView<'_>) -> Self {
        Self {
            dtype: view.dtype(),
            shape: view.shape().to_vec(),
            data: view.data().to_vec(),
        }
    }
}

impl Tensor {
    fn view(&self) -> TensorView<'_> {
        TensorView::new(self.dtype, self.shape.clone(), &self.data).expect("a good tensor")
    }

    fn floats(&self) -> impl Iterator<Item = f32> {
        self.data
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
    }
}

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/llama")
}

/// Bits of the logits of a few tokens.
fn logits(model: &Pretrained) -> Vec<u32> {
    feed(
        &model.decoder,
        &mut FullKv::new(&model.decoder.shape()),
        &tokens(1, 9)[..],
    )
}

const ONE: &str = "model.safetensors";
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
fn configurations_that_are_not_run() {
    let refuse = |test: &str, field: &str, value: Value| {
        let folder = Folder::new(test);
        folder.config(|config| config[field] = value);
        folder.refused()
    };
    let error = refuse("family", "model_type", json!("mamba"));
    assert!(
        matches!(&error, LoadError::ModelType { found: Some(found), .. } if found == "mamba"),
        "{error}"
    );
    assert!(matches!(
        refuse("no-family", "model_type", Value::Null),
        LoadError::ModelType { found: None, .. }
    ));
    let cases = [
        (
            "rope_parameters",
            json!({ "rope_type": "longrope" }),
            "rope_scaling.rope_type",
            "longrope",
        ),
        (
            "rope_parameters",
            json!({ "full_attention": { "rope_theta": 1e6 } }),
            "rope_scaling.full_attention",
            r#"{"rope_theta":1000000.0}"#,
        ),
        (
            "partial_rotary_factor",
            json!(0.5),
            "partial_rotary_factor",
            "0.5",
        ),
        ("rope_interleaved", json!(true), "rope_interleaved", "true"),
        ("hidden_act", json!("relu"), "hidden_act", "relu"),
        ("sliding_window", json!(4096), "sliding_window", "4096"),
        (
            "layer_types",
            json!(["sliding_attention"]),
            "layer_types",
            "sliding_attention",
        ),
    ];
    for (field, value, named, shown) in cases {
        let error = refuse("unsupported", field, value);
        assert!(
            matches!(&error, LoadError::Unsupported { field, value, .. } if field == named && value == shown),
            "{error}"
        );
    }
    let linear = json!({ "rope_type": "linear" });
    let error = refuse("missing-factor", "rope_parameters", linear);
    assert!(
        matches!(&error, LoadError::MissingField { field, .. } if field == "rope_scaling.factor"),
        "{error}"
    );
    assert!(matches!(
        refuse("text", "hidden_size", json!("wide")),
        LoadError::Json { .. }
    ));
    assert!(matches!(
        refuse("heads", "num_key_value_heads", json!(3)),
        LoadError::Build { .. }
    ));
    assert!(matches!(
        refuse("huge", "hidden_size", json!(u64::MAX)),
        LoadError::Build { .. }
    ));
}

#[test]
fn the_old_and_the_new_form_of_the_rope_fields_are_equal() {
    let rope = json!({ "rope_theta": 5e5, "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192 });
    let (new, old) = (Folder::new("new-rope"), Folder::new("old-rope"));
    new.config(|config| config["rope_parameters"] = rope.clone());
    old.config(|config| {
        config["rope_theta"] = json!(5e5);
        config["rope_scaling"] = rope;
        config["rope_scaling"]["rope_theta"] = Value::Null;
        config["rope_scaling"]["type"] = json!("llama3");
        config["rope_parameters"] = Value::Null;
    });
    let [new, old] = [new, old].map(|folder| {
        folder
            .load()
            .expect("a good folder")
            .decoder
            .config()
            .clone()
    });
    assert_eq!(new, old);
    assert_eq!(new.layers[0].rope.theta, 5e5);
    assert!(matches!(
        new.layers[2].rope.scaling,
        RopeScaling::Llama3 { factor: 32.0, .. }
    ));
}

#[test]
fn a_real_configuration_gives_the_model_it_describes() {
    let folder = Folder::new("smollm2");
    // SmolLM2-135M's own fields.
    let config = json!({ "architectures": ["LlamaForCausalLM"], "attention_bias": false, "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
        "intermediate_size": 1536, "is_llama_config": true, "max_position_embeddings": 8192, "mlp_bias": false,
        "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
        "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-5, "rope_interleaved": false,
        "rope_scaling": null, "rope_theta": 100000, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
        "use_cache": true, "vocab_size": 49152 });
    fs::write(folder.0.join("config.json"), config.to_string()).expect("written");
    let LoadError::Shape { expected, .. } = folder.refused() else {
        panic!("other weights lie there")
    };
    assert_eq!(expected, [49_152, 576], "the embedding comes first");
}

#[test]
fn the_head_is_the_embedding_by_flag_or_by_absence() {
    let untied = Folder::new("untied");
    let own = logits(&untied.load().expect("a good folder"));
    let flagged = Folder::new("flagged");
    flagged.config(|config| config["tie_word_embeddings"] = json!(true));
    let flagged = logits(&flagged.load().expect("a stored head is ignored"));
    let absent = Folder::new("absent");
    absent.weights(|mut all| {
        all.remove("lm_head.weight").expect("there");
        vec![(ONE, all.into_iter().collect())]
    });
    let model = absent.load().expect("a good folder");
    assert!(model.decoder.config().tied_head);
    assert!(logits(&model) == flagged && own != flagged);
}

#[test]
fn ends_of_text_are_those_of_both_files_and_progress_ends_at_the_total() {
    let folder = Folder::new("eos");
    fs::write(
        folder.0.join("generation_config.json"),
        json!({ "eos_token_id": [5, 2, 7] }).to_string(),
    )
    .expect("written");
    let mut seen = Vec::new();
    let model = load_with_progress(&folder.0, &Device::flex(), |loaded| {
        seen.push((loaded.bytes, loaded.total))
    });
    let model = model.expect("a good folder");
    assert_eq!(model.eos, [2, 5, 7]);
    assert_eq!(model.decoder.config().activation, Activation::Silu);
    let weights = fs::metadata(folder.0.join(ONE)).expect("there").len();
    assert!(
        seen.is_sorted()
            && seen
                .last()
                .is_some_and(|&(bytes, total)| bytes == total && total < weights)
    );
    assert!(!bits(&model.decoder.embed(&(&[1][..]).into()).expect("an id")).is_empty());
}
