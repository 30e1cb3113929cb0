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
