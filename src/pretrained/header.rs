//! The header of a safetensors file. It is not trusted: a length that it states is compared with the file's length
//! before anything of that length is allocated.

use std::{io::Read, path::Path};

use safetensors::tensor::Metadata;

use super::LoadError;
use crate::files;

/// Reads and checks the header of a file. Also returns where the data starts.
pub(super) fn read(path: &Path) -> Result<(u64, Metadata), LoadError> {
    let io = |source| LoadError::Io {
        path: path.into(),
        source,
    };
    let wrong = |expected, found| LoadError::Length {
        path: path.into(),
        expected,
        found,
    };
    let mut file = files::open(path).map_err(io)?;
    let found = file.metadata().map_err(io)?.len();
    let mut length = [0; 8];
    if found < 8 {
        return Err(wrong(8, found));
    }
    file.read_exact(&mut length).map_err(io)?;
    let start = u64::from_le_bytes(length).saturating_add(8);
    if start > found {
        return Err(wrong(start, found));
    }
    let length = usize::try_from(start - 8).map_err(|_| wrong(start, found))?;
    if length > LARGEST_HEADER {
        return Err(LoadError::Header {
            path: path.into(),
            source: format!("{length} bytes long").into(),
        });
    }
    let mut header = vec![0; length];
    file.read_exact(&mut header).map_err(io)?;
    let metadata: Metadata =
        serde_json::from_slice(&header).map_err(|source| LoadError::Header {
            path: path.into(),
            source: source.into(),
        })?;
    let expected = start.saturating_add(metadata.data_len() as u64);
    if expected == found {
        Ok((start, metadata))
    } else {
        Err(wrong(expected, found))
    }
}

/// The limit of the format, in bytes.
const LARGEST_HEADER: usize = 100_000_000;
