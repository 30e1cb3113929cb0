//! Memory for weights.

use std::ops::{Deref, DerefMut};

use bytemuck::{Pod, allocation::zeroed_vec};
#[cfg(target_os = "linux")]
use memmap2::{Advice, MmapMut};

/// Elements that stay where they are. Large ones take huge pages where the system has them: a step reads every weight
/// once, and looks up the address of every page.
pub(super) enum Pages<T> {
    /// On the heap.
    Heap(Vec<T>),
    /// In a mapping of its own.
    #[cfg(target_os = "linux")]
    Mapped(MmapMut, std::marker::PhantomData<T>),
}

/// Bytes from which a mapping can have a huge page.
#[cfg(target_os = "linux")]
const HUGE: usize = 2 << 20;

impl<T: Pod> Pages<T> {
    /// So many elements, all zero.
    pub(super) fn zeros(count: usize) -> Self {
        #[cfg(target_os = "linux")]
        if size_of::<T>() * count >= HUGE
            && let Ok(map) = MmapMut::map_anon(size_of::<T>() * count)
        {
            // A system that refuses the advice gives small pages.
            let _ = map.advise(Advice::HugePage);
            return Self::Mapped(map, std::marker::PhantomData);
        }
        Self::Heap(zeroed_vec(count))
    }
}

impl<T: Pod> Deref for Pages<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self {
            Self::Heap(elements) => elements,
            #[cfg(target_os = "linux")]
            Self::Mapped(map, _) => bytemuck::cast_slice(map),
        }
    }
}

impl<T: Pod> DerefMut for Pages<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match self {
            Self::Heap(elements) => elements,
            #[cfg(target_os = "linux")]
            Self::Mapped(map, _) => bytemuck::cast_slice_mut(map),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_is_zero_and_keeps_what_is_written() {
        for count in [0, 1, 16_383, 16_384, 40_000] {
            let mut pages = Pages::<[f32; 32]>::zeros(count);
            assert_eq!(pages.len(), count);
            assert!(pages.iter().all(|element| *element == [0.0; 32]));
            if let Some(last) = pages.last_mut() {
                *last = [1.5; 32];
                assert_eq!(pages[count - 1], [1.5; 32]);
            }
        }
    }
}
