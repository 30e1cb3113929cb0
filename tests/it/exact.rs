//! The operations whose bits must repeat.

mod attention;
mod conformance;
mod digests;
mod dtypes;
mod formulas;
mod threads;
