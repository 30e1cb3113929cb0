//! Reads a model folder in Hugging Face's layout: `config.json` and safetensors files.
//!
//! The module never uses the network and never prints. A model family is data: a mapping of its configuration to
//! [`DecoderConfig`] and of its tensor names to neutral ones. The supported values of `model_type` are `llama`,
//! `qwen2`, `qwen3`, `gemma3_text`, and `gemma3`, of which the text model is read. A field that changes the
//! mathematics in a way that the crate does not implement is an error that names the field.

mod check;
mod describe;
mod error;
mod family;
mod fields;
mod gemma3;
mod header;
mod json;
mod llama;
mod mapped;
mod names;
mod neutral;
mod qwen;
mod rope;
mod source;
mod warning;
mod weights;
mod windows;

use std::path::Path;

use burn::tensor::Device;

use self::{check::check, describe::Described, names::Names, source::Folder, weights::Weights};
pub use self::{error::LoadError, warning::Warning};
use crate::model::{BuildError, Decoder, DecoderConfig};

/// A model read from a folder.
#[derive(Debug)]
#[non_exhaustive]
pub struct Pretrained {
    /// The decoder, in f32 whatever dtype is stored.
    pub decoder: Decoder,
    /// Ids that end a text, from both `config.json` and `generation_config.json`.
    pub eos: Vec<u32>,
    /// What the folder does not state, or states inconsistently.
    pub warnings: Vec<Warning>,
}

/// The progress of loading.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Loaded<'a> {
    /// The tensor that was just loaded, by its name in the file.
    pub tensor: &'a str,
    /// Bytes read so far, as stored.
    pub bytes: u64,
    /// Bytes of all tensors that the model needs, as stored.
    pub total: u64,
}

/// Loads the model in `dir` onto `device`.
///
/// # Errors
/// [`LoadError`]. It names the file and, if the error concerns one, the tensor or field, with what was expected and
/// what was found.
///
/// # Cost
/// Memory for the weights and, on top of them, for 16 MiB of one stored tensor. Files are memory-mapped while they are
/// read and must not be changed meanwhile. On most systems, cutting one short ends the process.
///
/// ```no_run
/// use burn::tensor::Device;
/// use kv_direct::{FullKv, pretrained::load};
///
/// let model = load("models/smollm2-135m-instruct", &Device::flex())?;
/// for warning in &model.warnings {
///     eprintln!("{warning}");
/// }
/// let mut cache = FullKv::new(&model.decoder.shape());
/// let logits = model.decoder.forward(&[504, 15893][..], &mut cache)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn load(dir: impl AsRef<Path>, device: &Device) -> Result<Pretrained, LoadError> {
    load_with_progress(dir, device, |_| {})
}

/// As [`load`], and calls `progress` after each tensor.
///
/// # Errors
/// As [`load`].
pub fn load_with_progress(
    dir: impl AsRef<Path>,
    device: &Device,
    progress: impl FnMut(Loaded<'_>),
) -> Result<Pretrained, LoadError> {
    let dir = dir.as_ref();
    let described = Described::read(dir)?;
    let weights = Weights::open(dir)?;
    let (mut config, mut warnings) = (described.config, described.warnings);
    if let Some(index) = &weights.index_ignored {
        let index = index.clone();
        warnings.push(Warning::IndexIgnored { index });
    }
    let names = if described.wrapped {
        Names::wrapped(config.post_norms, &weights)
    } else {
        Names::plain(config.post_norms)
    };
    let embedding = names.tensor("embedding");
    let head = weights.contains(names.head);
    if !head && described.untied {
        let tensor = names.head.into();
        warnings.push(Warning::HeadAbsent { tensor });
    }
    config.tied_head |= !head;
    config.embedding_scale = config
        .embedding_scale
        .map(|scale| gemma3::rounded(scale, weights.dtype(&embedding)));
    let total = check(&config, &names, &weights, dir)?;
    if config.tied_head && head && !weights.same(&embedding, names.head)? {
        let tensor = names.head.into();
        warnings.push(Warning::HeadIgnored { tensor });
    }

    let source = Folder {
        weights: &weights,
        names: &names,
        bytes: 0,
        total,
        progress,
    };
    let decoder = Decoder::from_source(config, device, source).map_err(|error| match error {
        BuildError::Weight { source, .. } => source,
        error => LoadError::Build {
            dir: dir.into(),
            source: Box::new(error),
        },
    })?;
    Ok(Pretrained {
        decoder,
        eos: described.eos,
        warnings,
    })
}

/// Reads the configuration in `dir` without its weights, which need not exist.
///
/// [`load`] also uses the weights, for two fields. Without a stored head, the head is the embedding. Gemma's
/// embedding scale is rounded to the dtype in which the embedding is stored. Here both come from the configuration
/// alone; if it states no dtype, the scale is rounded to f32.
///
/// # Errors
/// As [`load`], for the two configuration files.
///
/// ```no_run
/// let config = kv_direct::pretrained::config("models/gemma3-270m")?;
/// let windows = config.layers.iter().filter(|layer| layer.window.is_some());
/// println!("{} of {} layers have a sliding window", windows.count(), config.layers.len());
/// # Ok::<(), kv_direct::pretrained::LoadError>(())
/// ```
pub fn config(dir: impl AsRef<Path>) -> Result<DecoderConfig, LoadError> {
    Ok(Described::read(dir.as_ref())?.without_weights())
}
