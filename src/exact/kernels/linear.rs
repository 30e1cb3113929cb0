//! `x · weight` from packed panels.
//!
//! Each output is one chain of fused multiply-adds along the reduction, from its first element to its last. Blocks of
//! the reduction store and reload the chain. Nothing else decides a bit.

mod grouped;
mod tiles;

pub(crate) use self::grouped::Grouped;
use self::{
    grouped::Tile,
    tiles::{Row, Rows},
};
use super::{Format, PANEL, threads};

/// Where the rows of a product go: `columns` elements of each row of `stride` elements, from `left` on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) columns: usize,
    pub(crate) stride: usize,
    pub(crate) left: usize,
}

/// `x · weight`, `[rows, width]` to `[rows, columns]`, on up to `parts` threads. The weight has one panel for every 32
/// columns.
pub(crate) fn linear<F: Format>(
    x: &Grouped,
    panels: &[F],
    out: &mut [f32],
    place: Place,
    parts: usize,
) {
    let Place {
        columns,
        stride,
        left,
    } = place;
    if x.rows() == 0 || columns == 0 {
        return;
    }
    let rows = out.chunks_exact_mut(stride).take(x.rows());
    let rows = rows.map(|row| &mut row[left..left + columns]);
    if x.width() == 0 {
        rows.for_each(|row| row.fill(0.0));
        return;
    }
    let parts = match x.rows() * x.width() * columns < WORTH_A_THREAD {
        true => 1,
        false => parts,
    };
    shared(x, panels, rows.collect(), parts);
}

/// Multiply-adds from which waking a thread costs less than it saves.
const WORTH_A_THREAD: usize = 1 << 17;

/// In `parts` contiguous shares of the weight. Each writes its columns of all rows in place.
fn shared<F: Format>(x: &Grouped, panels: &[F], mut rows: Vec<&mut [f32]>, parts: usize) {
    let count = rows[0].len().div_ceil(PANEL);
    if parts <= 1 || count <= 1 {
        return all(x, panels, &mut rows);
    }
    let left = (count * (parts / 2) / parts).max(1);
    let (panels_left, panels_right) = panels.split_at(panels.len() / count * left);
    let rows = rows.into_iter().map(|row| row.split_at_mut(left * PANEL));
    let (rows_left, rows_right) = rows.unzip();
    threads::join(
        || shared(x, panels_left, rows_left, parts / 2),
        || shared(x, panels_right, rows_right, parts - parts / 2),
    );
}

/// The most rows that wait for memory rather than for the units: they read two panels at a time.
const FEW: usize = 32;

/// All columns on this thread.
fn all<F: Format>(x: &Grouped, panels: &[F], out: &mut [&mut [f32]]) {
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
                width: x.width(),
                panels,
                out,
            })
        };
    }
    match x.tile {
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

#[cfg(test)]
mod tests;
