//! Stored floats as f32.

use burn::tensor::{bf16, f16};
use safetensors::tensor::Dtype;

/// The numbers in `pieces`, decoded lazily in chunks, so that an element costs no call of its own.
pub(super) fn floats(
    pieces: impl IntoIterator<Item = impl AsRef<[u8]>>,
    dtype: Dtype,
) -> impl Iterator<Item = f32> {
    pieces.into_iter().flat_map(move |piece| {
        let starts = (0..piece.as_ref().len()).step_by(CHUNK);
        starts.flat_map(move |from| {
            let bytes = &piece.as_ref()[from..];
            decoded(&bytes[..bytes.len().min(CHUNK)], dtype)
        })
    })
}

/// Decodes little-endian floats.
fn decoded(bytes: &[u8], dtype: Dtype) -> Vec<f32> {
    let halves = || {
        let pairs = bytes.chunks_exact(2);
        pairs.map(|b| u16::from_le_bytes([b[0], b[1]]))
    };
    match dtype {
        Dtype::F16 => halves().map(|bits| f16::from_bits(bits).to_f32()).collect(),
        Dtype::BF16 => halves()
            .map(|bits| bf16::from_bits(bits).to_f32())
            .collect(),
        _ => {
            let quads = bytes.chunks_exact(4);
            quads
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect()
        }
    }
}

/// Bytes that are decoded at once. They and their floats fit the innermost caches.
const CHUNK: usize = 8 << 10;
