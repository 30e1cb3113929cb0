//! The tiles of every level, every number of rows and every number of shares give the same bits.

use burn::tensor::DType;

use super::*;
use crate::exact::{
    Numbers,
    kernels::{SimdLevel, tests::numbers},
};

const WIDTH: usize = 300;
const COLUMNS: [usize; 2] = [70, 9];

/// The bits of all rows, `at_once` of them in each call, in `parts` shares. The reduction is computed in two parts that
/// meet at `middle`.
fn bits(
    level: SimdLevel,
    products: &[Product<'_>],
    x: &[f32],
    at_once: usize,
    parts: usize,
    middle: usize,
) -> Vec<u32> {
    let calls = x.chunks(at_once * WIDTH).flat_map(|x| {
        let columns: usize = COLUMNS.iter().sum();
        let mut out = vec![0.0; x.len() / WIDTH * columns];
        for reduction in [0..middle, middle..WIDTH] {
            if reduction.is_empty() {
                continue;
            }
            let count = reduction.len();
            let mut grouped = Grouped::with_simd(level, x.len() / WIDTH, count);
            for (row, x) in x.chunks_exact(WIDTH).enumerate() {
                grouped.set(row, 0, &x[reduction.clone()]);
            }
            let mut products = products.to_vec();
            for product in &mut products {
                product.rows = reduction.clone();
            }
            let rows = out.chunks_exact_mut(columns).collect();
            shared(&grouped, products, rows, parts);
        }
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
        let expected = bits(SimdLevel::Scalar, &products, &x, 1, 1, WIDTH);
        for level in [SimdLevel::Scalar, SimdLevel::Avx2, SimdLevel::Avx512] {
            for at_once in [1, 2, 3, 4, 5, 8, 12, 16, 27, 40] {
                for (parts, middle) in [(1, WIDTH), (2, WIDTH), (3, WIDTH), (1, 32), (2, 199)] {
                    let found = bits(level, &products, &x, at_once, parts, middle);
                    let parts = format!("{at_once} rows, {parts} shares, in two at {middle}");
                    assert!(found == expected, "{level}, {parts}");
                }
            }
        }
    }
}
