//! What queries see of the segments of a sequence, cut into blocks.

use std::{num::NonZeroUsize, ops::Range};

use burn::tensor::{bf16, f16};

use super::block::SLOTS;
use crate::{
    exact::kernels::{PANEL, format::widen_f16},
    positions::Positions,
};

/// A stored element of a key or value.
pub(crate) trait Stored: Copy + Send + Sync + 'static {
    /// The same number as f32.
    fn widen(self) -> f32;
}

impl Stored for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
}

impl Stored for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
}

impl Stored for f16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        widen_f16(self.to_bits())
    }
}

/// The entries of one KV head in consecutive slots.
#[derive(Clone, Copy)]
pub(crate) struct Entries<'a, T> {
    /// `[slots / 32, head_dim]` rows of 32 slots.
    pub(crate) keys: &'a [[T; PANEL]],
    /// `[slots, head_dim]`.
    pub(crate) values: &'a [T],
    /// The position of each slot; [`Positions::EMPTY`] for a free one.
    pub(crate) positions: &'a [usize],
    /// The number of the first slot, a multiple of 32.
    pub(crate) start: usize,
}

/// The positions that a query sees: `from ..= to`, or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sight {
    from: usize,
    to: usize,
}

impl Sight {
    /// Sees nothing: a pad.
    pub(crate) const NOTHING: Self = Self { from: 1, to: 0 };

    /// What the query at a position sees, its own token included.
    pub(crate) fn of(position: usize, window: Option<NonZeroUsize>) -> Self {
        if position == Positions::EMPTY {
            return Self::NOTHING;
        }
        let from = window.map_or(0, |window| (position + 1).saturating_sub(window.get()));
        Self { from, to: position }
    }

    /// What either sees, and what lies between.
    pub(super) fn with(self, other: Self) -> Self {
        if self == Self::NOTHING {
            return other;
        }
        if other == Self::NOTHING {
            return self;
        }
        Self {
            from: self.from.min(other.from),
            to: self.to.max(other.to),
        }
    }

    #[inline(always)]
    pub(super) fn sees(self, position: usize) -> bool {
        self.from <= position && position <= self.to
    }
}

/// Consecutive slots of one segment within one block.
#[derive(Debug)]
pub(super) struct Piece {
    pub(super) segment: usize,
    pub(super) from: usize,
    pub(super) to: usize,
    /// The number of its block.
    pub(super) block: usize,
    /// The index of its first slot within the block.
    pub(super) at: usize,
    /// The index of its first slot among the slots of all segments, one after another.
    pub(super) index: usize,
    /// The lowest and the highest position of its slots; that of a free slot is the highest.
    pub(super) lowest: usize,
    pub(super) highest: usize,
}

impl Piece {
    /// Its slots within the block.
    #[inline(always)]
    pub(super) fn slots(&self) -> Range<usize> {
        self.at..self.at + self.to - self.from
    }
}

/// The pieces from the first slot of each segment that is seen to its last, in rising order of slot numbers.
pub(super) fn pieces<T>(segments: &[Entries<'_, T>], seen: Sight) -> Vec<Piece> {
    let mut pieces: Vec<Piece> = Vec::new();
    let mut before = 0;
    for (segment, entries) in segments.iter().enumerate() {
        let mut positions = entries.positions.iter();
        let first = positions.position(|&p| seen.sees(p));
        if let Some(mut from) = first {
            let last = positions.rposition(|&p| seen.sees(p));
            let end = from + 1 + last.map_or(0, |last| last + 1);
            while from < end {
                let number = entries.start + from;
                let (block, at) = (number / SLOTS, number % SLOTS);
                let to = (from + SLOTS - at).min(end);
                let positions = entries.positions[from..to].iter().copied();
                pieces.push(Piece {
                    lowest: positions.clone().min().unwrap_or(Positions::EMPTY),
                    highest: positions.max().unwrap_or(Positions::EMPTY),
                    segment,
                    from,
                    to,
                    block,
                    at,
                    index: before + from,
                });
                from = to;
            }
        }
        before += entries.positions.len();
    }
    pieces
}
