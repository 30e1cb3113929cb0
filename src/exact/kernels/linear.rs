//! `x · weight` from packed panels.
//!
//! Each output is one chain of fused multiply-adds along the reduction, from its first element to its last. Blocks of
//! the reduction store and reload the chain. Nothing else decides a bit.

mod grouped;
mod tiles;

use std::ops::Range;

pub(crate) use self::grouped::Grouped;
use self::{
    grouped::Tile,
    tiles::{Row, Rows},
};
use super::Format;

/// The most rows that wait for memory rather than for the units: they read two panels at a time.
const FEW: usize = 32;

/// `x · weight` for every row of `out`, on this thread. The weight has one panel for every 32 columns, of `height` rows
/// of the reduction. Those of `reduction` are computed: from the first row on, or after it, where the chains in `out`
/// end.
pub(crate) fn linear<F: Format>(
    x: &Grouped,
    panels: &[F],
    height: usize,
    reduction: Range<usize>,
    out: &mut [&mut [f32]],
) {
    if height == 0 {
        out.iter_mut().for_each(|row| row.fill(0.0));
        return;
    }
    macro_rules! tile {
        ($rows:literal, $lanes:literal) => {
            match x.rows() <= FEW {
                true => tile!($rows, $lanes, 2),
                false => tile!($rows, $lanes, 1),
            }
        };
        ($rows:literal, $lanes:literal, $panels:literal) => {
            x.simd.run(Rows::<'_, '_, F, $rows, $lanes, $panels> {
                x: x.groups(),
                panels,
                height,
                reduction,
                out,
            })
        };
    }
    match x.tile {
        Tile::One if reduction.len() < height => tile!(1, 32, 2),
        Tile::One => x.simd.run(Row {
            x: x.groups::<1>().as_flattened(),
            panels,
            out: &mut *out[0],
        }),
        Tile::Two => tile!(2, 32, 2),
        Tile::Three => tile!(3, 32, 2),
        Tile::Four => tile!(4, 16, 2),
        Tile::Six => tile!(6, 16),
        Tile::Twelve => tile!(12, 32),
    }
}
