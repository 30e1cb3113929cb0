//! The tiles of every level, and every number of rows, give the same bits.

use burn::tensor::bf16;

use super::*;
use crate::exact::SimdLevel;

const WIDTH: usize = 300;
const COLUMNS: usize = 70;

/// Numbers in -1 .. 1.
fn numbers(seed: u32) -> impl Iterator<Item = f32> {
    let mut state = seed;
    std::iter::repeat_with(move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    })
}

/// The bits of all rows, `at_once` of them in each call, in `parts` shares.
fn bits<F: Format>(
    level: SimdLevel,
    panels: &[F],
    x: &[f32],
    at_once: usize,
    parts: usize,
) -> Vec<u32> {
    let calls = x.chunks(at_once * WIDTH).flat_map(|x| {
        let rows = x.len() / WIDTH;
        let mut grouped = Grouped::with_simd(level, rows, WIDTH);
        for (row, x) in x.chunks_exact(WIDTH).enumerate() {
            grouped.set(row, 0, x);
        }
        let mut out = vec![0.0; rows * COLUMNS];
        let rows = out.chunks_exact_mut(COLUMNS).collect();
        shared(&grouped, panels, rows, parts);
        out
    });
    calls.map(f32::to_bits).collect()
}

fn compare<F: Format>(panels: &[F]) {
    let x: Vec<f32> = numbers(1).take(40 * WIDTH).collect();
    let expected = bits(SimdLevel::Scalar, panels, &x, 1, 1);
    for level in [SimdLevel::Scalar, SimdLevel::Avx2, SimdLevel::Avx512] {
        for at_once in [1, 2, 3, 4, 5, 8, 12, 16, 27, 40] {
            for parts in [1, 2, 3] {
                let found = bits(level, panels, &x, at_once, parts);
                assert!(found == expected, "{level}, {at_once} rows, {parts} shares");
            }
        }
    }
}

/// Tiles of a level that the CPU lacks run without vectors, so they are compared on every CPU.
#[test]
fn no_bit_depends_on_tiles_or_rows() {
    let mut numbers = numbers(2);
    let wide: Vec<[f32; PANEL]> = (0..WIDTH * COLUMNS.div_ceil(PANEL))
        .map(|_| std::array::from_fn(|_| numbers.next().expect("without end")))
        .collect();
    compare(&wide);
    let narrow: Vec<[bf16; PANEL]> = wide.iter().map(|row| row.map(bf16::from_f32)).collect();
    compare(&narrow);
}
