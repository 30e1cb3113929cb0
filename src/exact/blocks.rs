//! The blocks in which attention reads a sequence: its slots by their numbers, whatever segments hold them.

use std::{num::NonZeroUsize, ops::Range};

use burn::tensor::{DType, Tensor};

use super::{ATTENTION_BLOCK, Segment, zeros};
use crate::positions::Positions;

/// The positions of a query block: the lowest and the highest.
pub(super) type Reach = (usize, usize);

/// Slots that are read or skipped together: a block is read up to the last tile that a query sees. Skipped slots would
/// add zeros at the end of a sum. Divides [`ATTENTION_BLOCK`].
const TILE: usize = 64;

/// [`ATTENTION_BLOCK`] consecutive numbers of a sequence.
pub(super) struct Block<'a> {
    segments: &'a [Segment],
    pub(super) pieces: Vec<Piece>,
    /// The position of each number, for all KV heads or for each.
    pub(super) positions: Vec<Vec<usize>>,
}

/// Consecutive slots of one segment.
pub(super) struct Piece {
    segment: usize,
    slots: Range<usize>,
    /// The index of its first slot within the block.
    pub(super) at: usize,
    /// The index of its first slot among the slots of all segments, one after another.
    pub(super) index: usize,
}

impl Piece {
    /// How many of its slots are below `width` within the block.
    pub(super) fn within(&self, width: usize) -> usize {
        width.saturating_sub(self.at).min(self.slots.len())
    }
}

/// The blocks of a sequence that have a slot in use.
pub(super) fn blocks(segments: &[Segment]) -> Vec<Block<'_>> {
    let lists = segments.iter().map(Segment::lists).max().unwrap_or(1);
    let mut blocks: Vec<(usize, Block<'_>)> = Vec::new();
    let (mut taken, mut offset) = (0, 0);
    for (index, segment) in segments.iter().enumerate() {
        let (start, slots) = (segment.start(), segment.slots());
        // The slots up to the last one in use; what is in front of them may belong to the segment before.
        let used = segment.used().map_or(0..0, |used| {
            taken.max(start).saturating_sub(start).min(used.start)..used.end
        });
        let mut from = used.start;
        while from < used.end {
            let number = (start + from) / ATTENTION_BLOCK;
            let end = ((number + 1) * ATTENTION_BLOCK - start).min(used.end);
            if blocks.last().is_none_or(|(last, _)| *last != number) {
                let block = Block {
                    segments,
                    pieces: Vec::new(),
                    positions: vec![vec![Positions::EMPTY; ATTENTION_BLOCK]; lists],
                };
                blocks.push((number, block));
            }
            let (_, block) = blocks.last_mut().expect("one was just added");
            let at = start + from - number * ATTENTION_BLOCK;
            for (head, list) in block.positions.iter_mut().enumerate() {
                let positions = &segment.positions(head)[from..end];
                list[at..at + end - from].copy_from_slice(positions);
            }
            block.pieces.push(Piece {
                segment: index,
                slots: from..end,
                at,
                index: offset + from,
            });
            from = end;
        }
        taken = taken.max(start + used.end);
        offset += slots;
    }
    blocks.into_iter().map(|(_, block)| block).collect()
}

impl Block<'_> {
    pub(super) fn kv_heads(&self) -> usize {
        self.segments[0].values().dims()[0]
    }

    /// How many of its numbers are read for queries within `reach`: those up to the last tile that one of them may
    /// see, or none.
    pub(super) fn width(&self, (low, high): Reach, window: Option<NonZeroUsize>) -> usize {
        let oldest = window.map_or(0, |window| (low + 1).saturating_sub(window.get()));
        let seen = |&position: &usize| position <= high && position >= oldest;
        let last = |list: &Vec<usize>| list.iter().rposition(seen);
        let last = self.positions.iter().filter_map(last).max();
        last.map_or(0, |last| (last / TILE + 1) * TILE)
    }

    /// The keys of the first `width` numbers in the dtype of the queries, `[kv_heads, head_dim, width]`.
    pub(super) fn keys(&self, width: usize, dtype: DType) -> Tensor<3> {
        self.gather(width, 2, Segment::keys_of).cast(dtype)
    }

    /// The values of the first `width` numbers in the dtype of the queries, `[kv_heads, width, head_dim]`.
    pub(super) fn values(&self, width: usize, dtype: DType) -> Tensor<3> {
        self.gather(width, 1, Segment::values_of).cast(dtype)
    }

    /// The pieces of the first `width` numbers, with zeros between them. Slots are `dim`.
    fn gather(
        &self,
        width: usize,
        dim: usize,
        read: impl Fn(&Segment, Range<usize>) -> Tensor<3>,
    ) -> Tensor<3> {
        let mut parts: Vec<Tensor<3>> = Vec::new();
        let free = |like: &Tensor<3>, count: usize| {
            let mut shape = like.dims();
            shape[dim] = count;
            zeros(shape, (&like.device(), like.dtype()))
        };
        let mut end = 0;
        for (index, piece) in self.pieces.iter().enumerate() {
            let segment = &self.segments[piece.segment];
            let room = width.saturating_sub(piece.at);
            // The free slots behind the last piece are read with it, not filled up.
            let count = match index + 1 == self.pieces.len() {
                true => room.min(segment.slots() - piece.slots.start),
                false => room.min(piece.slots.len()),
            };
            if count == 0 {
                continue;
            }
            let part = read(segment, piece.slots.start..piece.slots.start + count);
            if piece.at > end {
                parts.push(free(&part, piece.at - end));
            }
            end = piece.at + count;
            parts.push(part);
        }
        if end < width {
            parts.push(free(&parts[0], width - end));
        }
        match parts.len() {
            1 => parts.remove(0),
            _ => Tensor::cat(parts, dim),
        }
    }
}
