//! Writes a session: to a temporary name, then synced, then renamed.

use std::{
    borrow::Cow,
    fs::{File, OpenOptions},
    io,
    path::Path,
};

use burn::tensor::{DType, Tensor};
use safetensors::{Dtype, SafeTensorError, View, serialize_to_file};

use super::{
    FORMAT, SessionError, VERSION,
    facts::{CHECKSUM, Facts, OPTION, checksum_key, of_facts, of_tensor},
};
use crate::{
    cache::{CacheBackend, CacheError, StateValue},
    fingerprint::Fingerprint,
};

/// Writes everything that `cache` needs to continue to a file. Replaces a file at `path`.
///
/// The file is written to a temporary folder beside `path`, synced to the disk and moved. At any time, `path` is
/// either the old file or the new one. If the process is killed, a folder may remain whose name begins with
/// `.kv-direct-` and ends in `.tmp`. Only its owner can read the file. A link at `path` is replaced; a folder, a pipe or
/// a device is not.
///
/// # Errors
/// [`SessionError`] if the file cannot be written, or if the cache does not return its state.
///
/// # Cost
/// Every tensor is read twice, one at a time. One tensor is held on top of the cache.
pub fn save<C>(path: &Path, cache: &C, model: &Fingerprint) -> Result<(), SessionError>
where
    C: CacheBackend + ?Sized,
{
    let refused = |source| SessionError::cache(path, source);
    let state = cache.state().map_err(refused)?;
    let mut facts: Facts = [
        ("format", FORMAT.into()),
        ("version", VERSION.to_string()),
        (
            "written_by",
            concat!("kv-direct ", env!("CARGO_PKG_VERSION")).into(),
        ),
        ("fingerprint", model.to_string()),
        ("backend", state.backend().into()),
        ("model", state.model().into()),
    ]
    .map(|(key, value): (&str, String)| (key.to_owned(), value))
    .into();
    for (name, value) in state.options() {
        facts.insert(format!("{OPTION}.{name}"), value.into());
    }
    let mut parts = Vec::new();
    for (name, value) in state.values() {
        let part = Part::new(name, value)?;
        let bytes = part
            .bytes()
            .map_err(|error| refused(CacheError::Backend(Box::new(error))))?;
        let checksum = of_tensor(name, part.dtype, &part.shape, &bytes);
        facts.insert(checksum_key(name), checksum);
        parts.push((name, part));
    }
    facts.insert(CHECKSUM.into(), of_facts(&facts));
    write(path, parts, facts, File::sync_all)
}

/// Replaces `path` by a file with these tensors. `sync` makes a change in the folder durable.
fn write(
    path: &Path,
    parts: Vec<(&str, Part<'_>)>,
    facts: Facts,
    sync: impl FnOnce(&File) -> io::Result<()>,
) -> Result<(), SessionError> {
    let io = |source| SessionError::Io {
        path: path.into(),
        source,
    };
    let folder = match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    // Opened first, so that a folder that cannot be opened is refused before anything is replaced.
    let on_disk = cfg!(unix)
        .then(|| File::open(folder))
        .transpose()
        .map_err(io)?;
    write_aside(path, folder, parts, facts).map_err(io)?;
    // The new name is durable once the folder is synced.
    on_disk
        .map_or(Ok(()), |folder| sync(&folder))
        .map_err(|source| SessionError::NotSynced {
            path: path.into(),
            source,
        })
}

/// Writes to a temporary name, synced, and renames.
fn write_aside(
    path: &Path,
    folder: &Path,
    parts: Vec<(&str, Part<'_>)>,
    facts: Facts,
) -> io::Result<()> {
    // Something special, such as a pipe, is not replaced by a file.
    if let Ok(there) = path.symlink_metadata()
        && !there.is_file()
        && !there.is_symlink()
    {
        let message = "not a regular file";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
    }
    // Not the name of the file, which may be as long as names can be.
    let aside = tempfile::Builder::new()
        .prefix(".kv-direct-")
        .suffix(".tmp")
        .tempdir_in(folder)?;
    let temporary = aside.path().join("session");
    serialize_to_file(parts, Some(facts), &temporary).map_err(|error| match error {
        SafeTensorError::IoError(error) => error,
        error => io::Error::other(error),
    })?;
    let written = OpenOptions::new().write(true).open(&temporary)?;
    written.sync_all()?;
    std::fs::rename(&temporary, path)
}

/// A value of a state as safetensors writes it.
struct Part<'a> {
    value: &'a StateValue,
    dtype: Dtype,
    shape: Vec<usize>,
}

impl<'a> Part<'a> {
    fn new(name: &str, value: &'a StateValue) -> Result<Self, SessionError> {
        let (dtype, shape) = match value {
            StateValue::Tensor(tensor) => {
                let unwritable = |dtype| SessionError::Dtype {
                    name: name.into(),
                    dtype,
                };
                let dtype = tensor.dtype();
                (
                    stored(dtype).ok_or_else(|| unwritable(dtype))?,
                    tensor.dims().to_vec(),
                )
            }
            StateValue::Integers(values) => (Dtype::U64, vec![values.len()]),
            StateValue::Ids(values) => (Dtype::U32, vec![values.len()]),
            StateValue::Floats(values) => (Dtype::F32, vec![values.len()]),
        };
        Ok(Self {
            value,
            dtype,
            shape,
        })
    }

    fn bytes(&self) -> Result<Vec<u8>, burn::tensor::ExecutionError> {
        Ok(match self.value {
            StateValue::Tensor(tensor) => tensor_bytes(tensor.clone())?,
            StateValue::Integers(values) => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            StateValue::Ids(values) => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            StateValue::Floats(values) => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        })
    }
}

fn tensor_bytes(tensor: Tensor<3>) -> Result<Vec<u8>, burn::tensor::ExecutionError> {
    let data = tensor.try_into_data()?;
    Ok(data.as_bytes().to_vec())
}

impl View for Part<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let bytes = self.bytes();
        bytes
            .expect("a tensor that was read for its checksum can be read")
            .into()
    }

    fn data_len(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.bitsize() / 8
    }
}

/// The dtype in a file for the dtype of a tensor; `None` if a file cannot hold it.
fn stored(dtype: DType) -> Option<Dtype> {
    match dtype {
        DType::F64 => Some(Dtype::F64),
        DType::F32 => Some(Dtype::F32),
        DType::F16 => Some(Dtype::F16),
        DType::BF16 => Some(Dtype::BF16),
        _ => None,
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_cannot_be_synced_leaves_the_new_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("chat");
        std::fs::write(&path, "old").expect("a file");
        let value = StateValue::Ids(vec![7]);
        let parts = vec![("ids", Part::new("ids", &value).expect("ids can be written"))];
        let sync = |_: &File| Err(io::Error::other("no disk"));
        let failed = write(&path, parts, Facts::default(), sync);
        let text = failed.as_ref().expect_err("it was not synced").to_string();
        assert!(
            matches!(failed, Err(SessionError::NotSynced { .. })),
            "{text}"
        );
        assert!(
            text.ends_with("written, but it may not survive a power failure"),
            "{text}"
        );
        assert_ne!(std::fs::read(&path).expect("the new file"), b"old");
    }
}
