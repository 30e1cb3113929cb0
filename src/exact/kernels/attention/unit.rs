//! The work of a unit: its blocks in rising order, each in tiles of as many queries as suit the vector registers.

use super::{
    Call, Sequence, Unit,
    block::{Block, SLOTS, State},
    pieces::{Piece, Sight, Stored},
};
use crate::exact::kernels::SimdLevel;

/// Queries of a unit that are computed together.
#[derive(Debug, Clone, Copy)]
struct Tile {
    /// The index of its first query in the unit.
    first: usize,
    /// How many queries it has room for. Those behind the last of the unit are 0.
    size: usize,
}

/// What the tiles of a unit use one after the other.
struct Scratch {
    /// For each tile `[head_dim, size]`, scaled.
    query: Vec<f32>,
    sights: Vec<Sight>,
    scores: Vec<[f32; SLOTS]>,
    mixed: Vec<f32>,
}

impl Unit<'_> {
    /// Computes all rows; the first token of all units is `first_token` of the sequence.
    pub(super) fn compute<T: Stored>(
        &mut self,
        call: &Call<'_>,
        simd: SimdLevel,
        sequence: &Sequence<'_, T>,
        first_token: usize,
    ) {
        let tiles = tiles(simd, self.rows.len());
        let mut scratch = self.scratch(call, &tiles, sequence, first_token);
        for &pieces in self.blocks {
            for &tile in &tiles {
                macro_rules! tile {
                    ($rows:literal, $lanes:literal) => {{
                        let at = (pieces, tile);
                        self.tile::<T, $rows, $lanes>(call, simd, sequence, at, &mut scratch)
                    }};
                }
                match tile.size {
                    1 => tile!(1, 32),
                    2 => tile!(2, 32),
                    3 => tile!(3, 32),
                    4 => tile!(4, 16),
                    6 => tile!(6, 16),
                    _ => tile!(12, 32),
                }
            }
        }
    }

    fn scratch<T>(
        &self,
        call: &Call<'_>,
        tiles: &[Tile],
        sequence: &Sequence<'_, T>,
        first_token: usize,
    ) -> Scratch {
        let (head_dim, group) = (call.heads.head_dim, call.heads.group());
        let token = |row: usize| first_token + row / group;
        let sizes = tiles.iter().map(|tile| tile.size);
        let mut query = vec![0.0; sizes.clone().sum::<usize>() * head_dim];
        for &Tile { first, size } in tiles {
            let query = &mut query[first * head_dim..][..size * head_dim];
            for (lane, row) in self.rows.clone().skip(first).take(size).enumerate() {
                let head = self.kv_head * group + row % group;
                let values = (call.query)(sequence.first_row + token(row), head);
                for (to, value) in query[lane..].iter_mut().step_by(size).zip(values) {
                    *to = value * call.scale;
                }
            }
        }
        let largest = sizes.max().unwrap_or(0);
        Scratch {
            query,
            sights: self
                .rows
                .clone()
                .map(|row| sequence.sights[token(row)])
                .collect(),
            scores: vec![[0.0; SLOTS]; largest],
            mixed: vec![0.0; largest * head_dim],
        }
    }

    /// Computes a tile of `R` queries in a block.
    fn tile<T: Stored, const R: usize, const LANES: usize>(
        &mut self,
        call: &Call<'_>,
        simd: SimdLevel,
        sequence: &Sequence<'_, T>,
        (pieces, tile): (&[Piece], Tile),
        scratch: &mut Scratch,
    ) {
        let head_dim = call.heads.head_dim;
        let (query, _) = scratch.query[tile.first * head_dim..].as_chunks();
        let scores = scratch
            .scores
            .first_chunk_mut()
            .expect("of the largest tile");
        let rows = tile.first..(tile.first + R).min(self.rows.len());
        simd.run(Block::<T, R, LANES> {
            query: &query[..head_dim],
            sights: &scratch.sights[rows.clone()],
            entries: &sequence.entries[self.kv_head],
            pieces,
            softcap: call.softcap,
            scores,
            state: State {
                max: &mut self.known.max[rows.clone()],
                sum: &mut self.known.sum[rows.clone()],
                mixed: &mut self.known.mixed[rows.start * head_dim..rows.end * head_dim],
            },
            mixed: &mut scratch.mixed[..R * head_dim],
        });
        if let Some(weights) = &mut self.weights {
            let count = rows.len();
            weights[rows].copy_from_slice(&scratch.scores[..count]);
        }
    }
}

/// The tiles of so many rows.
fn tiles(simd: SimdLevel, rows: usize) -> Vec<Tile> {
    let mut tiles = Vec::new();
    let mut first = 0;
    while first < rows {
        let size = match (simd, rows - first) {
            (SimdLevel::Avx512, 12..) => 12,
            (_, left @ 1..=4) => left,
            _ => 6,
        };
        tiles.push(Tile { first, size });
        first += size;
    }
    tiles
}
