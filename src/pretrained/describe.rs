//! Reads `config.json` and `generation_config.json`: the family, its neutral description, and the ids that end a
//! text.

use std::path::Path;

use burn::tensor::DType;

use super::{
    LoadError, Warning,
    family::Family,
    fields::{Fields, Object, Refusal},
    gemma3::{GEMMA3, rounded},
    json,
    llama::LLAMA,
    qwen::{QWEN2, QWEN3},
};
use crate::model::DecoderConfig;

/// What the configuration files of a folder state about its model.
pub(super) struct Described {
    pub(super) config: DecoderConfig,
    /// Whether the text model is stored in a wrapper.
    pub(super) wrapped: bool,
    /// Whether the configuration explicitly states that the head is not the embedding.
    pub(super) untied: bool,
    pub(super) eos: Vec<u32>,
    pub(super) warnings: Vec<Warning>,
    /// The dtype that the configuration states.
    dtype: DType,
}

impl Described {
    pub(super) fn read(dir: &Path) -> Result<Self, LoadError> {
        let path = dir.join("config.json");
        let outer = Fields::new(json::read::<Object>(&path, LARGEST)?);
        let family = family(&path, &outer)?;
        let refused = |refusal| LoadError::refused(&path, refusal);
        let mut described = read(outer, family).map_err(refused)?;
        let generation = dir.join("generation_config.json");
        if generation.exists() {
            let more = eos_ids(&Fields::new(json::read::<Object>(&generation, LARGEST)?));
            described
                .eos
                .extend(more.map_err(|refusal| LoadError::refused(&generation, refusal))?);
        }
        described.eos.sort_unstable();
        described.eos.dedup();
        Ok(described)
    }

    /// The configuration for weights of the dtype that it states.
    pub(super) fn without_weights(self) -> DecoderConfig {
        let mut config = self.config;
        config.embedding_scale = config.embedding_scale.map(|s| rounded(s, self.dtype));
        config
    }
}

/// The most bytes of a configuration file. A usual one, labels and comments included, has a few kilobytes.
const LARGEST: u64 = 16 << 20;

const WRAPPER: &str = "gemma3";
const SUPPORTED: &[&str] = &["llama", "qwen2", "qwen3", "gemma3_text", WRAPPER];

/// The family, and whether its text model is stored in a wrapper.
fn family(path: &Path, outer: &Fields) -> Result<(Family, bool), LoadError> {
    let field = "model_type";
    let found = outer.get(field).map(|_| outer.shown(field));
    Ok(match found.as_deref() {
        Some("llama") => (LLAMA, false),
        Some("qwen2") => (QWEN2, false),
        Some("qwen3") => (QWEN3, false),
        Some("gemma3_text") => (GEMMA3, false),
        Some(WRAPPER) => (GEMMA3, true),
        _ => {
            return Err(LoadError::ModelType {
                path: path.into(),
                found,
                supported: SUPPORTED,
            });
        }
    })
}

fn read(outer: Fields, (family, wrapped): (Family, bool)) -> Result<Described, Refusal> {
    let inner = if wrapped {
        super::neutral::check(&outer, family.implements)?;
        let text = outer.object("text_config")?;
        let text = text.ok_or_else(|| outer.missing("text_config"))?;
        if !matches!(
            text.text("model_type")?.as_deref(),
            None | Some("gemma3_text")
        ) {
            return Err(text.unsupported("model_type"));
        }
        Some(text)
    } else {
        None
    };
    let text = inner.as_ref().unwrap_or(&outer);
    let (mut config, warnings) = family.decoder(text)?;
    let tied = match text.flag("tie_word_embeddings")? {
        None => outer.flag("tie_word_embeddings")?,
        tied => tied,
    };
    config.tied_head = tied.unwrap_or(config.tied_head);
    let mut eos = eos_ids(&outer)?;
    eos.extend(eos_ids(text)?);
    Ok(Described {
        config,
        wrapped,
        untied: tied == Some(false),
        eos,
        warnings,
        dtype: dtype(text).or_else(|| dtype(&outer)).unwrap_or(DType::F32),
    })
}

/// Ids that end a text. The field is one id, a list, or absent.
fn eos_ids(fields: &Fields) -> Result<Vec<u32>, Refusal> {
    let (field, expected) = ("eos_token_id", "a token id or a list of them");
    if let Ok(one) = fields.read(field, expected) {
        return Ok(one.into_iter().collect());
    }
    Ok(fields.read(field, expected)?.unwrap_or_default())
}

fn dtype(fields: &Fields) -> Option<DType> {
    let named = ["dtype", "torch_dtype"].map(|field| fields.text(field).ok().flatten());
    Some(match named.into_iter().flatten().next()?.as_str() {
        "bfloat16" => DType::BF16,
        "float16" => DType::F16,
        _ => DType::F32,
    })
}
