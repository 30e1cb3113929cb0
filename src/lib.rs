//! x
pub mod cache;
pub mod exact;
#[cfg(feature = "generate")]
pub mod generate;
pub mod memory;
#[cfg(feature = "model")]
pub mod model;
pub mod positions;
#[cfg(feature = "pretrained")]
pub mod pretrained;
