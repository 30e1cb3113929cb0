//! Forwarding implementations: whatever takes a backend takes a reference to one and a boxed one, and a
//! tuple struct around a backend is one.

use crate::cache::CacheBackend;

/// The methods of [`CacheBackend`] that a wrapper leaves to the backend inside it, by name.
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
///     forward_backend!(self => self.inner; keys_values wants observe commit questions life clear fork);
/// }
/// ```
///
/// `questions` stands for `position`, `kept`, `memory` and `rows`; `life` for `truncate_rows`, `truncate`,
/// `checkpoint`, `restore`, `accept`, `select_rows`, `park`, `state` and `set_state`; each can be named alone. A
/// fork that is forwarded is one of the inner backend, without its wrapper.
#[macro_export]
macro_rules! forward_backend {
    ($self:ident => $inner:expr; $($method:ident)+) => {$(
        $crate::forward_backend!(@ $method $self $inner);
    )+};
    (@ begin $self:ident $inner:expr) => {
        fn begin(&mut $self, step: &$crate::cache::Step) -> Result<(), $crate::cache::CacheError> {
            $inner.begin(step)
        }
    };
    (@ keys_values $self:ident $inner:expr) => {
        fn keys_values(
            &mut $self,
            layer: $crate::cache::LayerIndex,
            span: $crate::cache::Span<'_>,
        ) -> Result<$crate::cache::KeysValues, $crate::cache::CacheError> {
            $inner.keys_values(layer, span)
        }
    };
    (@ wants $self:ident $inner:expr) => {
        fn wants(
            &$self,
            layer: $crate::cache::LayerIndex,
            step: &$crate::cache::Step,
        ) -> $crate::cache::Observation {
            $inner.wants(layer, step)
        }
    };
    (@ observe $self:ident $inner:expr) => {
        fn observe(
            &mut $self,
            layer: $crate::cache::LayerIndex,
            seen: $crate::cache::Observed,
        ) -> Result<(), $crate::cache::CacheError> {
            $inner.observe(layer, seen)
        }
    };
    (@ commit $self:ident $inner:expr) => {
        fn commit(&mut $self) -> Result<(), $crate::cache::CacheError> {
            $inner.commit()
        }
    };
    (@ questions $self:ident $inner:expr) => {
        $crate::forward_backend!($self => $inner; position kept memory rows);
    };
    (@ life $self:ident $inner:expr) => {
        $crate::forward_backend!(
            $self => $inner;
            truncate_rows truncate checkpoint restore accept select_rows park state set_state
        );
    };
    (@ position $self:ident $inner:expr) => {
        fn position(&$self, row: usize) -> usize {
            $inner.position(row)
        }
    };
    (@ kept $self:ident $inner:expr) => {
        fn kept(&$self, layer: $crate::cache::LayerIndex) -> $crate::cache::Kept {
            $inner.kept(layer)
        }
    };
    (@ memory $self:ident $inner:expr) => {
        fn memory(&$self) -> $crate::memory::MemoryReport {
            $inner.memory()
        }
    };
    (@ rows $self:ident $inner:expr) => {
        fn rows(&$self) -> usize {
            $inner.rows()
        }
    };
    (@ truncate_rows $self:ident $inner:expr) => {
        fn truncate_rows(&mut $self, to: &[usize]) -> Result<(), $crate::cache::CacheError> {
            $inner.truncate_rows(to)
        }
    };
    (@ truncate $self:ident $inner:expr) => {
        fn truncate(&mut $self, to: usize) -> Result<(), $crate::cache::CacheError> {
            $inner.truncate(to)
        }
    };
    (@ checkpoint $self:ident $inner:expr) => {
        fn checkpoint(&mut $self) -> Result<(), $crate::cache::CacheError> {
            $inner.checkpoint()
        }
    };
    (@ restore $self:ident $inner:expr) => {
        fn restore(&mut $self) -> Result<(), $crate::cache::CacheError> {
            $inner.restore()
        }
    };
    (@ accept $self:ident $inner:expr) => {
        fn accept(&mut $self) -> Result<(), $crate::cache::CacheError> {
            $inner.accept()
        }
    };
    (@ select_rows $self:ident $inner:expr) => {
        fn select_rows(&mut $self, rows: &[usize]) -> Result<(), $crate::cache::CacheError> {
            $inner.select_rows(rows)
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
                begin keys_values wants observe commit questions life clear fork
            );
        }
    )*};
}

forward!(&mut C, Box<C>);

/// Implements the trait for a tuple struct whose first field does the work.
macro_rules! backend {
    ($type:ty) => {
        impl $crate::cache::CacheBackend for $type {
            $crate::forward_backend!(
                self => self.0;
                begin keys_values wants observe commit questions life clear
            );

            fn fork(&self) -> Box<dyn $crate::cache::CacheBackend> {
                Box::new(Self(self.0.clone()))
            }
        }
    };
}

pub(crate) use backend;
