//! Why a session could not be written or read.

use std::{
    error::Error,
    io,
    path::{Path, PathBuf},
};

use burn::tensor::DType;

use crate::cache::CacheError;

/// Why a session could not be written or read. The cache is as it was, and so is a file that was to be
/// replaced.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SessionError {
    /// The file could not be read or written.
    #[error("{}: not read or written", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The file is no safetensors file, or cut short.
    #[error("{}: no whole safetensors file", path.display())]
    Safetensors {
        /// The file.
        path: PathBuf,
        /// What its parser says.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The file is something else than a session.
    #[error("{}: no session: its format is {}", path.display(), found.as_deref().unwrap_or("not said"))]
    Format {
        /// The file.
        path: PathBuf,
        /// What it says it is.
        found: Option<String>,
    },
    /// The file was written by a newer version of this crate.
    #[error("{}: version {found} of the format; the newest that is read is {newest}", path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: String,
        /// The newest that can be read.
        newest: u32,
    },
    /// A part of the file is not what was written.
    #[error("{}: {part} is damaged: its checksum is {found}, not {expected}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The tensor, or the facts in the header.
        part: String,
        /// The checksum the file says.
        expected: String,
        /// The checksum of what is there.
        found: String,
    },
    /// The session belongs to other weights.
    #[error("{}: a session of the model {found}, not {expected}", path.display())]
    Model {
        /// The file.
        path: PathBuf,
        /// The fingerprint of this model.
        expected: String,
        /// That of the file.
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
    /// The cache refused to hand out its state or to go on from another.
    #[error("{}: the cache refused", path.display())]
    Cache {
        /// The file.
        path: PathBuf,
        /// Why.
        source: CacheError,
    },
}

impl SessionError {
    /// What the cache refused about the session at `path`.
    pub(super) fn cache(path: &Path, source: CacheError) -> Self {
        Self::Cache {
            path: path.into(),
            source,
        }
    }
}
