//! The comparisons of [`Conformance::probe`](super::Conformance::probe).

use burn::tensor::{DType, Device, Tensor, TensorData};

use super::{Check, CheckKind, KernelShapes};
use crate::{
    exact::{
        ATTENTION_BLOCK, AttentionParams, PANEL, Segment, Weight, attention, linear, rms_norm,
    },
    positions::Positions,
};

/// Makes every comparison for these shapes.
pub(super) fn run(shapes: &KernelShapes, device: &Device, dtype: DType) -> Vec<Check> {
    let mut checks = Vec::new();
    let mut noise = Noise(0x9e37_79b9_7f4a_7c15);
    for &[width, out] in &shapes.linears {
        let weight = noise.tensor([width, out.min(MOST_COLUMNS)], device, dtype);
        let x = noise.tensor([1, ROWS, width], device, dtype);
        let weight = Weight::new(weight);
        let each = |x: Tensor<3>| linear(x, &weight);
        checks.extend(compare_rows(CheckKind::Linear, vec![width, out], x, each));
    }
    for &width in &shapes.norms {
        let weight = noise.tensor([width], device, dtype);
        let x = noise.tensor([1, ROWS, width], device, dtype);
        let each = |x: Tensor<3>| rms_norm(x, &weight, 1e-6, false);
        checks.extend(compare_rows(CheckKind::Norm, vec![width], x, each));
    }
    checks.extend(compare_queries(shapes, &mut noise, device, dtype));
    checks
}

/// Rows of the one large call over a linear layer or a norm.
const ROWS: usize = 2 * 257 + 1;
/// Rows of the small calls that are compared with it.
const CALLS: [usize; 6] = [1, 2, 3, 16, 65, 257];
/// The most columns of a linear layer that are probed.
const MOST_COLUMNS: usize = 4096;

/// Compares `each` over all rows with `each` over a few rows at a time.
fn compare_rows(
    kind: CheckKind,
    shape: Vec<usize>,
    x: Tensor<3>,
    each: impl Fn(Tensor<3>) -> Tensor<3>,
) -> Vec<Check> {
    let whole = bits(each(x.clone()));
    let call = |from, count| bits(each(x.clone().slice_dim(1, from..from + count)));
    compare(kind, &shape, x.dims()[1], &whole, call)
}

/// Compares `whole`, the bits of one call over all `rows` rows, with those of `call(from, count)`. The small calls
/// have [`CALLS`] rows and start at a few offsets.
fn compare(
    kind: CheckKind,
    shape: &[usize],
    rows: usize,
    whole: &[u64],
    call: impl Fn(usize, usize) -> Vec<u64>,
) -> Vec<Check> {
    let width = whole.len() / rows;
    CALLS
        .into_iter()
        .map(|count| {
            let (mut compared, mut differing) = (0, 0);
            for from in offsets(rows, count) {
                let part = call(from, count);
                let expected = whole[from * width..].chunks(width);
                compared += count;
                differing += part
                    .chunks(width)
                    .zip(expected)
                    .filter(|(a, b)| a != b)
                    .count();
            }
            Check {
                kind,
                shape: shape.to_vec(),
                rows: count,
                compared,
                differing,
            }
        })
        .collect()
}

/// Compares the queries of one call over all keys with small calls. A small call reads the keys up to its last query,
/// from one segment or from many.
fn compare_queries(
    shapes: &KernelShapes,
    noise: &mut Noise,
    device: &Device,
    dtype: DType,
) -> Vec<Check> {
    let &KernelShapes {
        heads,
        kv_heads,
        head_dim,
        ..
    } = shapes;
    let shape = vec![heads, kv_heads, head_dim];
    let tokens = 2 * ATTENTION_BLOCK + ROWS;
    let query: Tensor<4> = noise.tensor([1, heads, tokens, head_dim], device, dtype);
    let keys: Tensor<3> = noise.tensor([kv_heads, tokens, head_dim], device, dtype);
    let values: Tensor<3> = noise.tensor([kv_heads, tokens, head_dim], device, dtype);
    let params = AttentionParams::new(1.0 / (head_dim as f64).sqrt());
    let run = |from: usize, count: usize, held: usize, chunks: &[usize]| {
        let mut segments: Vec<Segment> = Vec::new();
        let mut at = 0;
        for &chunk in chunks.iter().cycle() {
            let rows = at..(at + chunk).min(held);
            // The slots of a chunk start in the panel in which those of the last one end.
            let first = at / PANEL * PANEL;
            let part = |of: &Tensor<3>| of.clone().slice_dim(1, first..rows.end);
            let free = std::iter::repeat_n(Positions::EMPTY, at - first);
            let positions = free.chain(rows.clone()).collect();
            let segment = Segment::from_rows(part(&keys), part(&values), vec![positions], first);
            segments.push(segment);
            at = rows.end;
            if at == held {
                break;
            }
        }
        let query_positions = Positions::contiguous(&[from], &[count]);
        let query = query.clone().slice_dim(2, from..from + count);
        bits(attention(query, &query_positions, &[segments], &params))
    };
    let whole = run(0, tokens, tokens, &[tokens]);
    let mut checks = Vec::new();
    for (kind, chunks) in [
        (CheckKind::Queries, &[tokens][..]),
        (CheckKind::Chunks, &[1, 65, 3, 130]),
    ] {
        let call = |from, count| run(from, count, from + count, chunks);
        checks.extend(compare(kind, &shape, tokens, &whole, call));
    }
    checks
}

/// The fewest single rows that are compared: where results are rounded to few bits, most differences do not show.
const SINGLE: usize = 32;

/// Offsets at which a call of `count` out of `rows` rows starts: both ends, the middle, and a few others.
fn offsets(rows: usize, count: usize) -> Vec<usize> {
    let last = rows - count;
    let mut offsets = vec![
        0,
        1,
        last / 3,
        last / 2,
        (2 * ATTENTION_BLOCK - 1).min(last),
        last.saturating_sub(1),
        last,
    ];
    if count == 1 {
        offsets.extend((0..SINGLE).map(|i| i * last / SINGLE));
    }
    offsets.retain(|&offset| offset <= last);
    offsets.sort_unstable();
    offsets.dedup();
    offsets
}

/// The bits of every element, whatever the dtype.
fn bits<const D: usize>(tensor: Tensor<D>) -> Vec<u64> {
    let data = tensor.into_data();
    let size = data.dtype().size();
    data.as_bytes()
        .chunks(size)
        .map(|element| {
            element
                .iter()
                .rev()
                .fold(0, |bits, &byte| bits << 8 | u64::from(byte))
        })
        .collect()
}

/// A small xorshift generator. The probe must not depend on the generator of a device.
struct Noise(u64);

impl Noise {
    fn tensor<const D: usize>(
        &mut self,
        shape: [usize; D],
        device: &Device,
        dtype: DType,
    ) -> Tensor<D> {
        let data: Vec<f64> = (0..shape.iter().product()).map(|_| self.next()).collect();
        Tensor::from_data(TensorData::new(data, shape), (device, dtype))
    }

    /// A number of 53 bits, uniform in -1 .. 1. With shorter numbers, f64 holds sums of products exactly, in any
    /// order.
    fn next(&mut self) -> f64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }
}
