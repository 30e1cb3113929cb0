//! Forwarding implementations: whatever takes a backend takes a reference to one and a boxed one, and a
//! tuple struct around a backend is one.

use crate::cache::CacheBackend;

/// Every method of the trait but `fork`, done by `$inner`.
macro_rules! methods {
    ($self:ident => $inner:expr) => {
        fn begin(&mut $self, step: &$crate::cache::Step) -> Result<(), $crate::cache::CacheError> {
            $inner.begin(step)
        }

        fn keys_values(
            &mut $self,
            layer: $crate::cache::LayerIndex,
            span: $crate::cache::Span<'_>,
        ) -> Result<$crate::cache::KeysValues, $crate::cache::CacheError> {
            $inner.keys_values(layer, span)
        }

        fn wants(&$self, layer: $crate::cache::LayerIndex, step: &$crate::cache::Step) -> $crate::cache::Observation {
            $inner.wants(layer, step)
        }

        fn observe(&mut $self, layer: $crate::cache::LayerIndex, seen: $crate::cache::Observed) -> Result<(), $crate::cache::CacheError> {
            $inner.observe(layer, seen)
        }

        fn commit(&mut $self) -> Result<(), $crate::cache::CacheError> {
            $inner.commit()
        }

        fn position(&$self, row: usize) -> usize {
            $inner.position(row)
        }

        fn kept(&$self, layer: $crate::cache::LayerIndex) -> $crate::cache::Kept {
            $inner.kept(layer)
        }

        fn memory(&$self) -> $crate::memory::MemoryReport {
            $inner.memory()
        }

        fn truncate(&mut $self, to: usize) -> Result<(), $crate::cache::CacheError> {
            $inner.truncate(to)
        }

        fn clear(&mut $self) {
            $inner.clear();
        }
    };
}

macro_rules! forward {
    ($($type:ty),*) => {$(
        impl<C> CacheBackend for $type
        where
            C: CacheBackend + ?Sized,
        {
            methods!(self => (**self));

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
        impl $crate::cache::CacheBackend for $type {
            $crate::cache::forward::methods!(self => self.0);

            fn fork(&self) -> Box<dyn $crate::cache::CacheBackend> {
                Box::new(Self(self.0.clone()))
            }
        }
    };
}

pub(crate) use {backend, methods};
