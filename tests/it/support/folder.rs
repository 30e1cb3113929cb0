//! Model folders that a test makes and damages.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use burn::tensor::Device;
use kv_direct::{
    model::DecoderConfig,
    policy::FullKv,
    pretrained::{LoadError, Pretrained, load},
};
use safetensors::{Dtype, SafeTensors, serialize_to_file, tensor::TensorView};
use serde_json::Value;

use crate::support::{feed::feed, random::tokens, reference::Weights};

pub const ONE: &str = "model.safetensors";

/// A folder that a test may damage, at first a copy of the golden Llama; gone when dropped.
pub struct Folder(pub PathBuf);

impl Folder {
    /// An empty one.
    pub fn empty(test: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("kv-direct-{}-{test}", std::process::id()));
        fs::create_dir_all(&dir).expect("a folder");
        Self(dir)
    }

    pub fn new(test: &str) -> Self {
        let folder = Self::empty(test);
        for file in ["config.json", "model.safetensors"] {
            fs::copy(golden().join(file), folder.0.join(file)).expect("a copy");
        }
        folder
    }

    /// A hand-written configuration, and weights under Hugging Face's names: those `config` needs.
    pub fn made(test: &str, json: &Value, config: &DecoderConfig, weights: &Weights) -> Self {
        let folder = Self::empty(test);
        folder.write("config.json", json);
        folder.fill(config, weights, "model.");
        folder
    }

    /// Writes the weights `config` needs, all names but the head's behind `prefix`.
    pub fn fill(&self, config: &DecoderConfig, weights: &Weights, prefix: &str) {
        let shapes = config.weights().expect("the fields fit one another");
        let tensors: Vec<_> = shapes
            .into_iter()
            .map(|(neutral, shape)| {
                let name = hugging_face(&neutral, config.post_norms, prefix);
                let data = weights[&neutral].iter().flat_map(|x| x.to_le_bytes());
                let data = data.collect();
                let dtype = Dtype::F32;
                (name, Tensor { dtype, shape, data })
            })
            .collect();
        let views = tensors.iter().map(|(name, tensor)| (name, tensor.view()));
        serialize_to_file(views, None, &self.0.join(ONE)).expect("written");
    }

    pub fn write(&self, file: &str, json: &Value) {
        fs::write(self.0.join(file), json.to_string()).expect("written");
    }

    pub fn load(&self) -> Result<Pretrained, LoadError> {
        load(&self.0, &Device::flex())
    }

    /// What the folder is refused with.
    pub fn refused(&self) -> LoadError {
        self.load().map(|_| ()).expect_err("a damaged folder")
    }

    pub fn config(&self, change: impl FnOnce(&mut Value)) {
        let path = self.0.join("config.json");
        let mut config: Value =
            serde_json::from_slice(&fs::read(&path).expect("there")).expect("JSON");
        change(&mut config);
        fs::write(path, config.to_string()).expect("written");
    }

    /// Rewrites the weights after `change`, in the shards it returns.
    pub fn weights(
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
pub struct Tensor {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub data: Vec<u8>,
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
    pub fn view(&self) -> TensorView<'_> {
        TensorView::new(self.dtype, self.shape.clone(), &self.data).expect("a good tensor")
    }

    pub fn floats(&self) -> impl Iterator<Item = f32> {
        self.data
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
    }
}

/// The golden Llama.
pub fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/llama")
}

/// Bits of the logits of a few tokens.
pub fn logits(model: &Pretrained) -> Vec<u32> {
    feed(
        &model.decoder,
        &mut FullKv::new(&model.decoder.shape()),
        &tokens(1, 9)[..],
    )
}

/// Hugging Face's name of a weight, written down from its files.
fn hugging_face(neutral: &str, four_norms: bool, prefix: &str) -> String {
    let (layer, name) = neutral
        .strip_prefix("layers.")
        .map_or(("", neutral), |rest| {
            rest.split_once('.').expect("a layer and a name")
        });
    let own = match name {
        "head" => return "lm_head.weight".into(),
        "embedding" => return format!("{prefix}embed_tokens.weight"),
        "final_norm" => return format!("{prefix}norm.weight"),
        "attention_norm" => "input_layernorm.weight",
        "post_attention_norm" => "post_attention_layernorm.weight",
        "feed_forward_norm" if four_norms => "pre_feedforward_layernorm.weight",
        "feed_forward_norm" => "post_attention_layernorm.weight",
        "post_feed_forward_norm" => "post_feedforward_layernorm.weight",
        "query" => "self_attn.q_proj.weight",
        "key" => "self_attn.k_proj.weight",
        "value" => "self_attn.v_proj.weight",
        "output" => "self_attn.o_proj.weight",
        "query.bias" => "self_attn.q_proj.bias",
        "key.bias" => "self_attn.k_proj.bias",
        "value.bias" => "self_attn.v_proj.bias",
        "output.bias" => "self_attn.o_proj.bias",
        "query_norm" => "self_attn.q_norm.weight",
        "key_norm" => "self_attn.k_norm.weight",
        "gate" => "mlp.gate_proj.weight",
        "up" => "mlp.up_proj.weight",
        "down" => "mlp.down_proj.weight",
        "gate.bias" => "mlp.gate_proj.bias",
        "up.bias" => "mlp.up_proj.bias",
        "down.bias" => "mlp.down_proj.bias",
        other => panic!("{other} is new"),
    };
    format!("{prefix}layers.{layer}.{own}")
}
