//! What a [`ResidualCheckpoint`](super::ResidualCheckpoint) was built with.

use burn::tensor::Device;

use super::{Plan, ResidualConfig, prefix::Cut};
use crate::{
    cache::{CacheError, ModelShape},
    exact::{Conformance, Subject},
    storage::LayerStore,
};

/// What a cache was built with, checked: shape and plan fit one another.
#[derive(Debug)]
pub(super) struct Setup {
    pub(super) shape: ModelShape,
    pub(super) device: Device,
    pub(super) plan: Plan,
    pub(super) byte_budget: Option<usize>,
    /// Whether entries are rebuilt and compared before they are dropped.
    pub(super) certified: bool,
}

impl Setup {
    pub(super) fn new(
        shape: &ModelShape,
        conformance: &Conformance,
        config: ResidualConfig,
    ) -> Result<Self, CacheError> {
        shape.validate()?;
        if config.byte_budget.is_some() && shape.block.scratch.is_none() {
            shape.known_intermediate()?;
        }
        let mut plan = config.plan.checked(shape)?;
        let residuals = plan.bytes_per_old_token(shape);
        let keys_values = shape.keys_values_per_old_token();
        if plan.has_residuals() && residuals >= keys_values && !config.even_if_larger {
            return Err(CacheError::Larger {
                residuals,
                keys_values,
            });
        }
        let found = conformance.subject();
        let expected = Subject::new(&shape.kernels, &found.device, shape.dtype);
        if *found != expected {
            return Err(CacheError::Conformance {
                expected: Box::new(expected),
                found: Box::new(found.clone()),
            });
        }
        let proven = conformance.is_exact() && conformance.covers_decoder();
        let certified = config.certified.unwrap_or(!proven);
        if !conformance.is_exact() && !certified {
            return Err(CacheError::NotExact(Box::new(conformance.clone())));
        }
        if certified {
            plan = plan.canonical();
        }
        Ok(Self {
            shape: shape.clone().on(&found.device),
            device: found.device.clone(),
            plan,
            byte_budget: config.byte_budget,
            certified,
        })
    }

    /// The most slots that a rebuilt layer has for a sequence, unless some entries differed when they were rebuilt.
    pub(super) const fn limit(&self) -> usize {
        self.plan.slots(self.certified)
    }

    /// An empty store for a layer that the plan rebuilds. With certified eviction entries that differ stay, so the others
    /// do not begin at one position.
    pub(super) fn store(&self) -> LayerStore {
        match self.certified {
            true => LayerStore::limited(self.limit()),
            false => LayerStore::newest(self.plan.hot()),
        }
    }

    /// The first hot token of a sequence of `length` tokens. Certified entries are dropped in whole chunks.
    pub(super) const fn first_hot(&self, length: usize) -> usize {
        let chunk = if self.certified { self.plan.chunk() } else { 1 };
        length.saturating_sub(self.plan.hot()) / chunk * chunk
    }

    /// How old tokens are cut into chunks.
    pub(super) const fn cut(&self) -> Cut {
        Cut {
            chunk: self.plan.chunk(),
            padded: self.certified || !self.shape.own_kernels,
        }
    }

    /// Refuses a batch of several sequences with certified eviction: a replay repeats the calls that were compared
    /// only if the batch does not change.
    pub(super) const fn can_certify(&self, sequences: usize) -> Result<(), CacheError> {
        if self.certified && sequences > 1 {
            return Err(CacheError::Sequences {
                expected: 1,
                found: sequences,
            });
        }
        Ok(())
    }

    /// Refuses what a cache with certified eviction cannot do.
    pub(super) const fn refuse_certified(&self, operation: &'static str) -> Result<(), CacheError> {
        if self.certified {
            return Err(CacheError::Unsupported { operation });
        }
        Ok(())
    }
}
