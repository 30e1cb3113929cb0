//! Memory-mapped pieces of a file, unmapped one by one. All unsafe code of the crate is here.

#![allow(unsafe_code)]

use std::{fs::File, io};

use memmap2::{Mmap, MmapOptions};

/// Maps `length` bytes of `file` from `at` on, in order and without gaps: `size` bytes each, the last piece the rest.
///
/// A piece is not in memory before it is read, and is unmapped when it is dropped.
pub(super) fn pieces(file: &File, at: u64, length: usize, size: usize) -> io::Result<Vec<Mmap>> {
    let end = at.checked_add(length as u64);
    let held = file.metadata()?.len();
    if end.is_none_or(|end| end > held) {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    (0..length)
        .step_by(size)
        .map(|from| {
            let mut options = MmapOptions::new();
            options
                .offset(at + from as u64)
                .len(size.min(length - from));
            // SAFETY: the range is inside the file, as checked above, and the map is read-only. The bytes must also
            // not change while they are borrowed. No system can guarantee that, because another process may write to
            // the file; the docs of `load` make it the caller's duty. Nothing that is read is used as a length or an
            // address, and every bit pattern is a float. If the file is cut short meanwhile, the system ends the
            // process when a missing page is read.
            unsafe { options.map(file) }
        })
        .collect()
}
