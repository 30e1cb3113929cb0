//! How a draft ends.

/// How a draft ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums, reason = "there is no third way")]
pub enum Draft {
    /// Its tokens stay.
    Accept,
    /// Its tokens are removed.
    Discard,
}
