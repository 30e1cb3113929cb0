//! Text in and out.

mod chat;
mod chats;
mod encoding;
mod fuzz;
mod generation;
mod real_tokenizers;
mod stops;
mod streaming;
mod template_limits;
mod templates;
