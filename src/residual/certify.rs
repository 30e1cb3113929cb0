//! Certified eviction: a block of entries is dropped only after it was rebuilt, by the calls that every later replay
//! makes, with the same bits.

use std::ops::Range;

use burn::tensor::Tensor;

use crate::{cache::Projection, storage::LayerStore};

/// How many blocks were compared.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Blocks {
    certified: usize,
    differing: usize,
}

impl Blocks {
    /// Blocks that had the same bits, and blocks that did not.
    pub(super) const fn counted(self) -> (usize, usize) {
        (self.certified, self.differing)
    }

    /// Counts a comparison, and returns whether the entries may be dropped.
    pub(super) const fn note(&mut self, same: bool) -> bool {
        if same {
            self.certified += 1;
        } else {
            self.differing += 1;
        }
        same
    }
}

/// Whether the entries at `positions` of a chunk that starts at `start` have the bits of their slots, which are the
/// positions. The batch has one sequence.
pub(super) fn same(
    stored: &LayerStore,
    rebuilt: &Projection,
    start: usize,
    positions: Range<usize>,
) -> bool {
    let tokens = positions.start - start..positions.end - start;
    let stored = stored.rows(0, positions);
    let of = |tensor: &Tensor<4>| tensor.clone().slice_dim(2, tokens.clone());
    bits(stored.keys) == bits(of(&rebuilt.keys)) && bits(stored.values) == bits(of(&rebuilt.values))
}

fn bits<const D: usize>(tensor: Tensor<D>) -> Vec<u8> {
    tensor.into_data().as_bytes().to_vec()
}
