//! Decoding over token ids.

mod batch;
mod filters;
mod generation;
mod sampling;
