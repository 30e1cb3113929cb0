//! The tiles of every level give the same bits.

use super::*;
use crate::exact::kernels::{PANEL, tests::numbers};

const HEADS: Heads = Heads {
    heads: 14,
    kv_heads: 1,
    head_dim: 40,
};

/// The bits of all that the units of three queries return, computed in the tiles of a level.
fn bits(level: SimdLevel, softcap: Option<f32>) -> Vec<u32> {
    const SLOTS: usize = 320;
    let (rows, width) = (3 * HEADS.heads, HEADS.head_dim);
    let query: Vec<f32> = numbers(1).take(rows * width).collect();
    let mut number = numbers(2);
    let keys: Vec<[f32; PANEL]> = (0..SLOTS / PANEL * width)
        .map(|_| std::array::from_fn(|_| number.next().expect("no end")))
        .collect();
    let values: Vec<f32> = numbers(3).take(SLOTS * width).collect();
    let positions: Vec<usize> = (0..SLOTS).collect();
    let entries = Entries {
        keys: &keys,
        values: &values,
        positions: &positions,
        start: 0,
    };
    let sights = [290, 291, 292].map(|position| Sight::of(position, None));
    let read = pieces::pieces(&[entries], sights[0].with(sights[2]));
    let sequence = Sequence {
        first_row: 0,
        sights: sights.to_vec(),
        entries: vec![vec![entries]],
        report: Report::Nothing,
    };
    let call = Call {
        heads: HEADS,
        query: &|row, head| &query[(row * HEADS.heads + head) * width..][..width],
        scale: 1.3,
        softcap,
    };
    let mut found = Vec::new();
    for pieces in read.chunk_by(|one, next| one.block == next.block) {
        let mut unit = Unit {
            sequence: 0,
            kv_head: 0,
            rows: 0..rows,
            blocks: &[pieces],
            known: Known::nothing(rows, width),
            weights: Some(vec![[0.0; block::SLOTS]; rows]),
        };
        unit.compute(&call, level, &sequence, 0);
        found.extend([unit.known.max, unit.known.sum, unit.known.mixed].concat());
        // Weights behind the last slot that is read have no meaning.
        let count = pieces[pieces.len() - 1].to - pieces[0].from;
        for weights in unit.weights.expect("asked for") {
            found.extend(&weights[..count]);
        }
    }
    found.into_iter().map(f32::to_bits).collect()
}

/// Tiles of a level that the CPU lacks run without vectors, so they are compared on every CPU.
#[test]
fn no_bit_depends_on_the_tiles() {
    for softcap in [None, Some(2.0)] {
        let expected = bits(SimdLevel::Scalar, softcap);
        for level in [SimdLevel::Avx2, SimdLevel::Avx512] {
            assert!(bits(level, softcap) == expected, "{level}, {softcap:?}");
        }
    }
}
