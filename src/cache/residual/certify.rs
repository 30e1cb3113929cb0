//! Certified eviction: a block of rows leaves when it was rebuilt, by the calls that every later replay makes,
//! and had the same bits.

use std::ops::Range;

use burn::tensor::Tensor;

use super::ResidualCheckpoint;
use crate::cache::{CacheError, KeysValues, Projection};

/// How many blocks were compared.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Certified {
    certified: usize,
    kept: usize,
}

impl Certified {
    pub(super) const fn counted(self) -> (usize, usize) {
        (self.certified, self.kept)
    }

    /// Takes note of a comparison, and answers whether the rows may go.
    pub(super) const fn note(&mut self, same: bool) -> bool {
        if same {
            self.certified += 1;
        } else {
            self.kept += 1;
        }
        same
    }
}

impl ResidualCheckpoint {
    /// A replay always makes the calls that were compared only where the batch does not change.
    pub(super) const fn can_certify(&self, rows: usize) -> Result<(), CacheError> {
        if self.certified && rows > 1 {
            return Err(CacheError::Rows {
                expected: 1,
                found: rows,
            });
        }
        Ok(())
    }

    /// Refuses what a cache that certifies rows cannot do.
    pub(super) const fn uncertified(&self, operation: &'static str) -> Result<(), CacheError> {
        if self.certified {
            return Err(CacheError::Unsupported { operation });
        }
        Ok(())
    }
}

/// Whether the rows at `positions` of a chunk that starts at `start` have the bits that stand in their slots.
pub(super) fn same(
    stored: &KeysValues,
    rebuilt: &Projection,
    start: usize,
    positions: Range<usize>,
) -> bool {
    let rows = positions.start - start..positions.end - start;
    let keys = stored.keys().clone().slice_dim(3, positions.clone());
    let values = stored.values().clone().slice_dim(2, positions);
    let of = |tensor: &Tensor<4>| tensor.clone().slice_dim(2, rows.clone());
    bits(keys.swap_dims(2, 3)) == bits(of(&rebuilt.keys))
        && bits(values) == bits(of(&rebuilt.values))
}

fn bits(tensor: Tensor<4>) -> Vec<u8> {
    tensor.into_data().as_bytes().to_vec()
}
