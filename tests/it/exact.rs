//! The operations whose bits must repeat.

mod attention;
mod conformance;
mod dtypes;
mod threads;
