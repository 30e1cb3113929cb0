//! Text in and out.

mod chat;
mod encoding;
mod generation;
mod real_tokenizers;
mod stops;
mod streaming;
