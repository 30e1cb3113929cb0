//! The operations of [`ExactOps`] on `flex`: tensors taken apart into slices for the kernels.

mod attention;
mod layers;

use burn::{
    backend::{BackendTensor, DispatchTensorKind, Flex, flex::FlexTensor},
    tensor::{DType, Element, Tensor, TensorData, bf16, f16},
};

use super::{
    Activation, PANEL,
    kernels::{self, threads},
    ops::{ExactOps, Layers, Reads},
};

impl ExactOps for Flex {
    fn exact_layers(x: FlexTensor, layers: Layers<'_>) -> FlexTensor {
        layers::apply(x, layers)
    }

    fn exact_norm(x: FlexTensor, weight: FlexTensor, epsilon: f64, plus_one: bool) -> FlexTensor {
        let (x, weight) = (inner_contiguous(x), weight.to_contiguous());
        let rows = Rows::<f32>::of(&x);
        let weight = Rows::<f32>::of(&weight);
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
        let [rows, cos, sin] = [&x, &cos, &sin].map(Rows::<f32>::of);
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
        let rows = Rows::<f32>::of(&x);
        let width = rows.width / 2;
        let mut out = vec![0.0; rows.count * width];
        rows.each(&mut out, width, |row, out| {
            kernels::gated(row, activation, out)
        });
        tensor(out, rows.shape_with(width))
    }

    fn exact_softcap(x: FlexTensor, cap: f64) -> FlexTensor {
        let mut capped = x.to_contiguous();
        drop(x);
        let all = capped.storage_mut::<f32>();
        threads::chunks(all, ELEMENTS, |_, x| kernels::softcap(x, cap as f32));
        capped
    }

    fn exact_write(buffer: FlexTensor, rows: FlexTensor, head: usize, at: usize) -> FlexTensor {
        match buffer.dtype() {
            DType::BF16 => write::<bf16>(buffer, rows, head, at),
            DType::F16 => write::<f16>(buffer, rows, head, at),
            _ => write::<f32>(buffer, rows, head, at),
        }
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

/// Writes rows of entries in place.
fn write<T: Element + bytemuck::Pod>(
    mut buffer: FlexTensor,
    rows: FlexTensor,
    head: usize,
    at: usize,
) -> FlexTensor {
    let rows = inner_contiguous(rows);
    let rows = Rows::<T>::of(&rows);
    let shape = buffer.layout().shape().clone();
    let shape = shape.as_slice();
    let panels = shape.len() == 4;
    let slots = if panels { shape[1] * PANEL } else { shape[1] };
    let (heads, count, width) = (rows.shape[0], rows.shape[1], rows.width);
    let all = buffer.storage_mut::<T>();
    for index in 0..heads * count {
        let (row, slot) = (rows.row(index), at + index % count);
        let first = (head + index / count) * slots * width;
        if panels {
            let panel = &mut all[first + slot / PANEL * PANEL * width..][..PANEL * width];
            for (lanes, value) in panel.chunks_exact_mut(PANEL).zip(row) {
                lanes[slot % PANEL] = *value;
            }
        } else {
            all[first + slot * width..][..width].copy_from_slice(row);
        }
    }
    buffer
}

/// The tensor itself where its last dimension is contiguous, else a copy.
fn inner_contiguous(x: FlexTensor) -> FlexTensor {
    match x.layout().strides().last() {
        Some(1) | None => x,
        Some(_) => x.to_contiguous(),
    }
}

/// The tensor as `flex` has it.
///
/// # Panics
/// If it is on another device.
fn primitive<const D: usize>(tensor: &Tensor<D>) -> FlexTensor {
    match tensor.clone().into_dispatch().kind {
        DispatchTensorKind::Flex(BackendTensor::Float(tensor)) => tensor,
        _ => panic!("all tensors of an operation are on the same device"),
    }
}

/// The vectors along the last dimension of a tensor.
struct Rows<'a, T = f32> {
    storage: &'a [T],
    shape: &'a [usize],
    strides: &'a [isize],
    start: usize,
    count: usize,
    width: usize,
}

impl<'a, T: Element + bytemuck::Pod> Rows<'a, T> {
    /// # Panics
    /// If the tensor has another dtype.
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
    fn all(&self) -> &'a [T] {
        &self.storage[self.start..][..self.count * self.width]
    }

    fn row(&self, index: usize) -> &'a [T] {
        let (mut rest, mut at) = (index, self.start as isize);
        for dim in (0..self.shape.len().saturating_sub(1)).rev() {
            at += (rest % self.shape[dim]) as isize * self.strides[dim];
            rest /= self.shape[dim];
        }
        &self.storage[at as usize..][..self.width]
    }

    /// Runs `work` over every row and its `width` elements of `out`.
    fn each(&self, out: &mut [f32], width: usize, work: impl Fn(&[T], &mut [f32]) + Sync) {
        self.each_with_index(out, width, |_, row, out| work(row, out));
    }

    /// As [`each`](Self::each), with the index of the row.
    fn each_with_index(
        &self,
        out: &mut [f32],
        width: usize,
        work: impl Fn(usize, &[T], &mut [f32]) + Sync,
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
