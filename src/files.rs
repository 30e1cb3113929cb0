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

/// JSON as Python writes it, as JSON: the numbers `NaN`, `Infinity` and `-Infinity` become strings. A field that nobody
/// reads may have them; in a field that counts they are values of a wrong type.
#[cfg(any(feature = "text", feature = "pretrained"))]
pub(crate) fn json(text: Vec<u8>) -> Vec<u8> {
    let names: [&[u8]; 3] = [b"-Infinity", b"Infinity", b"NaN"];
    if !text.windows(3).any(|part| part == b"NaN" || part == b"Inf") {
        return text;
    }
    let (mut json, mut rest, mut quoted) = (Vec::new(), &*text, false);
    while let Some((&first, after)) = rest.split_first() {
        let name = names.iter().find(|name| !quoted && rest.starts_with(name));
        if let Some(name) = name {
            json.push(b'"');
            json.extend_from_slice(name);
            json.push(b'"');
            rest = &rest[name.len()..];
            continue;
        }
        json.push(first);
        rest = after;
        match first {
            b'"' => quoted = !quoted,
            b'\\' if quoted => {
                json.extend(rest.first());
                rest = rest.get(1..).unwrap_or_default();
            }
            _ => {}
        }
    }
    json
}

/// Reads all bytes of a regular file.
#[cfg(feature = "text")]
pub(crate) fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    io::Read::read_to_end(&mut open(path)?, &mut bytes)?;
    Ok(bytes)
}
