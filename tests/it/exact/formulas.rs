//! The formulas of `docs/exactness.md`, as plain loops. The routines of `exact` have their bits.

mod attention;

use burn::tensor::{Device, Tensor, TensorData};
use kv_direct::exact::{Activation, Rounding, Weight, gated, linear, rms_norm, rotate, softcap};

use crate::support::{feed::bits, process::again, random::random};

fn tensor<const D: usize>(data: &[f32], shape: [usize; D]) -> Tensor<D> {
    Tensor::from_data(TensorData::new(data.to_vec(), shape), &Device::flex())
}

fn numbers(seed: u64, count: usize, size: f32) -> Vec<f32> {
    random(seed).map(|x| x * size).take(count).collect()
}

/// Asserts equal bits, and names the first that differs.
#[track_caller]
fn equal<const D: usize>(found: &Tensor<D>, expected: &[f32], what: &str) {
    let found = bits(found);
    assert_eq!(found.len(), expected.len(), "{what}");
    let differing = |(found, expected): (&u32, &f32)| *found != expected.to_bits();
    if let Some(at) = found.iter().zip(expected).position(differing) {
        let (found, expected) = (f32::from_bits(found[at]), expected[at]);
        panic!("{what}: element {at} is {found:e} and not {expected:e}");
    }
}

/// `x · y + sum`, in the rounding of this process.
fn fma(x: f32, y: f32, sum: f32) -> f32 {
    match Rounding::current() {
        Rounding::Separate => x * y + sum,
        _ => x.mul_add(y, sum),
    }
}

#[test]
fn formulas_hold_in_separate_rounding() {
    again(
        module_path!(),
        "separate_rounding",
        &[("KV_DIRECT_ROUNDING", "separate")],
    );
}

/// One chain of fused multiply-adds.
fn chain(pairs: impl Iterator<Item = (f32, f32)>) -> f32 {
    pairs.fold(0.0, |sum, (x, y)| fma(x, y, sum))
}

/// 32 lanes, folded by halves.
fn fold(mut lanes: Vec<f32>) -> f32 {
    while lanes.len() > 1 {
        let upper = lanes.split_off(lanes.len() / 2);
        for (lane, upper) in lanes.iter_mut().zip(upper) {
            *lane += upper;
        }
    }
    lanes[0]
}

fn exp(x: f32) -> f32 {
    let x = x.max(-87.3);
    let n = fma(x, f32::from_bits(0x3fb8_aa3b), 12_582_912.0) - 12_582_912.0;
    let r = fma(n, -0.693_359_4, x);
    let r = fma(n, 2.121_944_4e-4, r);
    let coefficients = [
        1.398_199_9e-3,
        8.333_452e-3,
        4.166_579_6e-2,
        1.666_666_5e-1,
        0.5,
    ];
    let p = coefficients
        .into_iter()
        .fold(1.987_569_2e-4, |p, c| fma(p, r, c));
    let p = fma(p, r * r, r) + 1.0;
    // A product with a power of two, which is exact.
    p * f32::from_bits(((n as i32 + 127) as u32) << 23)
}

fn tanh(x: f32) -> f32 {
    if x.abs() < 0.625 {
        let z = x * x;
        let coefficients = [2.063_909e-2, -5.373_971_6e-2, 1.333_144_2e-1, -3.333_328e-1];
        let p = coefficients
            .into_iter()
            .fold(-5.704_988_7e-3, |p, c| fma(p, z, c));
        fma(p * z, x, x)
    } else {
        let e = exp(-2.0 * x.abs());
        ((1.0 - e) / (1.0 + e)).copysign(x)
    }
}

#[test]
fn a_linear_layer_is_one_chain_for_each_output() {
    for (rows, width, out, seed) in [(1, 700, 97, 1), (5, 129, 33, 2), (67, 300, 70, 3)] {
        let (x, w) = (
            numbers(seed, rows * width, 1.0),
            numbers(seed + 10, width * out, 1.0),
        );
        let weight = Weight::new(tensor(&w, [width, out]));
        let expected: Vec<f32> = (0..rows * out)
            .map(|i| {
                let (row, column) = (i / out, i % out);
                chain((0..width).map(|k| (x[row * width + k], w[k * out + column])))
            })
            .collect();
        let found = linear(tensor(&x, [1, rows, width]), &weight);
        equal(&found, &expected, &format!("{rows} rows of {width}"));
    }
}

#[test]
fn a_norm_sums_squares_in_32_lanes() {
    let epsilon = 1e-5;
    for width in [1, 31, 64, 100, 577] {
        let (x, weight) = (numbers(4, 3 * width, 2.0), numbers(5, width, 1.0));
        for plus_one in [false, true] {
            let mut expected = Vec::new();
            for row in x.chunks(width) {
                let mut lanes = vec![0.0; 32];
                for (i, x) in row.iter().enumerate() {
                    lanes[i % 32] = fma(*x, *x, lanes[i % 32]);
                }
                let mean = fold(lanes) / width as f32;
                let scale = 1.0 / (mean + epsilon as f32).sqrt();
                expected.extend(row.iter().zip(&weight).map(|(x, weight)| {
                    let weight = if plus_one { 1.0 + weight } else { *weight };
                    (x * scale) * weight
                }));
            }
            let (x, weight) = (tensor(&x, [1, 3, width]), tensor(&weight, [width]));
            let found = rms_norm(x, &weight, epsilon, plus_one);
            equal(&found, &expected, &format!("{width}, {plus_one}"));
        }
    }
}

#[test]
fn a_rotation_is_a_product_and_a_fused_multiply_add() {
    let (heads, tokens, head_dim) = (3, 5, 44);
    let half = head_dim / 2;
    let x = numbers(6, heads * tokens * head_dim, 3.0);
    let (cos, sin) = (
        numbers(7, tokens * half, 1.0),
        numbers(8, tokens * half, 1.0),
    );
    let mut expected = vec![0.0; x.len()];
    for (row, (x, out)) in x
        .chunks(head_dim)
        .zip(expected.chunks_mut(head_dim))
        .enumerate()
    {
        for i in 0..half {
            let at = row % tokens * half + i;
            let (low, high) = (x[i], x[half + i]);
            out[i] = fma(low, cos[at], -(high * sin[at]));
            out[half + i] = fma(high, cos[at], low * sin[at]);
        }
    }
    let angles = |of: &[f32]| tensor(of, [1, 1, tokens, half]);
    let x = tensor(&x, [1, heads, tokens, head_dim]);
    equal(
        &rotate(x, &angles(&cos), &angles(&sin)),
        &expected,
        "rotation",
    );
}

#[test]
fn gates_are_made_of_the_polynomials() {
    // All sizes at which the polynomials change, and beyond.
    let mut gate = numbers(9, 3000, 1.0);
    gate.extend(numbers(10, 3000, 12.0));
    gate.extend(numbers(11, 400, 120.0));
    gate.extend([0.0, -0.0, 0.625, -0.625, 87.3, -87.3, -90.0, 43.65, -43.65]);
    let up = numbers(12, gate.len(), 2.0);
    let both = [&gate[..], &up[..]].concat();
    let silu = |x: f32| {
        let e = exp(-x.abs());
        let part = if x < 0.0 { e } else { 1.0 };
        x * (part / (1.0 + e))
    };
    let gelu = |x: f32| {
        let inner = 0.797_884_6 * fma(0.044_715, x * x * x, x);
        0.5 * x * (1.0 + tanh(inner))
    };
    let of = |activation: &dyn Fn(f32) -> f32| -> Vec<f32> {
        let pairs = gate.iter().zip(&up);
        pairs.map(|(gate, up)| activation(*gate) * up).collect()
    };
    let x = tensor(&both, [1, 1, both.len()]);
    equal(&gated(x.clone(), Activation::Silu), &of(&silu), "silu");
    equal(&gated(x, Activation::GeluTanh), &of(&gelu), "gelu");
}

#[test]
fn a_soft_cap_is_made_of_tanh() {
    // More numbers than one thread takes, and the sizes at which tanh changes.
    let mut x = numbers(13, 40_000, 1.0);
    x.extend(numbers(14, 3000, 60.0));
    x.extend([0.0, -0.0, 0.625, -0.625, 1e4, -1e4, f32::INFINITY]);
    for cap in [1.0_f32, 2.7, 30.0] {
        let expected: Vec<f32> = x.iter().map(|x| cap * tanh(x / cap)).collect();
        let capped = softcap(tensor(&x, [1, 1, x.len()]), f64::from(cap));
        equal(&capped, &expected, &format!("{cap}"));
    }
    // A part of a tensor that others hold.
    let whole = tensor(&x, [1, 1, x.len()]);
    let part = whole.clone().slice_dim(2, 5..105);
    let expected: Vec<f32> = x[5..105].iter().map(|x| 2.0 * tanh(x / 2.0)).collect();
    equal(&softcap(part, 2.0), &expected, "a part");
    equal(&whole, &x, "the whole is as it was");
}
