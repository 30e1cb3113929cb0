//! Safetensors files of a model folder: where each tensor is stored, and how one is read.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use burn::tensor::DType;
use memmap2::Mmap;
use safetensors::tensor::{Dtype, TensorInfo};
use serde::Deserialize;

use super::{LoadError, header, json, mapped};
use crate::{
    exact::{Numbers, PANEL},
    files,
};

/// All tensors of a folder, by name.
#[derive(Debug)]
pub(super) struct Weights {
    files: Vec<PathBuf>,
    tensors: BTreeMap<String, Stored>,
    /// The index, if there is one that the folder's single file takes the place of.
    pub(super) index_ignored: Option<PathBuf>,
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
    /// Reads the header of `model.safetensors`; if there is none, those of exactly the files that the index names; without
    /// an index, those of every safetensors file.
    pub(super) fn open(dir: &Path) -> Result<Self, LoadError> {
        let index = dir.join("model.safetensors.index.json");
        let single = dir.join("model.safetensors");
        let mut weights = Self {
            files: Vec::new(),
            tensors: BTreeMap::new(),
            index_ignored: None,
        };
        if single.exists() {
            weights.add(single, |_| true)?;
            weights.index_ignored = Some(index).filter(|index| index.exists());
        } else if index.exists() {
            let map = json::read::<Index>(&index, LARGEST_INDEX)?.weight_map;
            for shard in map.values().collect::<BTreeSet<_>>() {
                // A name that contains a path could point out of the folder.
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

    /// Adds the tensors of one file that `wanted` accepts.
    fn add(&mut self, path: PathBuf, wanted: impl Fn(&str) -> bool) -> Result<(), LoadError> {
        let (start, metadata) = header::read(&path)?;
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

    /// The float dtype of a stored tensor; f32 if it has another dtype or does not exist.
    pub(super) fn dtype(&self, name: &str) -> DType {
        match self.tensors.get(name).map(|stored| stored.info.dtype) {
            Some(Dtype::F16) => DType::F16,
            Some(Dtype::BF16) => DType::BF16,
            _ => DType::F32,
        }
    }

    /// Whether two stored tensors have the same shape and the same numbers.
    pub(super) fn same(&self, one: &str, other: &str) -> Result<bool, LoadError> {
        let shape = &self.tensors[one].info.shape;
        if self.check(other, shape).is_err() {
            return Ok(false);
        }
        let dtypes = [one, other].map(|name| self.dtype(name));
        let ((_, ones), (_, others)) = (self.pieces(one)?, self.pieces(other)?);
        Ok(ones.into_iter().zip(others).all(|(one, other)| {
            Numbers::stored(&one, dtypes[0]).same(Numbers::stored(&other, dtypes[1]))
        }))
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

    /// Passes the rows of a tensor to `take`, in order, some at a time, with the index of the first. The tensor must
    /// exist and be [`check`](Self::check)ed.
    pub(super) fn rows(
        &self,
        name: &str,
        mut take: impl FnMut(usize, Numbers<'_>),
    ) -> Result<(), LoadError> {
        let (rows, pieces) = self.pieces(name)?;
        for (index, piece) in pieces.into_iter().enumerate() {
            take(index * rows, Numbers::stored(&piece, self.dtype(name)));
        }
        Ok(())
    }

    /// A tensor, mapped in pieces of whole rows, and the number of rows of a piece.
    fn pieces(&self, name: &str) -> Result<(usize, Vec<Mmap>), LoadError> {
        let Stored { file, at, info } = &self.tensors[name];
        let path = &self.files[*file];
        let (from, to) = info.data_offsets;
        let count = info.shape.first().map_or(1, |&rows| rows.max(1));
        let width: usize = info.shape.iter().skip(1).product();
        let rows = (PIECE / (PANEL * width.max(1))).max(1) * PANEL;
        let bytes = (rows * ((to - from) / count)).max(1);
        let pieces = files::open(path);
        let pieces = pieces.and_then(|file| mapped::pieces(&file, *at, to - from, bytes));
        let pieces = pieces.map_err(|source| LoadError::Io {
            path: path.clone(),
            source,
        })?;
        Ok((rows, pieces))
    }
}

/// Numbers of a piece: enough for few system calls, few enough to be negligible beside the weights.
const PIECE: usize = 1 << 22;
/// Enough for a hundred thousand tensors.
const LARGEST_INDEX: u64 = 64 << 20;
