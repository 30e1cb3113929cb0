//! Session files.

mod fields;
mod files;
mod fuzz;
mod kill;
mod parts;
