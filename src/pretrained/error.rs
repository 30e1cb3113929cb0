//! Why a model folder was refused.

use std::{
    error::Error,
    io,
    path::{Path, PathBuf},
};

use super::fields::Refusal;
use crate::model::BuildError;

/// Why a model folder could not be loaded. Every variant names the file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// A file could not be read.
    #[error("cannot read {}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// A file is not the JSON that it should be.
    #[error("{} is not valid", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The error of the parser.
        source: serde_json::Error,
    },
    /// A JSON file of a size that no model folder has.
    #[error("{} has {bytes} bytes; at most {largest} are read", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: u64,
        /// The largest size that is accepted.
        largest: u64,
    },
    /// A model family that the crate does not run.
    #[error("{} has model_type {found:?}; supported are {supported:?}", path.display())]
    ModelType {
        /// The configuration.
        path: PathBuf,
        /// Its `model_type`, if it has one.
        found: Option<String>,
        /// The values that are supported.
        supported: &'static [&'static str],
    },
    /// A field that changes the mathematics has a value the crate does not implement.
    #[error("{} has {field} = {value}, which is not implemented", path.display())]
    Unsupported {
        /// The configuration.
        path: PathBuf,
        /// The field.
        field: String,
        /// Its value.
        value: String,
    },
    /// A field is missing that the family or another field requires.
    #[error("{} lacks {field}", path.display())]
    MissingField {
        /// The configuration.
        path: PathBuf,
        /// The field.
        field: String,
    },
    /// A field has a value of another kind than it should.
    #[error("{} has {field} = {value}; it should be {expected}", path.display())]
    InvalidField {
        /// The file.
        path: PathBuf,
        /// The field.
        field: String,
        /// Its value.
        value: String,
        /// What it should be.
        expected: &'static str,
    },
    /// A field does not fit another one.
    #[error("{} has {field} = {value}, which does not fit {other}", path.display())]
    Conflict {
        /// The configuration.
        path: PathBuf,
        /// The field.
        field: String,
        /// Its value.
        value: String,
        /// The other field, with its value where that helps.
        other: String,
    },
    /// The index names a shard that does not exist.
    #[error("{} names shard {shard}, which is not in the folder", index.display())]
    MissingShard {
        /// The index.
        index: PathBuf,
        /// The shard's file name.
        shard: String,
    },
    /// The folder has no safetensors file.
    #[error("{} holds no safetensors file", dir.display())]
    NoWeights {
        /// The folder.
        dir: PathBuf,
    },
    /// The header of a safetensors file cannot be parsed.
    #[error("{} has a damaged header", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: Box<dyn Error + Send + Sync>,
    },
    /// A safetensors file has another length than its header states.
    #[error("{} has {found} bytes, its header asks for {expected}", path.display())]
    Length {
        /// The file.
        path: PathBuf,
        /// Bytes according to the header.
        expected: u64,
        /// Bytes of the file.
        found: u64,
    },
    /// Two files hold the same tensor.
    #[error("{tensor} is in {} and in {}", first.display(), second.display())]
    Duplicate {
        /// The tensor.
        tensor: String,
        /// One file.
        first: PathBuf,
        /// The other.
        second: PathBuf,
    },
    /// The files lack tensors that the model needs, or have tensors that it does not need. Lists all of them.
    #[error("{}{}{}", dir.display(), listed(" lacks the tensors", missing), listed(" has the unexpected tensors", unexpected))]
    Tensors {
        /// The folder.
        dir: PathBuf,
        /// Tensors that are needed and not stored.
        missing: Vec<String>,
        /// Tensors that are stored and not needed.
        unexpected: Vec<String>,
    },
    /// A tensor has another shape than the configuration requires.
    #[error("{tensor} in {} has shape {found:?}, the configuration asks for {expected:?}", path.display())]
    Shape {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The shape according to the configuration.
        expected: Vec<usize>,
        /// The shape in the file.
        found: Vec<usize>,
    },
    /// A tensor is stored in a dtype that the crate does not read.
    #[error("{tensor} in {} is stored as {found}; f32, f16 and bf16 can be read", path.display())]
    Dtype {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its dtype.
        found: String,
    },
    /// The decoder could not be built.
    #[error("the model in {} cannot be built", dir.display())]
    Build {
        /// The folder.
        dir: PathBuf,
        /// Why.
        source: Box<BuildError<Self>>,
    },
}

impl LoadError {
    /// The error for a refused field of `path`.
    pub(super) fn refused(path: &Path, refusal: Refusal) -> Self {
        let path = path.into();
        match refusal {
            Refusal::Unsupported { field, value } => Self::Unsupported { path, field, value },
            Refusal::Missing { field } => Self::MissingField { path, field },
            Refusal::Invalid {
                field,
                value,
                expected,
            } => Self::InvalidField {
                path,
                field,
                value,
                expected,
            },
            Refusal::Conflict {
                field,
                value,
                other,
            } => Self::Conflict {
                path,
                field,
                value,
                other,
            },
        }
    }
}

/// `what` and the names; an empty string if there are no names.
fn listed(what: &str, names: &[String]) -> String {
    if names.is_empty() {
        String::new()
    } else {
        format!("{what} {names:?}")
    }
}
