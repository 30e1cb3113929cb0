//! The weight of a linear layer, laid out for its device.

#[cfg(feature = "flex")]
use std::sync::Arc;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};

#[cfg(any(feature = "flex", feature = "model"))]
use super::Numbers;
#[cfg(feature = "flex")]
use super::{owned, packed::Packed};

/// The weight of a linear layer, laid out for its device. Cloning is cheap.
///
/// On `flex` an f32 tensor is packed into panels of 32 columns. A decoder that is loaded packs bf16 and f16 weights too,
/// as stored: products widen them in registers, so they have the bits of an f32 copy. Every other weight is a contiguous
/// tensor.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use kv_direct::exact::Weight;
///
/// let weight = Weight::new(Tensor::ones([700, 3], &Device::flex()));
/// assert_eq!(weight.dims(), [700, 3]);
/// ```
#[derive(Debug, Clone)]
pub struct Weight(Stored);

#[derive(Debug, Clone)]
enum Stored {
    #[cfg(feature = "flex")]
    Packed(Arc<Packed>),
    Plain(Box<Tensor<2>>),
}

impl Weight {
    /// A weight from `[in, out]`.
    ///
    /// # Cost
    /// An f32 weight on `flex` is copied into panels.
    #[must_use]
    pub fn new(weight: Tensor<2>) -> Self {
        #[cfg(feature = "flex")]
        if owned(&weight.device(), weight.dtype()) {
            let [width, out] = weight.dims();
            let mut packing = Packing::new([width, out], weight.dtype(), &weight.device());
            for first in (0..out).step_by(COLUMNS) {
                let part = weight
                    .clone()
                    .slice_dim(1, first..(first + COLUMNS).min(out));
                let columns = part.transpose().into_data().convert::<f32>();
                let columns = columns.try_into_vec().expect("converted to f32");
                packing.set_columns(first, Numbers::Floats(&columns));
            }
            return packing.finish();
        }
        Self(Stored::Plain(Box::new(weight)))
    }

    /// `[in, out]`.
    #[must_use]
    pub fn dims(&self) -> [usize; 2] {
        match &self.0 {
            #[cfg(feature = "flex")]
            Stored::Packed(packed) => packed.dims(),
            Stored::Plain(weight) => weight.dims(),
        }
    }

    /// The dtype in which it is stored.
    #[must_use]
    pub fn dtype(&self) -> DType {
        match &self.0 {
            #[cfg(feature = "flex")]
            Stored::Packed(packed) => packed.dtype(),
            Stored::Plain(weight) => weight.dtype(),
        }
    }

    /// The device it is on.
    #[must_use]
    pub fn device(&self) -> Device {
        match &self.0 {
            #[cfg(feature = "flex")]
            Stored::Packed(_) => Device::flex(),
            Stored::Plain(weight) => weight.device(),
        }
    }

    /// The columns with these indices as rows, `[columns, in]`: the vectors of an embedding that is also the head.
    /// Packed columns are returned in f32.
    ///
    /// # Panics
    /// If there is no such column.
    #[must_use]
    pub fn columns(&self, columns: &[u32]) -> Tensor<2> {
        match &self.0 {
            #[cfg(feature = "flex")]
            Stored::Packed(packed) => {
                let [width, _] = packed.dims();
                let mut rows = vec![0.0; columns.len() * width];
                for (&column, row) in columns.iter().zip(rows.chunks_exact_mut(width.max(1))) {
                    packed.column(column as usize, row);
                }
                let data = TensorData::new(rows, [columns.len(), width]);
                Tensor::from_data(data, (&Device::flex(), DType::F32))
            }
            Stored::Plain(weight) => {
                let ids: Vec<i64> = columns.iter().map(|&id| i64::from(id)).collect();
                let ids = TensorData::new(ids, [columns.len()]);
                let ids = Tensor::<1, Int>::from_data(ids, &weight.device());
                let weight: &Tensor<2> = weight;
                weight.clone().select(1, ids).transpose()
            }
        }
    }

    /// The panels, if it has them.
    #[cfg(feature = "flex")]
    pub(super) fn packed(&self) -> Option<&Packed> {
        match &self.0 {
            Stored::Packed(packed) => Some(packed),
            Stored::Plain(_) => None,
        }
    }

    /// The tensor of a weight without panels.
    pub(super) fn plain(&self) -> &Tensor<2> {
        match &self.0 {
            #[cfg(feature = "flex")]
            Stored::Packed(_) => unreachable!("whoever asks has asked for panels before"),
            Stored::Plain(weight) => weight,
        }
    }
}

/// A weight that is filled column by column, in the layout of its device: nothing is held twice.
#[cfg(any(feature = "flex", feature = "model"))]
#[derive(Debug)]
pub(crate) enum Packing {
    #[cfg(feature = "flex")]
    Packed(Packed),
    Plain {
        data: Vec<f32>,
        dims: [usize; 2],
        device: Device,
    },
}

#[cfg(any(feature = "flex", feature = "model"))]
impl Packing {
    /// All zeros, to be stored as `dtype` where the layout allows it, else in f32.
    pub(crate) fn new(dims: [usize; 2], dtype: DType, device: &Device) -> Self {
        #[cfg(feature = "flex")]
        if *device == Device::flex() {
            return Self::Packed(Packed::zeros(dims, dtype));
        }
        let _ = dtype;
        Self::Plain {
            data: vec![0.0; dims[0] * dims[1]],
            dims,
            device: device.clone(),
        }
    }

    /// Writes consecutive columns from `first` on, one after another in `columns`.
    pub(crate) fn set_columns(&mut self, first: usize, columns: Numbers<'_>) {
        match self {
            #[cfg(feature = "flex")]
            Self::Packed(packed) => packed.set_columns(first, columns),
            Self::Plain {
                data,
                dims: [width, out],
                ..
            } => {
                let columns = columns.floats();
                let count = columns.len() / *width;
                for (row, to) in data.chunks_exact_mut(*out).enumerate() {
                    let from = columns[row..].iter().step_by(*width);
                    for (to, from) in to[first..first + count].iter_mut().zip(from) {
                        *to = *from;
                    }
                }
            }
        }
    }

    /// The weight.
    pub(crate) fn finish(self) -> Weight {
        Weight(match self {
            #[cfg(feature = "flex")]
            Self::Packed(packed) => Stored::Packed(Arc::new(packed)),
            Self::Plain { data, dims, device } => {
                let data = TensorData::new(data, dims);
                let weight = Tensor::from_data(data, (&device, DType::F32));
                Stored::Plain(Box::new(weight))
            }
        })
    }
}

/// Columns that are copied at a time.
#[cfg(feature = "flex")]
const COLUMNS: usize = 256;
