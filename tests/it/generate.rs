//! Decoding over token ids.

mod filters;
mod generation;
mod sampling;
