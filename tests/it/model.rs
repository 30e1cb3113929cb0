//! The generic decoder.

mod checks;
mod families;
mod fields;
mod fingerprint;
mod observation;
mod patching;
mod rope;
mod stored_weights;
