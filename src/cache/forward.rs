//! Forwarding implementations: whatever takes a backend takes a reference to one and a boxed one.

use crate::{
    cache::{
        CacheBackend, CacheError, Kept, KeysValues, LayerIndex, Observation, Observed, Span, Step,
    },
    memory::MemoryReport,
};

macro_rules! forward {
    ($($type:ty),*) => {$(
        impl<C> CacheBackend for $type
        where
            C: CacheBackend + ?Sized,
        {
            fn begin(&mut self, step: &Step) -> Result<(), CacheError> {
                (**self).begin(step)
            }

            fn keys_values(&mut self, layer: LayerIndex, span: Span<'_>) -> Result<KeysValues, CacheError> {
                (**self).keys_values(layer, span)
            }

            fn wants(&self, layer: LayerIndex, step: &Step) -> Observation {
                (**self).wants(layer, step)
            }

            fn observe(&mut self, layer: LayerIndex, seen: Observed) -> Result<(), CacheError> {
                (**self).observe(layer, seen)
            }

            fn commit(&mut self) -> Result<(), CacheError> {
                (**self).commit()
            }

            fn position(&self, row: usize) -> usize {
                (**self).position(row)
            }

            fn kept(&self, layer: LayerIndex) -> Kept {
                (**self).kept(layer)
            }

            fn memory(&self) -> MemoryReport {
                (**self).memory()
            }

            fn truncate(&mut self, to: usize) -> Result<(), CacheError> {
                (**self).truncate(to)
            }

            fn clear(&mut self) {
                (**self).clear();
            }

            fn fork(&self) -> Box<dyn CacheBackend> {
                (**self).fork()
            }
        }
    )*};
}

forward!(&mut C, Box<C>);

/// Implements the trait for a tuple struct whose first field does the work.
macro_rules! backend {
    ($type:ty) => {
        impl crate::cache::CacheBackend for $type {
            fn begin(&mut self, step: &crate::cache::Step) -> Result<(), crate::cache::CacheError> {
                self.0.begin(step)
            }

            fn keys_values(
                &mut self,
                layer: crate::cache::LayerIndex,
                span: crate::cache::Span<'_>,
            ) -> Result<crate::cache::KeysValues, crate::cache::CacheError> {
                self.0.keys_values(layer, span)
            }

            fn wants(
                &self,
                layer: crate::cache::LayerIndex,
                step: &crate::cache::Step,
            ) -> crate::cache::Observation {
                self.0.wants(layer, step)
            }

            fn observe(
                &mut self,
                layer: crate::cache::LayerIndex,
                seen: crate::cache::Observed,
            ) -> Result<(), crate::cache::CacheError> {
                self.0.observe(layer, seen)
            }

            fn commit(&mut self) -> Result<(), crate::cache::CacheError> {
                self.0.commit()
            }

            fn position(&self, row: usize) -> usize {
                self.0.position(row)
            }

            fn kept(&self, layer: crate::cache::LayerIndex) -> crate::cache::Kept {
                self.0.kept(layer)
            }

            fn memory(&self) -> crate::memory::MemoryReport {
                self.0.memory()
            }

            fn truncate(&mut self, to: usize) -> Result<(), crate::cache::CacheError> {
                self.0.truncate(to)
            }

            fn clear(&mut self) {
                self.0.clear();
            }

            fn fork(&self) -> Box<dyn crate::cache::CacheBackend> {
                Box::new(Self(self.0.clone()))
            }
        }
    };
}

pub(crate) use backend;
