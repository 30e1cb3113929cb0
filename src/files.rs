//! Reading the files of a model folder.

use std::{fs::File, io, path::Path};

/// Opens a regular file. Any other kind is refused, because it could block forever.
pub(crate) fn open(path: &Path) -> io::Result<File> {
    if path.metadata()?.is_file() {
        return File::open(path);
    }
    Err(io::Error::new(
        io::ErrorKind::InvalidInput,
        "not a regular file",
    ))
}

/// Reads all bytes of a regular file.
#[cfg(feature = "text")]
pub(crate) fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    io::Read::read_to_end(&mut open(path)?, &mut bytes)?;
    Ok(bytes)
}
