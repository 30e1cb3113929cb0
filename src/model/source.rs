//! Reads weights from their source into the layout of the layers, some rows of a matrix at a time. No weight is ever
//! held twice.

use burn::tensor::{DType, Device, Tensor, TensorData};

use super::BuildError;
use crate::exact::{Numbers, Packing, Weight};

/// Where a decoder's weights come from.
pub(crate) trait WeightSource {
    type Error: std::error::Error + 'static;

    /// The dtype in which a weight is stored.
    fn dtype(&self, name: &str) -> DType;

    /// Passes the rows of a weight to `take`, in order. Every call receives some rows and the index of the first.
    fn rows(
        &mut self,
        name: &str,
        shape: &[usize],
        take: impl FnMut(usize, Numbers<'_>),
    ) -> Result<(), BuildError<Self::Error>>;
}

/// A source, and the device to which its weights go.
pub(super) struct Source<'a, S> {
    pub(super) weights: S,
    pub(super) device: &'a Device,
}

impl<S: WeightSource> Source<'_, S> {
    /// Reads vectors and joins them.
    pub(super) fn vector(
        &mut self,
        parts: &[(String, usize)],
    ) -> Result<Tensor<1>, BuildError<S::Error>> {
        let total = parts.iter().map(|(_, length)| length).sum();
        let mut data = Vec::with_capacity(total);
        for (name, length) in parts {
            let take = |_, part: Numbers<'_>| data.extend_from_slice(&part.floats());
            self.weights.rows(name, &[*length], take)?;
        }
        Ok(tensor(data, [total], self.device))
    }

    /// Reads matrices `[out, width]` and joins them to one weight `[width, sum of out]`, stored as they are, or in f32 if
    /// their dtypes differ.
    pub(super) fn weight(
        &mut self,
        parts: &[(String, usize)],
        width: usize,
    ) -> Result<Weight, BuildError<S::Error>> {
        let total: usize = parts.iter().map(|(_, out)| out).sum();
        let mut dtypes = parts.iter().map(|(name, _)| self.weights.dtype(name));
        let first = dtypes.next().unwrap_or(DType::F32);
        let dtype = match dtypes.all(|dtype| dtype == first) {
            true => first,
            false => DType::F32,
        };
        let mut packing = Packing::new([width, total], dtype, self.device);
        let mut left = 0;
        for (name, out) in parts {
            self.weights.rows(name, &[*out, width], |first, rows| {
                packing.set_columns(left + first, rows);
            })?;
            left += out;
        }
        Ok(packing.finish())
    }
}

/// Weights that a function returns as iterators over their elements.
pub(super) struct Iterators<F, D> {
    pub(super) weights: F,
    pub(super) stored: D,
}

impl<F, D, I, E> WeightSource for Iterators<F, D>
where
    F: FnMut(&str, &[usize]) -> Result<I, E>,
    D: Fn(&str) -> DType,
    I: IntoIterator<Item = f32>,
    E: std::error::Error + 'static,
{
    type Error = E;

    fn dtype(&self, name: &str) -> DType {
        (self.stored)(name)
    }

    fn rows(
        &mut self,
        name: &str,
        shape: &[usize],
        mut take: impl FnMut(usize, Numbers<'_>),
    ) -> Result<(), BuildError<E>> {
        let elements = (self.weights)(name, shape).map_err(|source| BuildError::Weight {
            name: name.into(),
            source,
        })?;
        let mut elements = elements.into_iter();
        let wrong = |found| BuildError::Elements {
            name: name.into(),
            shape: shape.to_vec(),
            found,
        };
        let total: usize = shape.iter().product();
        let width: usize = shape[1..].iter().product();
        let mut buffer = vec![0.0; (ROWS * width).min(total)];
        for from in (0..total).step_by(buffer.len()) {
            let wanted = buffer.len().min(total - from);
            let mut found = 0;
            // Not a loop over `next`: `for_each` is faster on an iterator over chunks.
            elements.by_ref().take(wanted).for_each(|element| {
                buffer[found] = element;
                found += 1;
            });
            if found < wanted {
                return Err(wrong(from + found));
            }
            take(from / width, Numbers::Floats(&buffer[..wanted]));
        }
        match elements.next() {
            None => Ok(()),
            Some(_) => Err(wrong(elements.size_hint().0.saturating_add(total + 1))),
        }
    }
}

fn tensor<const D: usize>(data: Vec<f32>, shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::from_data(TensorData::new(data, shape), (device, DType::F32))
}

/// Rows of a weight that are buffered at a time. Their columns fill whole cache lines of the layout.
const ROWS: usize = 32;
