//! Reads a model folder as Hugging Face lays it out: `config.json` and safetensors files.
//!
//! Nothing here touches the network, and nothing is printed. A family is data: a mapping of its
//! configuration to [`DecoderConfig`] and of its tensor names to
//! neutral ones.

mod error;
mod llama;
mod weights;

use std::path::Path;

use burn::tensor::Device;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::Value;

pub use self::error::LoadError;
use self::{
    llama::{LlamaConfig, Refusal},
    weights::Weights,
};
use crate::{
    files,
    model::{BuildError, Decoder, DecoderConfig},
};

/// A model read from a folder.
#[derive(Debug)]
#[non_exhaustive]
pub struct Pretrained {
    /// The decoder, in f32 whatever dtype was stored.
    pub decoder: Decoder,
    /// Ids that end a text: those of `config.json` and of `generation_config.json` together.
    pub eos: Vec<u32>,
}

/// How far loading has come.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Loaded<'a> {
    /// The tensor that was just read, by its name in the file.
    pub tensor: &'a str,
    /// Bytes read so far, as stored.
    pub bytes: u64,
    /// Bytes of all tensors the model needs, as stored.
    pub total: u64,
}

/// Loads the model in `dir` onto `device`.
///
/// # Errors
/// [`LoadError`], naming the file and, where it is about one, the tensor or field with what was
/// expected and what was found.
///
/// # Cost
/// The weights in f32, and on top of them the tensors of one block, or the embedding, as read and one
/// of them as stored.
///
/// ```no_run
/// use burn::tensor::Device;
/// use kv_direct::{cache::FullKv, pretrained::load};
///
/// let model = load("models/smollm2-135m-instruct", &Device::flex())?;
/// let mut cache = FullKv::new(&model.decoder.shape());
/// let logits = model.decoder.forward(&[504, 15893][..], &mut cache)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn load(dir: impl AsRef<Path>, device: &Device) -> Result<Pretrained, LoadError> {
    load_with_progress(dir, device, |_| {})
}

/// [`load`], telling `progress` of every tensor read.
///
/// # Errors
/// As [`load`].
pub fn load_with_progress(
    dir: impl AsRef<Path>,
    device: &Device,
    mut progress: impl FnMut(Loaded<'_>),
) -> Result<Pretrained, LoadError> {
    let dir = dir.as_ref();
    let (mut config, eos) = read_config(dir)?;
    let weights = Weights::open(dir)?;
    config.tied_head |= !weights.contains(&llama::tensor_name("head"));
    let total = check(&config, &weights, dir)?;
    let mut bytes = 0;
    let decoder = Decoder::from_weights(config, device, |neutral, _| {
        let tensor = llama::tensor_name(neutral);
        let data = weights.read(&tensor)?;
        bytes += weights.stored_bytes(&tensor);
        progress(Loaded {
            tensor: &tensor,
            bytes,
            total,
        });
        Ok(data)
    })
    .map_err(|error| match error {
        BuildError::Weight { source, .. } => source,
        error => LoadError::Build {
            dir: dir.into(),
            source: Box::new(error),
        },
    })?;
    Ok(Pretrained { decoder, eos })
}

#[derive(Deserialize)]
struct Ends {
    eos_token_id: Option<Value>,
}

/// `config.json` as a neutral description, and the ids that end a text.
fn read_config(dir: &Path) -> Result<(DecoderConfig, Vec<u32>), LoadError> {
    let path = dir.join("config.json");
    let json: Value = read_json(&path)?;
    let found = json.get("model_type").and_then(Value::as_str);
    if found != Some("llama") {
        let found = found.map(str::to_owned);
        return Err(LoadError::ModelType {
            path,
            found,
            supported: &["llama"],
        });
    }
    let parsed = |source| LoadError::Json {
        path: path.clone(),
        source,
    };
    let ends: Ends = serde_json::from_value(json.clone()).map_err(parsed)?;
    let config: LlamaConfig = serde_json::from_value(json).map_err(parsed)?;
    let config = config.decoder().map_err(|refusal| {
        let path = path.clone();
        match refusal {
            Refusal::Unsupported { field, value } => LoadError::Unsupported { path, field, value },
            Refusal::Missing { field } => LoadError::MissingField { path, field },
        }
    })?;
    let generation = dir.join("generation_config.json");
    let more: Option<Ends> = generation
        .exists()
        .then(|| read_json(&generation))
        .transpose()?;
    let ids = [Some(ends), more]
        .into_iter()
        .flatten()
        .filter_map(|ends| ends.eos_token_id);
    let mut eos: Vec<u32> = ids
        .flat_map(|id| {
            if let Value::Array(ids) = id {
                ids
            } else {
                vec![id]
            }
        })
        .filter_map(|id| id.as_u64()?.try_into().ok())
        .collect();
    eos.sort_unstable();
    eos.dedup();
    Ok((config, eos))
}

/// Checks that the folder holds exactly the tensors the model needs, in their shapes, and answers
/// their bytes as stored. No data is read.
fn check(config: &DecoderConfig, weights: &Weights, dir: &Path) -> Result<u64, LoadError> {
    let mut needed = Vec::new();
    config
        .weights()
        .map_err(|source| LoadError::Build {
            dir: dir.into(),
            source: Box::new(source.into()),
        })?
        .into_iter()
        .try_for_each(|(neutral, shape)| {
            let name = llama::tensor_name(&neutral);
            let checked = weights.check(&name, &shape);
            needed.push(name);
            checked
        })?;
    let missing: Vec<String> = needed
        .iter()
        .filter(|name| !weights.contains(name))
        .cloned()
        .collect();
    let ignored = |name: &str| name == "lm_head.weight" || name.ends_with("rotary_emb.inv_freq");
    let known: std::collections::HashSet<&str> = needed.iter().map(String::as_str).collect();
    let unexpected: Vec<String> = weights
        .names()
        .filter(|name| !known.contains(name) && !ignored(name))
        .map(str::to_owned)
        .collect();
    if missing.is_empty() && unexpected.is_empty() {
        return Ok(needed.iter().map(|name| weights.stored_bytes(name)).sum());
    }
    Err(LoadError::Tensors {
        dir: dir.into(),
        missing,
        unexpected,
    })
}

fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, LoadError> {
    let text = files::read(path).map_err(|source| LoadError::Io {
        path: path.into(),
        source,
    })?;
    serde_json::from_slice(&text).map_err(|source| LoadError::Json {
        path: path.into(),
        source,
    })
}
