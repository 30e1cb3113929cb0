//! The tiles of every level, every number of rows and every number of shares give the same bits.

use burn::tensor::DType;

use super::*;
use crate::exact::{
    Numbers,
    kernels::{SimdLevel, tests::numbers},
};

const WIDTH: usize = 300;
const COLUMNS: [usize; 2] = [70, 9];

/// The bits of all rows, `at_once` of them in each call, in `parts` shares.
fn bits(
    level: SimdLevel,
    products: &[Product<'_>],
    x: &[f32],
    at_once: usize,
    parts: usize,
) -> Vec<u32> {
    let calls = x.chunks(at_once * WIDTH).flat_map(|x| {
        let mut grouped = Grouped::with_simd(level, x.len() / WIDTH, WIDTH);
        for (row, x) in x.chunks_exact(WIDTH).enumerate() {
            grouped.set(row, 0, x);
        }
        let columns: usize = COLUMNS.iter().sum();
        let mut out = vec![0.0; x.len() / WIDTH * columns];
        let rows = out.chunks_exact_mut(columns).collect();
        shared(&grouped, products.to_vec(), rows, parts);
        out
    });
    calls.map(f32::to_bits).collect()
}

/// Tiles of a level that the CPU lacks run without vectors, so they are compared on every CPU.
#[test]
fn no_bit_depends_on_tiles_or_rows_or_shares() {
    let x: Vec<f32> = numbers(1).take(40 * WIDTH).collect();
    let bias: Vec<f32> = numbers(2).take(COLUMNS[0]).collect();
    for dtype in [DType::F32, DType::BF16] {
        let weights = COLUMNS.map(|columns| {
            let values: Vec<f32> = numbers(3).take(WIDTH * columns).collect();
            let mut weight = Packed::zeros([WIDTH, columns], dtype);
            weight.set_columns(0, Numbers::Floats(&values));
            weight
        });
        let products = [
            Product::all(&weights[0], Some(&bias)),
            Product::all(&weights[1], None),
        ];
        let expected = bits(SimdLevel::Scalar, &products, &x, 1, 1);
        for level in [SimdLevel::Scalar, SimdLevel::Avx2, SimdLevel::Avx512] {
            for at_once in [1, 2, 3, 4, 5, 8, 12, 16, 27, 40] {
                for parts in [1, 2, 3] {
                    let found = bits(level, &products, &x, at_once, parts);
                    assert!(found == expected, "{level}, {at_once} rows, {parts} shares");
                }
            }
        }
    }
}
