//! The weights of a folder as the decoder asks for them.

use burn::tensor::DType;

use super::{LoadError, Loaded, names::Names, weights::Weights};
use crate::{
    exact::Numbers,
    model::{BuildError, WeightSource},
};

/// The tensors of a folder by their neutral names. It reports each one that was read.
pub(super) struct Folder<'a, P> {
    pub(super) weights: &'a Weights,
    pub(super) names: &'a Names,
    /// Bytes read so far, as stored.
    pub(super) bytes: u64,
    pub(super) total: u64,
    pub(super) progress: P,
}

impl<P: FnMut(Loaded<'_>)> WeightSource for Folder<'_, P> {
    type Error = LoadError;

    fn dtype(&self, name: &str) -> DType {
        self.weights.dtype(&self.names.tensor(name))
    }

    fn rows(
        &mut self,
        name: &str,
        _: &[usize],
        take: impl FnMut(usize, Numbers<'_>),
    ) -> Result<(), BuildError<LoadError>> {
        let tensor = self.names.tensor(name);
        let read = self.weights.rows(&tensor, take);
        read.map_err(|source| BuildError::Weight {
            name: name.into(),
            source,
        })?;
        self.bytes += self.weights.stored_bytes(&tensor);
        (self.progress)(Loaded {
            tensor: &tensor,
            bytes: self.bytes,
            total: self.total,
        });
        Ok(())
    }
}
