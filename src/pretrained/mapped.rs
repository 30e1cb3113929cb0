//! Pieces of a file, mapped for reading and let go one by one. All unsafe code of the crate is here.

#![allow(unsafe_code)]

use std::{fs::File, io};

use memmap2::{Mmap, MmapOptions};

/// `length` bytes of `file` from `at` on, in order and without gaps. Each piece but the last is a
/// multiple of 16 bytes long.
///
/// No piece is in memory before it is touched, and each is let go when dropped.
pub(super) fn pieces(file: &File, at: u64, length: usize) -> io::Result<Vec<Mmap>> {
    let end = at.checked_add(length as u64);
    let held = file.metadata()?.len();
    if end.is_none_or(|end| end > held) {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    (0..length)
        .step_by(KV_BLOCK)
        .map(|from| {
            let mut options = MmapOptions::new();
            options
                .offset(at + from as u64)
                .len(KV_BLOCK.min(length - from));
            // SAFETY: the range lies in the file, as checked above, and the map is read only. What
            // remains is that the bytes stay as they are while they are borrowed, which no system can
            // promise: another process may write to the file. The docs of `load` ask callers to see to
            // it. Nothing read is used as a length or an address, and every bit pattern is a float. A
            // file that is cut short meanwhile makes the system end the process when a page that is
            // gone is touched.
            unsafe { options.map(file) }
        })
        .collect()
}

/// Large enough for few system calls, small enough not to count beside the weights.
const KV_BLOCK: usize = 16 << 20;
