//! How weights are stored in panels.

use burn::tensor::{bf16, f16};

use crate::exact::PANEL;

/// A block of a panel: the weights of [`PANEL`] columns in `ROWS` consecutive rows of the reduction.
///
/// Every other property of a format is its own. A format that stores scales beside small integers is one more
/// implementation.
pub(crate) trait Format: Copy + Send + Sync + 'static {
    /// Rows of the reduction in a block.
    const ROWS: usize;

    /// The most groups of rows of which each widens the weights anew. Those of more groups are widened once for all.
    const GROUPS: usize;

    /// The weights of one row, exactly as f32.
    fn widen(&self, row: usize) -> [f32; PANEL];
}

impl Format for [f32; PANEL] {
    const ROWS: usize = 1;
    const GROUPS: usize = usize::MAX;

    #[inline(always)]
    fn widen(&self, _: usize) -> [f32; PANEL] {
        *self
    }
}

impl Format for [bf16; PANEL] {
    const ROWS: usize = 1;
    const GROUPS: usize = 4;

    #[inline(always)]
    fn widen(&self, _: usize) -> [f32; PANEL] {
        let mut wide = [0.0; PANEL];
        for lane in 0..PANEL {
            wide[lane] = f32::from_bits(u32::from(self[lane].to_bits()) << 16);
        }
        wide
    }
}

impl Format for [f16; PANEL] {
    const ROWS: usize = 1;
    const GROUPS: usize = 1;

    #[inline(always)]
    fn widen(&self, _: usize) -> [f32; PANEL] {
        let mut wide = [0.0; PANEL];
        for lane in 0..PANEL {
            wide[lane] = widen_f16(self[lane].to_bits());
        }
        wide
    }
}

/// An f16 as f32, without branches.
#[inline(always)]
pub(super) fn widen_f16(bits: u16) -> f32 {
    let bits = u32::from(bits);
    // Exponent and fraction in place, too small by 2^112. The product is exact, also for subnormal numbers.
    let size = f32::from_bits((bits & 0x7fff) << 13) * f32::from_bits(0x7780_0000);
    let special = if bits & 0x7c00 == 0x7c00 {
        0x7f80_0000
    } else {
        0
    };
    f32::from_bits(size.to_bits() | special | (bits & 0x8000) << 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_f16_is_widened_exactly() {
        for bits in 0..=u16::MAX {
            let expected = f16::from_bits(bits).to_f32();
            let found = widen_f16(bits);
            let same = found.to_bits() == expected.to_bits();
            assert!(same || (found.is_nan() && expected.is_nan()), "{bits:#x}");
        }
    }
}
