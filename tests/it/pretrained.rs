//! Model folders.

mod bad_files;
mod by_hand;
mod flips;
mod fuzz;
mod loader;
mod real_configs;
mod real_models;
mod refused_fields;
mod rope_fields;
mod warnings;
mod window_fields;
