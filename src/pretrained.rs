//! Reads a model folder as Hugging Face lays it out: `config.json` and safetensors files.
//!
//! Nothing here touches the network, and nothing is printed. A family is data: a mapping of its
//! configuration to [`DecoderConfig`] and of its tensor names to neutral ones. What can be read, by
//! `model_type`: `llama`, `qwen2`, `qwen3`, `gemma3_text`, and the text model of `gemma3`. A field that
//! changes the mathematics in a way the crate does not implement is an error that names it.

mod check;
mod decode;
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
mod warning;
mod weights;
mod windows;

use std::path::Path;

use burn::tensor::Device;

use self::{check::check, describe::Described, names::Names, weights::Weights};
pub use self::{error::LoadError, warning::Warning};
use crate::model::{BuildError, Decoder, DecoderConfig};

/// A model read from a folder.
#[derive(Debug)]
#[non_exhaustive]
pub struct Pretrained {
    /// The decoder, in f32 whatever dtype was stored.
    pub decoder: Decoder,
    /// Ids that end a text: those of `config.json` and of `generation_config.json` together.
    pub eos: Vec<u32>,
    /// What the folder leaves open or contradicts itself in.
    pub warnings: Vec<Warning>,
}

/// How far loading has come.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Loaded<'a> {
    /// The tensor that is in place now, by its name in the file.
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
/// The weights in f32, and on top of them a few rows of one tensor as read and 16 MiB of it as stored.
/// Files are mapped while they are read: leave them alone meanwhile. Cutting one short ends the
/// process on most systems.
///
/// ```no_run
/// use burn::tensor::Device;
/// use kv_direct::{cache::FullKv, pretrained::load};
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

/// [`load`], telling `progress` of every tensor once it is in place.
///
/// # Errors
/// As [`load`].
pub fn load_with_progress(
    dir: impl AsRef<Path>,
    device: &Device,
    mut progress: impl FnMut(Loaded<'_>),
) -> Result<Pretrained, LoadError> {
    let dir = dir.as_ref();
    let described = Described::read(dir)?;
    let weights = Weights::open(dir)?;
    let (mut config, mut warnings) = (described.config, described.warnings);
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

    let mut bytes = 0;
    let mut report = |tensor: &str| {
        bytes += weights.stored_bytes(tensor);
        progress(Loaded {
            tensor,
            bytes,
            total,
        });
    };
    // A tensor is in place when the next one is asked for, or nothing is left to ask for.
    let mut last: Option<String> = None;
    let decoder = Decoder::from_weights(config, device, |neutral, _| {
        let tensor = names.tensor(neutral);
        let data = weights.read(&tensor);
        if let Some(last) = last.replace(tensor) {
            report(&last);
        }
        data
    })
    .map_err(|error| match error {
        BuildError::Weight { source, .. } => source,
        error => LoadError::Build {
            dir: dir.into(),
            source: Box::new(error),
        },
    })?;
    if let Some(last) = last {
        report(&last);
    }
    Ok(Pretrained {
        decoder,
        eos: described.eos,
        warnings,
    })
}

/// The configuration in `dir`, by `config.json` alone: the weights need not be there, and nothing is
/// read of them.
///
/// Where there are weights, [`load`] goes by them in two points: without a stored head the head is the
/// embedding, and Gemma's embedding scale is rounded to the dtype the embedding is stored in. Here the
/// configuration's own word counts, f32 if it names no dtype.
///
/// # Errors
/// As [`load`] for the two configuration files.
///
/// ```no_run
/// let config = kv_direct::pretrained::config("models/gemma3-270m")?;
/// let windows = config.layers.iter().filter(|layer| layer.window.is_some());
/// println!("{} of {} layers have a window", windows.count(), config.layers.len());
/// # Ok::<(), kv_direct::pretrained::LoadError>(())
/// ```
pub fn config(dir: impl AsRef<Path>) -> Result<DecoderConfig, LoadError> {
    Ok(Described::read(dir.as_ref())?.alone())
}
