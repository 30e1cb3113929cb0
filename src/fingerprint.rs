//! A hash that identifies a model.

use std::fmt;

use xxhash_rust::xxh3::Xxh3Default;

/// A hash (XXH3, 128 bits) of the weights and the configuration of a model.
///
/// It distinguishes models that differ by accident. It does not protect against forgery. Session files contain it, so
/// the same parts have the same fingerprint in every version of this crate.
///
/// ```
/// use kv_direct::Fingerprint;
///
/// let one = Fingerprint::of(["config".as_bytes(), &[1, 2, 3]]);
/// assert_ne!(one, Fingerprint::of(["config".as_bytes(), &[1, 2], &[3]]));
/// assert_eq!(one.to_string().len(), 32);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint(u128);

impl Fingerprint {
    /// The fingerprint of these parts, in this order: the hash of each with its length before it, in 8 bytes, the lowest
    /// first.
    pub fn of(parts: impl IntoIterator<Item = impl AsRef<[u8]>>) -> Self {
        let mut hash = Xxh3Default::new();
        for part in parts {
            let part = part.as_ref();
            hash.update(&(part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        Self(hash.digest128())
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}
