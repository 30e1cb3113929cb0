//! The contract of every cache.

mod batches;
mod drafts;
mod forged_states;
mod independence;
mod joins;
mod live_bytes;
mod long_runs;
mod memory;
mod poisoned;
mod random_runs;
mod reports;
mod sizes;
mod states;
mod steps;
mod truncation;
