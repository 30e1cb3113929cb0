//! Numbers in memory, and as a file stores them.

use std::borrow::Cow;

#[cfg(feature = "pretrained")]
use burn::tensor::DType;
use burn::tensor::{bf16, f16};

/// Consecutive numbers.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(
    not(feature = "pretrained"),
    allow(dead_code, reason = "only files store bytes")
)]
pub(crate) enum Numbers<'a> {
    Floats(&'a [f32]),
    /// Stored, the lowest byte first, as all that follow.
    F32(&'a [[u8; 4]]),
    Bf16(&'a [[u8; 2]]),
    F16(&'a [[u8; 2]]),
}

impl<'a> Numbers<'a> {
    /// The numbers that a file stores as `dtype`: bf16, f16, or f32 for every other one.
    #[cfg(feature = "pretrained")]
    pub(crate) const fn stored(bytes: &'a [u8], dtype: DType) -> Self {
        match dtype {
            DType::BF16 => Self::Bf16(bytes.as_chunks().0),
            DType::F16 => Self::F16(bytes.as_chunks().0),
            _ => Self::F32(bytes.as_chunks().0),
        }
    }

    /// The same in f32.
    pub(crate) fn floats(self) -> Cow<'a, [f32]> {
        fn widened<T: Copy>(stored: &[T], widen: impl Fn(T) -> f32) -> Cow<'static, [f32]> {
            stored.iter().map(|&bytes| widen(bytes)).collect()
        }
        match self {
            Self::Floats(floats) => floats.into(),
            Self::F32(stored) => widened(stored, f32::from_le_bytes),
            Self::Bf16(stored) => widened(stored, |bytes| bf16::from_le_bytes(bytes).to_f32()),
            Self::F16(stored) => widened(stored, |bytes| f16::from_le_bytes(bytes).to_f32()),
        }
    }

    /// Whether both have the same bits in f32.
    #[cfg(feature = "pretrained")]
    pub(crate) fn same(self, other: Numbers<'_>) -> bool {
        match (self, other) {
            (Self::F32(one), Numbers::F32(other)) => one == other,
            (Self::Bf16(one), Numbers::Bf16(other)) | (Self::F16(one), Numbers::F16(other)) => {
                one == other
            }
            _ => {
                let (one, other) = (self.floats(), other.floats());
                let bits = |float: &f32| float.to_bits();
                one.iter().map(bits).eq(other.iter().map(bits))
            }
        }
    }
}
