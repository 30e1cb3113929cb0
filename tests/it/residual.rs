//! `ResidualCheckpoint`.

mod bits;
mod byte_budget;
mod byte_budget_edges;
mod cache_dtypes;
mod certified;
mod foreign_decoders;
mod half_width;
mod huge_windows;
mod live_bytes;
mod parking;
mod plans;
mod replays;
mod setup;
mod temporaries;
mod wrong_decoders;
