//! How a product and the sum that it is added to are rounded.

use std::{fmt, sync::OnceLock};

/// How the kernels round a product that is added to a sum. It decides bits: caches of one rounding do not go on under
/// the other.
///
/// ```
/// use kv_direct::exact::Rounding;
///
/// println!("multiply and add: {}", Rounding::current());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Rounding {
    /// Once, as a fused multiply-add: the default.
    Fused,
    /// Twice, the product and the sum, as on devices that do not fuse. For comparisons with such devices.
    Separate,
}

impl Rounding {
    /// The rounding of this process: fused, unless the environment variable `KV_DIRECT_ROUNDING`, read once, is
    /// `separate`.
    #[must_use]
    pub fn current() -> Self {
        static CURRENT: OnceLock<Rounding> = OnceLock::new();
        *CURRENT.get_or_init(|| match std::env::var("KV_DIRECT_ROUNDING").as_deref() {
            Ok("separate") => Self::Separate,
            _ => Self::Fused,
        })
    }
}

impl fmt::Display for Rounding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fused => "fused",
            Self::Separate => "separate",
        })
    }
}

/// A [`Rounding`] that is known when a kernel is compiled.
pub(crate) trait MulAdd: 'static {
    /// `x · y + sum`.
    fn mul_add(x: f32, y: f32, sum: f32) -> f32;
}

/// [`Rounding::Fused`].
pub(crate) struct Fused;

/// [`Rounding::Separate`].
pub(crate) struct Separate;

impl MulAdd for Fused {
    #[inline(always)]
    fn mul_add(x: f32, y: f32, sum: f32) -> f32 {
        x.mul_add(y, sum)
    }
}

impl MulAdd for Separate {
    #[inline(always)]
    fn mul_add(x: f32, y: f32, sum: f32) -> f32 {
        x * y + sum
    }
}
