//! Decoding over token ids.

mod generation;
mod sampling;
