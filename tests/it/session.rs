//! Session files.

mod fields;
mod files;
mod form;
mod fuzz;
mod golden;
mod kill;
mod parts;
