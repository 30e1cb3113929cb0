//! The operations of [`ExactOps`] on `flex`: tensors taken apart into slices for the kernels.

mod attention;

use std::sync::Arc;

use burn::{
    backend::{Flex, flex::FlexTensor},
    tensor::{DType, TensorData, bf16, f16},
};

use super::{
    Activation,
    kernels::{self, threads},
    ops::{ExactOps, Reads},
    packed::Packed,
};

impl ExactOps for Flex {
    fn exact_linear(x: FlexTensor, weight: Arc<Packed>) -> FlexTensor {
        let [_, columns] = weight.dims();
        let x = x.to_contiguous();
        let rows = Rows::of(&x);
        let mut out = vec![0.0; rows.count * columns];
        weight.multiply(rows.all(), &mut out);
        tensor(out, rows.shape_with(columns))
    }

    fn exact_norm(x: FlexTensor, weight: FlexTensor, epsilon: f64, plus_one: bool) -> FlexTensor {
        let (x, weight) = (inner_contiguous(x), weight.to_contiguous());
        let rows = Rows::of(&x);
        let weight = Rows::of(&weight);
        let weight = weight.row(0);
        let mut out = vec![0.0; rows.count * rows.width];
        rows.each(&mut out, rows.width, |row, out| {
            kernels::norm(row, weight, epsilon as f32, plus_one, out);
        });
        tensor(out, rows.shape_with(rows.width))
    }

    fn exact_rotate(x: FlexTensor, cos: FlexTensor, sin: FlexTensor) -> FlexTensor {
        let x = inner_contiguous(x);
        let (cos, sin) = (cos.to_contiguous(), sin.to_contiguous());
        let (rows, cos, sin) = (Rows::of(&x), Rows::of(&cos), Rows::of(&sin));
        let [_, heads, tokens] = [rows.shape[0], rows.shape[1], rows.shape[2]];
        let [batch_wide, heads_wide] = [cos.shape[0] > 1, cos.shape[1] > 1];
        let mut out = vec![0.0; rows.count * rows.width];
        rows.each_with_index(&mut out, rows.width, |index, row, out| {
            let (token, head, sequence) = (
                index % tokens,
                index / tokens % heads,
                index / tokens / heads,
            );
            let head = if heads_wide { head } else { 0 };
            let sequence = if batch_wide { sequence } else { 0 };
            let angle = (sequence * cos.shape[1] + head) * tokens + token;
            kernels::rotate(row, cos.row(angle), sin.row(angle), out);
        });
        tensor(out, rows.shape_with(rows.width))
    }

    fn exact_gated(x: FlexTensor, activation: Activation) -> FlexTensor {
        let x = inner_contiguous(x);
        let rows = Rows::of(&x);
        let width = rows.width / 2;
        let mut out = vec![0.0; rows.count * width];
        rows.each(&mut out, width, |row, out| {
            kernels::gated(row, activation, out)
        });
        tensor(out, rows.shape_with(width))
    }

    fn exact_attention(query: FlexTensor, reads: Reads<'_>) -> (FlexTensor, FlexTensor) {
        let first = reads.segments.iter().flatten().next();
        match first.map_or(DType::F32, |segment| segment.values().dtype()) {
            DType::BF16 => attention::attend::<bf16>(query, reads),
            DType::F16 => attention::attend::<f16>(query, reads),
            _ => attention::attend::<f32>(query, reads),
        }
    }
}

/// The tensor itself where its last dimension is contiguous, else a copy.
fn inner_contiguous(x: FlexTensor) -> FlexTensor {
    match x.layout().strides().last() {
        Some(1) | None => x,
        Some(_) => x.to_contiguous(),
    }
}

/// The vectors along the last dimension of a tensor.
struct Rows<'a> {
    storage: &'a [f32],
    shape: &'a [usize],
    strides: &'a [isize],
    start: usize,
    count: usize,
    width: usize,
}

impl<'a> Rows<'a> {
    /// # Panics
    /// If the tensor is not f32.
    fn of(x: &'a FlexTensor) -> Self {
        let layout = x.layout();
        let shape = layout.shape().as_slice();
        let width = shape.last().copied().unwrap_or(1);
        Self {
            storage: x.storage(),
            shape,
            strides: layout.strides(),
            start: layout.start_offset(),
            count: shape[..shape.len().saturating_sub(1)].iter().product(),
            width,
        }
    }

    /// All rows of a contiguous tensor.
    fn all(&self) -> &'a [f32] {
        &self.storage[self.start..][..self.count * self.width]
    }

    fn row(&self, index: usize) -> &'a [f32] {
        let (mut rest, mut at) = (index, self.start as isize);
        for dim in (0..self.shape.len().saturating_sub(1)).rev() {
            at += (rest % self.shape[dim]) as isize * self.strides[dim];
            rest /= self.shape[dim];
        }
        &self.storage[at as usize..][..self.width]
    }

    /// Runs `work` over every row and its `width` elements of `out`.
    fn each(&self, out: &mut [f32], width: usize, work: impl Fn(&[f32], &mut [f32]) + Sync) {
        self.each_with_index(out, width, |_, row, out| work(row, out));
    }

    /// As [`each`](Self::each), with the index of the row.
    fn each_with_index(
        &self,
        out: &mut [f32],
        width: usize,
        work: impl Fn(usize, &[f32], &mut [f32]) + Sync,
    ) {
        if out.is_empty() {
            return;
        }
        let together = (ELEMENTS / width).max(1);
        let run = |chunk: usize, out: &mut [f32]| {
            for (index, out) in out.chunks_exact_mut(width).enumerate() {
                let index = chunk * together + index;
                work(index, self.row(index), out);
            }
        };
        if self.count <= together {
            run(0, out);
        } else {
            threads::chunks(out, together * width, run);
        }
    }

    /// The shape, with another last dimension.
    fn shape_with(&self, width: usize) -> Vec<usize> {
        let mut shape = self.shape.to_vec();
        if let Some(last) = shape.last_mut() {
            *last = width;
        }
        shape
    }
}

/// Elements that are not worth a thread of their own.
const ELEMENTS: usize = 1 << 14;

fn tensor(data: Vec<f32>, shape: Vec<usize>) -> FlexTensor {
    FlexTensor::from_data(TensorData::new(data, shape))
}
