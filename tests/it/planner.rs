//! The cheapest plan within a byte budget.

mod cheapest;
mod document;
mod unknown_sizes;
