//! Session files.

mod files;
mod fuzz;
mod kill;
