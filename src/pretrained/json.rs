//! JSON files of a folder, of bounded size.

use std::{io::Read, path::Path};

use serde::de::DeserializeOwned;

use super::LoadError;
use crate::files;

/// Reads a file of at most `largest` bytes.
pub(super) fn read<T: DeserializeOwned>(path: &Path, largest: u64) -> Result<T, LoadError> {
    let io = |source| LoadError::Io {
        path: path.into(),
        source,
    };
    let file = files::open(path).map_err(io)?;
    let bytes = file.metadata().map_err(io)?.len();
    if bytes > largest {
        return Err(LoadError::TooLarge {
            path: path.into(),
            bytes,
            largest,
        });
    }
    let mut text = Vec::new();
    file.take(largest).read_to_end(&mut text).map_err(io)?;
    serde_json::from_slice(&files::json(text)).map_err(|source| LoadError::Json {
        path: path.into(),
        source,
    })
}
