//! Safetensors files of a model folder: which tensor is where, and reading one as f32.
//!
//! Headers are hostile until checked: nothing is allocated by their word before the file's length
//! confirms it.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{self, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
};

use burn::tensor::{bf16, f16};
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde::Deserialize;

use super::LoadError;
use crate::files;

/// All tensors of a folder, by name.
#[derive(Debug)]
pub(super) struct Weights {
    files: Vec<PathBuf>,
    tensors: BTreeMap<String, Stored>,
}

#[derive(Debug)]
struct Stored {
    file: usize,
    /// Where the data starts, from the beginning of the file.
    at: u64,
    info: TensorInfo,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Weights {
    /// Reads the headers of exactly the files the index names; without an index those of
    /// `model.safetensors`, or else of every safetensors file.
    pub(super) fn open(dir: &Path) -> Result<Self, LoadError> {
        let index = dir.join("model.safetensors.index.json");
        let single = dir.join("model.safetensors");
        let mut weights = Self {
            files: Vec::new(),
            tensors: BTreeMap::new(),
        };
        if index.exists() {
            let map = super::read_json::<Index>(&index)?.weight_map;
            for shard in map.values().collect::<BTreeSet<_>>() {
                // A name with a path in it could leave the folder.
                let path = dir.join(shard);
                if Path::new(shard)
                    .file_name()
                    .is_none_or(|name| name != shard.as_str())
                    || !path.is_file()
                {
                    return Err(LoadError::MissingShard {
                        index,
                        shard: shard.clone(),
                    });
                }
                weights.add(path, |name| map.get(name) == Some(shard))?;
            }
            let missing: Vec<String> = map
                .into_keys()
                .filter(|name| !weights.tensors.contains_key(name))
                .collect();
            if !missing.is_empty() {
                return Err(LoadError::Tensors {
                    dir: dir.into(),
                    missing,
                    unexpected: Vec::new(),
                });
            }
        } else if single.exists() {
            weights.add(single, |_| true)?;
        } else {
            let entries = dir.read_dir().map_err(|source| LoadError::Io {
                path: dir.into(),
                source,
            })?;
            let mut files: Vec<PathBuf> = entries
                .filter_map(|entry| Some(entry.ok()?.path()))
                .filter(|path| {
                    path.extension()
                        .is_some_and(|extension| extension == "safetensors")
                })
                .collect();
            files.sort();
            for path in files {
                weights.add(path, |_| true)?;
            }
        }
        if weights.tensors.is_empty() {
            return Err(LoadError::NoWeights { dir: dir.into() });
        }
        Ok(weights)
    }

    /// Adds the tensors of one file that `wanted` names.
    fn add(&mut self, path: PathBuf, wanted: impl Fn(&str) -> bool) -> Result<(), LoadError> {
        let (start, metadata) = header(&path)?;
        let file = self.files.len();
        for (name, info) in metadata.tensors() {
            if !wanted(&name) {
                continue;
            }
            let at = start + info.data_offsets.0 as u64;
            if let Some(before) = self.tensors.insert(
                name.clone(),
                Stored {
                    file,
                    at,
                    info: info.clone(),
                },
            ) {
                let first = self.files[before.file].clone();
                return Err(LoadError::Duplicate {
                    tensor: name,
                    first,
                    second: path,
                });
            }
        }
        self.files.push(path);
        Ok(())
    }

    pub(super) fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Bytes of a tensor as stored.
    pub(super) fn stored_bytes(&self, name: &str) -> u64 {
        self.tensors.get(name).map_or(0, |stored| {
            let (from, to) = stored.info.data_offsets;
            (to - from) as u64
        })
    }

    /// Checks that `name` is stored in a float dtype and has `shape`, without reading its data.
    pub(super) fn check(&self, name: &str, shape: &[usize]) -> Result<(), LoadError> {
        let Some(Stored { file, info, .. }) = self.tensors.get(name) else {
            return Ok(());
        };
        let (path, tensor) = (self.files[*file].clone(), name.to_owned());
        if info.shape != shape {
            let (expected, found) = (shape.to_vec(), info.shape.clone());
            return Err(LoadError::Shape {
                path,
                tensor,
                expected,
                found,
            });
        }
        match info.dtype {
            Dtype::F32 | Dtype::F16 | Dtype::BF16 => Ok(()),
            other => Err(LoadError::Dtype {
                path,
                tensor,
                found: format!("{other:?}"),
            }),
        }
    }

    /// The tensor's elements in f32. It must be there and [`check`](Self::check)ed.
    pub(super) fn read(&self, name: &str) -> Result<Vec<f32>, LoadError> {
        let Stored { file, at, info } = &self.tensors[name];
        let path = &self.files[*file];
        let (from, to) = info.data_offsets;
        let bytes = read_at(path, *at, to - from).map_err(|source| LoadError::Io {
            path: path.clone(),
            source,
        })?;
        Ok(match info.dtype {
            Dtype::F16 => halves(&bytes)
                .map(|bits| f16::from_bits(bits).to_f32())
                .collect(),
            Dtype::BF16 => halves(&bytes)
                .map(|bits| bf16::from_bits(bits).to_f32())
                .collect(),
            _ => bytes
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect(),
        })
    }
}

fn halves(bytes: &[u8]) -> impl Iterator<Item = u16> {
    bytes
        .chunks_exact(2)
        .map(|b| u16::from_le_bytes([b[0], b[1]]))
}

fn read_at(path: &Path, at: u64, length: usize) -> io::Result<Vec<u8>> {
    let mut file = files::open(path)?;
    file.seek(SeekFrom::Start(at))?;
    let mut bytes = vec![0; length];
    file.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// Where the data of a file starts, and its checked header.
fn header(path: &Path) -> Result<(u64, Metadata), LoadError> {
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

/// The format's own limit.
const LARGEST_HEADER: usize = 100_000_000;
