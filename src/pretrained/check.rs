//! Checks that a folder holds exactly the tensors that its model needs.

use std::{collections::HashSet, path::Path};

use super::{LoadError, names::Names, weights::Weights};
use crate::model::DecoderConfig;

/// Checks that the folder holds exactly the tensors that the model needs, with the right shapes. Returns their bytes
/// as stored. No data is read.
pub(super) fn check(
    config: &DecoderConfig,
    names: &Names,
    weights: &Weights,
    dir: &Path,
) -> Result<u64, LoadError> {
    let mut needed = Vec::new();
    config
        .weights()
        .map_err(|source| LoadError::Build {
            dir: dir.into(),
            source: Box::new(source.into()),
        })?
        .into_iter()
        .try_for_each(|(neutral, shape)| {
            let name = names.tensor(&neutral);
            let checked = weights.check(&name, &shape);
            needed.push(name);
            checked
        })?;
    let missing: Vec<String> = needed
        .iter()
        .filter(|name| !weights.contains(name))
        .cloned()
        .collect();
    let known: HashSet<&str> = needed.iter().map(String::as_str).collect();
    let unexpected: Vec<String> = weights
        .names()
        .filter(|name| !known.contains(name) && !names.ignored(name))
        .map(str::to_owned)
        .collect();
    if missing.is_empty() && unexpected.is_empty() {
        return Ok(needed.iter().map(|name| weights.stored_bytes(name)).sum());
    }
    Err(LoadError::Tensors {
        dir: dir.into(),
        missing,
        unexpected,
    })
}
