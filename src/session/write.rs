//! Writes a session: to a temporary name, then synced, then renamed.

use std::{
    fs::File,
    io::{self, BufWriter, Write as _},
    path::Path,
};

use super::{
    FORMAT, SessionError, VERSION,
    facts::{CHECKSUM, Facts, MODEL, OPTION, checksum_key, of_facts, of_tensor},
    header::{header, sort},
    part::Part,
};
use crate::{
    cache::{CacheBackend, CacheError},
    fingerprint::Fingerprint,
};

/// Writes everything that `cache` needs to continue to a file. Replaces a file at `path`.
///
/// The file is written under a temporary name beside `path`, synced to the disk and renamed. At any time, `path` is
/// either the old file or the new one. If the process is killed, a file may remain whose name begins with
/// `.kv-direct-` and ends in `.tmp`. Only its owner can read the file. A link at `path` is replaced; a folder, a pipe or
/// a device is not.
///
/// # Errors
/// [`SessionError`] if the file cannot be written, or if the cache does not return its state.
///
/// # Cost
/// The [`State`](crate::cache::State) of the cache and one of its tensors are held on top of the cache. Every tensor is
/// read twice.
pub fn save<C>(path: &Path, cache: &C, model: &Fingerprint) -> Result<(), SessionError>
where
    C: CacheBackend + ?Sized,
{
    let refused = |source| SessionError::cache(path, source);
    let state = cache.state().map_err(refused)?;
    let mut facts: Facts = [
        ("format", FORMAT.into()),
        ("version", VERSION.to_string()),
        ("fingerprint", model.to_string()),
        ("backend", state.backend().into()),
    ]
    .map(|(key, value): (&str, String)| (key.to_owned(), value))
    .into();
    let model = state.model().map(|field| (MODEL, field));
    let options = state.options().map(|field| (OPTION, field));
    facts.extend(
        model
            .chain(options)
            .map(|(word, (name, value))| (format!("{word}.{name}"), value.to_owned())),
    );
    let parts = state.values().map(|(name, value)| Part::new(name, value));
    let mut parts = parts.collect::<Result<Vec<_>, _>>()?;
    sort(&mut parts);
    for part in &parts {
        let bytes = part
            .bytes()
            .map_err(|error| refused(CacheError::Backend(Box::new(error))))?;
        let checksum = of_tensor(part.name, part.dtype, &part.shape, &bytes);
        facts.insert(checksum_key(part.name), checksum);
    }
    facts.insert(CHECKSUM.into(), of_facts(&facts));
    write(path, &parts, &facts, File::sync_all)
}

/// Replaces `path` by a file with these tensors. `sync` makes a change in the folder durable.
fn write(
    path: &Path,
    parts: &[Part<'_>],
    facts: &Facts,
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
fn write_aside(path: &Path, folder: &Path, parts: &[Part<'_>], facts: &Facts) -> io::Result<()> {
    // Something special, such as a pipe, is not replaced by a file.
    if let Ok(there) = path.symlink_metadata()
        && !there.is_file()
        && !there.is_symlink()
    {
        let message = "not a regular file";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
    }
    // Not the name of the file, which may be as long as names can be.
    let mut aside = tempfile::Builder::new()
        .prefix(".kv-direct-")
        .suffix(".tmp")
        .tempfile_in(folder)?;
    let mut written = BufWriter::new(aside.as_file_mut());
    written.write_all(&header(facts, parts)?)?;
    for part in parts {
        written.write_all(&part.bytes().map_err(io::Error::other)?)?;
    }
    written.flush()?;
    drop(written);
    aside.as_file().sync_all()?;
    aside.persist(path).map_err(|error| error.error)?;
    Ok(())
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use crate::cache::StateValue;

    #[test]
    fn a_folder_that_cannot_be_synced_leaves_the_new_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("chat");
        std::fs::write(&path, "old").expect("a file");
        let value = StateValue::Ids(vec![7]);
        let parts = [Part::new("ids", &value).expect("ids can be written")];
        let sync = |_: &File| Err(io::Error::other("no disk"));
        let failed = write(&path, &parts, &Facts::default(), sync);
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
