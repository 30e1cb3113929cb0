//! Which vector instructions the kernels use.

use std::{fmt, marker::PhantomData, sync::OnceLock};

use super::rounding::{Fused, MulAdd, Rounding, Separate};

/// The vector instructions that the kernels use. They change the speed and no bit.
///
/// ```
/// use kv_direct::exact::SimdLevel;
///
/// println!("kernels run with {}", SimdLevel::current());
/// assert!(SimdLevel::current() <= SimdLevel::Avx512);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum SimdLevel {
    /// What every CPU of the target has.
    Scalar,
    /// AVX2 and FMA.
    Avx2,
    /// AVX-512.
    Avx512,
}

impl SimdLevel {
    /// The level of this process: the widest that the CPU has. The environment variable `KV_DIRECT_SIMD` (`scalar`,
    /// `avx2` or `avx512`), read once, lowers it.
    #[must_use]
    pub fn current() -> Self {
        static CURRENT: OnceLock<SimdLevel> = OnceLock::new();
        *CURRENT.get_or_init(|| {
            let wanted = match std::env::var("KV_DIRECT_SIMD").as_deref() {
                Ok("scalar") => Self::Scalar,
                Ok("avx2") => Self::Avx2,
                _ => Self::Avx512,
            };
            wanted.min(Self::detected())
        })
    }

    /// The widest level that the CPU has.
    fn detected() -> Self {
        #[cfg(any(target_arch = "x86", target_arch = "x86_64"))]
        {
            if pulp::x86::V4::try_new().is_some() {
                return Self::Avx512;
            }
            if pulp::x86::V3::try_new().is_some() {
                return Self::Avx2;
            }
        }
        Self::Scalar
    }

    /// Runs a kernel, compiled for this level and the rounding of the process. A level that the CPU lacks runs as
    /// [`Scalar`](Self::Scalar).
    #[inline(always)]
    pub(super) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match Rounding::current() {
            Rounding::Fused => self.run_rounded::<K, Fused>(kernel),
            Rounding::Separate => self.run_rounded::<K, Separate>(kernel),
        }
    }

    #[inline(always)]
    fn run_rounded<K: Kernel, M: MulAdd>(self, kernel: K) -> K::Output {
        #[cfg(any(target_arch = "x86", target_arch = "x86_64"))]
        match self {
            Self::Avx512 => {
                if let Some(v4) = pulp::x86::V4::try_new() {
                    return pulp::Simd::vectorize(v4, Vectorized::<K, M>(kernel, PhantomData));
                }
            }
            Self::Avx2 => {
                if let Some(v3) = pulp::x86::V3::try_new() {
                    return pulp::Simd::vectorize(v3, Vectorized::<K, M>(kernel, PhantomData));
                }
            }
            Self::Scalar => {}
        }
        kernel.call::<M>()
    }
}

impl fmt::Display for SimdLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        })
    }
}

/// Asks for data that will be read soon, where the CPU can be asked. Nothing depends on it but speed.
#[inline(always)]
pub(super) fn prefetch<T>(data: &T) {
    #[cfg(target_arch = "x86_64")]
    if let Some(sse) = pulp::core_arch::x86::Sse::try_new() {
        let start = std::ptr::from_ref(data).cast::<i8>();
        for line in (0..size_of::<T>()).step_by(CACHE_LINE) {
            sse._mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(start.wrapping_add(line));
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = data;
}

#[cfg(target_arch = "x86_64")]
const CACHE_LINE: usize = 64;

/// A kernel: it names no vector type, the compiler vectorises it.
pub(super) trait Kernel {
    type Output;

    /// Has to be inlined always.
    fn call<M: MulAdd>(self) -> Self::Output;
}

/// A kernel with its rounding.
struct Vectorized<K, M>(K, PhantomData<M>);

impl<K: Kernel, M: MulAdd> pulp::WithSimd for Vectorized<K, M> {
    type Output = K::Output;

    #[inline(always)]
    fn with_simd<S: pulp::Simd>(self, _: S) -> K::Output {
        self.0.call::<M>()
    }
}
