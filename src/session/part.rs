//! A value of a state as a tensor of a file.

use burn::tensor::{DType, ExecutionError};
use safetensors::Dtype;

use super::{SessionError, facts::word};
use crate::cache::StateValue;

/// A value of a state, with its dtype and shape in a file.
pub(super) struct Part<'a> {
    pub(super) name: &'a str,
    pub(super) dtype: &'static str,
    pub(super) shape: Vec<usize>,
    /// Bytes of an element.
    pub(super) size: usize,
    value: &'a StateValue,
}

impl<'a> Part<'a> {
    pub(super) fn new(name: &'a str, value: &'a StateValue) -> Result<Self, SessionError> {
        let (dtype, shape) = match value {
            StateValue::Tensor(tensor) => (stored(tensor.dtype()), tensor.dims().to_vec()),
            StateValue::Integers(values) => (Some(Dtype::U64), vec![values.len()]),
            StateValue::Ids(values) => (Some(Dtype::U32), vec![values.len()]),
            StateValue::Floats(values) => (Some(Dtype::F32), vec![values.len()]),
        };
        let known = dtype.and_then(|dtype| Some((word(dtype)?, dtype.bitsize() / 8)));
        let (dtype, size) = known.ok_or_else(|| SessionError::Dtype {
            name: name.into(),
            dtype: match value {
                StateValue::Tensor(tensor) => tensor.dtype(),
                _ => DType::F32,
            },
        })?;
        Ok(Self {
            name,
            dtype,
            shape,
            size,
            value,
        })
    }

    /// Number of its bytes.
    pub(super) fn len(&self) -> usize {
        self.shape.iter().product::<usize>() * self.size
    }

    /// Its elements in order, the last dimension first to change, each with its lowest byte first.
    pub(super) fn bytes(&self) -> Result<Vec<u8>, ExecutionError> {
        Ok(match self.value {
            StateValue::Tensor(tensor) => tensor.clone().try_into_data()?.as_bytes().to_vec(),
            StateValue::Integers(values) => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            StateValue::Ids(values) => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            StateValue::Floats(values) => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        })
    }
}

/// The dtype in a file for the dtype of a tensor; `None` if a file cannot hold it.
const fn stored(dtype: DType) -> Option<Dtype> {
    match dtype {
        DType::F64 => Some(Dtype::F64),
        DType::F32 => Some(Dtype::F32),
        DType::F16 => Some(Dtype::F16),
        DType::BF16 => Some(Dtype::BF16),
        _ => None,
    }
}
