//! Forwarding implementations: a reference to a backend, a boxed one, and a tuple struct around one are backends.

use crate::cache::CacheBackend;

/// The methods of [`CacheBackend`] that a wrapper leaves to the backend inside it, by name.
///
/// `queries` stands for `lengths`, `reach`, `cached` and `memory`; `lifecycle` for `truncate`, `begin_draft`, `end_draft`,
/// `select_sequences`, `park`, `resume`, `state`, `set_state` and `join`. Each can be named alone. A fork that is forwarded is a fork of
/// the inner backend, without its wrapper.
///
/// ```
/// use kv_direct::{cache::{CacheBackend, CacheError, Step}, forward_backend};
///
/// /// Counts the steps of a backend.
/// #[derive(Debug)]
/// struct Counted<C> {
///     inner: C,
///     steps: usize,
/// }
///
/// impl<C: CacheBackend> CacheBackend for Counted<C> {
///     fn begin(&mut self, step: &Step) -> Result<(), CacheError> {
///         self.inner.begin(step)?;
///         self.steps += 1;
///         Ok(())
///     }
///
///     forward_backend!(self => self.inner; keys_values wants observe commit queries lifecycle clear fork);
/// }
/// ```
#[macro_export]
macro_rules! forward_backend {
    ($self:ident => $inner:expr; $($method:ident)+) => {$(
        $crate::forward_backend!(@ $method $self $inner);
    )+};
    (@ queries $self:ident $inner:expr) => {
        $crate::forward_backend!($self => $inner; lengths reach cached memory);
    };
    (@ lifecycle $self:ident $inner:expr) => {
        $crate::forward_backend!(
            $self => $inner;
            truncate begin_draft end_draft select_sequences park resume state set_state join
        );
    };
    (@ begin $self:ident $inner:expr) => {
        fn begin(&mut $self, step: &$crate::cache::Step) -> Result<(), $crate::cache::CacheError> {
            $inner.begin(step)
        }
    };
    (@ keys_values $self:ident $inner:expr) => {
        fn keys_values(&mut $self, layer: $crate::cache::LayerIndex, span: $crate::cache::Span<'_>) -> Result<$crate::cache::KeysValues, $crate::cache::CacheError> {
            $inner.keys_values(layer, span)
        }
    };
    (@ wants $self:ident $inner:expr) => {
        fn wants(&$self, layer: $crate::cache::LayerIndex) -> $crate::cache::Observation {
            $inner.wants(layer)
        }
    };
    (@ observe $self:ident $inner:expr) => {
        fn observe(&mut $self, layer: $crate::cache::LayerIndex, observed: $crate::cache::Observed) -> Result<(), $crate::cache::CacheError> {
            $inner.observe(layer, observed)
        }
    };
    (@ commit $self:ident $inner:expr) => {
        fn commit(&mut $self) -> Result<(), $crate::cache::CacheError> {
            $inner.commit()
        }
    };
    (@ lengths $self:ident $inner:expr) => {
        fn lengths(&$self) -> &[usize] {
            $inner.lengths()
        }
    };
    (@ reach $self:ident $inner:expr) => {
        fn reach(&$self) -> Vec<usize> {
            $inner.reach()
        }
    };
    (@ cached $self:ident $inner:expr) => {
        fn cached(&$self, layer: $crate::cache::LayerIndex) -> $crate::cache::CachedPositions {
            $inner.cached(layer)
        }
    };
    (@ memory $self:ident $inner:expr) => {
        fn memory(&$self) -> $crate::memory::MemoryReport {
            $inner.memory()
        }
    };
    (@ truncate $self:ident $inner:expr) => {
        fn truncate(&mut $self, to: &[usize]) -> Result<(), $crate::cache::CacheError> {
            $inner.truncate(to)
        }
    };
    (@ begin_draft $self:ident $inner:expr) => {
        fn begin_draft(&mut $self) -> Result<(), $crate::cache::CacheError> {
            $inner.begin_draft()
        }
    };
    (@ end_draft $self:ident $inner:expr) => {
        fn end_draft(&mut $self, draft: $crate::cache::Draft) -> Result<(), $crate::cache::CacheError> {
            $inner.end_draft(draft)
        }
    };
    (@ select_sequences $self:ident $inner:expr) => {
        fn select_sequences(&mut $self, sequences: &[usize]) -> Result<(), $crate::cache::CacheError> {
            $inner.select_sequences(sequences)
        }
    };
    (@ park $self:ident $inner:expr) => {
        fn park(&mut $self) -> Result<(), $crate::cache::CacheError> {
            $inner.park()
        }
    };
    (@ state $self:ident $inner:expr) => {
        fn state(&$self) -> Result<$crate::cache::State, $crate::cache::CacheError> {
            $inner.state()
        }
    };
    (@ set_state $self:ident $inner:expr) => {
        fn set_state(&mut $self, state: &$crate::cache::State) -> Result<(), $crate::cache::CacheError> {
            $inner.set_state(state)
        }
    };
    (@ resume $self:ident $inner:expr) => {
        fn resume(
            &mut $self,
            at: &$crate::cache::ReplayAt<'_>,
            progress: &mut (dyn FnMut($crate::cache::ResumeProgress) -> ::std::ops::ControlFlow<()> + Send),
        ) -> Result<::std::ops::ControlFlow<()>, $crate::cache::CacheError> {
            $crate::cache::CacheBackend::resume(&mut $inner, at, progress)
        }
    };
    (@ join $self:ident $inner:expr) => {
        fn join(&mut $self, other: &$crate::cache::State) -> Result<(), $crate::cache::CacheError> {
            $inner.join(other)
        }
    };
    (@ clear $self:ident $inner:expr) => {
        fn clear(&mut $self) {
            $inner.clear();
        }
    };
    (@ fork $self:ident $inner:expr) => {
        fn fork(&$self) -> Box<dyn $crate::cache::CacheBackend> {
            $inner.fork()
        }
    };
}

macro_rules! forward {
    ($($type:ty),*) => {$(
        impl<C> CacheBackend for $type
        where
            C: CacheBackend + ?Sized,
        {
            forward_backend!(
                self => (**self);
                begin keys_values wants observe commit queries lifecycle clear fork
            );
        }
    )*};
}

forward!(&mut C, Box<C>);

/// Implements the trait for a tuple struct whose first field does the work.
macro_rules! forward_to_field {
    ($type:ty) => {
        impl $crate::cache::CacheBackend for $type {
            $crate::forward_backend!(
                self => self.0;
                begin keys_values wants observe commit queries lifecycle clear
            );

            fn fork(&self) -> Box<dyn $crate::cache::CacheBackend> {
                Box::new(self.clone())
            }
        }
    };
}

pub(crate) use forward_to_field;
