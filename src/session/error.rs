//! Why a session could not be written or read.

use std::{
    error::Error,
    io,
    path::{Path, PathBuf},
};

use burn::tensor::DType;

use crate::cache::CacheError;

/// Why a session could not be written or read. The cache has not changed. A file that was to be replaced has not
/// changed either, except with [`NotSynced`](Self::NotSynced).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SessionError {
    /// The file could not be read or written.
    #[error("{}: not read or written", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// The new file is in place, but its folder could not be synced.
    #[error("{}: written, but it may not survive a power failure", path.display())]
    NotSynced {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// The file is not a safetensors file, or was cut short.
    #[error("{}: no whole safetensors file", path.display())]
    Safetensors {
        /// The file.
        path: PathBuf,
        /// The error of the parser.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The file is not a session.
    #[error("{}: no session: its format is {}", path.display(), found.as_deref().unwrap_or("not said"))]
    Format {
        /// The file.
        path: PathBuf,
        /// The format that it states, if any.
        found: Option<String>,
    },
    /// The file has another version of the format.
    #[error(
        "{}: version {} of the format, but version {expected} is read",
        path.display(),
        found.as_deref().unwrap_or("unknown")
    )]
    Version {
        /// The file.
        path: PathBuf,
        /// The version that can be read.
        expected: u32,
        /// The version that the file states, if any.
        found: Option<String>,
    },
    /// A part of the file is damaged.
    #[error("{}: {part} is damaged: its checksum is {found}, not {expected}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The tensor, or the facts in the header.
        part: String,
        /// The checksum that the file states.
        expected: String,
        /// The checksum of the part.
        found: String,
    },
    /// The session belongs to other weights.
    #[error("{}: a session of the model {found}, not {expected}", path.display())]
    Model {
        /// The file.
        path: PathBuf,
        /// The fingerprint of this model.
        expected: String,
        /// The fingerprint in the file.
        found: String,
    },
    /// A dtype that a session file cannot hold.
    #[error("{name} is of {dtype:?}, which a session cannot hold")]
    Dtype {
        /// The tensor.
        name: String,
        /// Its dtype.
        dtype: DType,
    },
    /// The cache refused to return its state, or to continue from that of the file.
    #[error("{}: the cache refused", path.display())]
    Cache {
        /// The file.
        path: PathBuf,
        /// Why.
        source: CacheError,
    },
}

impl SessionError {
    /// The error of a cache for the session at `path`.
    pub(super) fn cache(path: &Path, source: CacheError) -> Self {
        Self::Cache {
            path: path.into(),
            source,
        }
    }
}
