//! All integration tests in one binary: linking burn once is enough.
#![allow(
    missing_docs,
    unreachable_pub,
    reason = "tests say what they check by their names"
)]

#[path = "it/allocator.rs"]
mod allocator;
#[path = "it/alone.rs"]
mod alone;
#[path = "it/attention.rs"]
mod attention;
#[path = "it/bad_input.rs"]
mod bad_input;
#[path = "it/budget.rs"]
mod budget;
#[path = "it/budget_bytes.rs"]
mod budget_bytes;
#[path = "it/budget_edges.rs"]
mod budget_edges;
#[path = "it/by_folder.rs"]
mod by_folder;
#[path = "it/certify.rs"]
mod certify;
#[path = "it/chat.rs"]
mod chat;
#[path = "it/config_json.rs"]
mod config_json;
#[path = "it/conformance_doc.rs"]
mod conformance_doc;
#[path = "it/contract.rs"]
mod contract;
#[path = "it/drafts.rs"]
mod drafts;
#[path = "it/driver.rs"]
mod driver;
#[path = "it/dtypes.rs"]
mod dtypes;
#[path = "it/engine.rs"]
mod engine;
#[path = "it/exactness.rs"]
mod exactness;
#[path = "it/families.rs"]
mod families;
#[path = "it/fields.rs"]
mod fields;
#[path = "it/flips.rs"]
mod flips;
#[path = "it/folder.rs"]
mod folder;
#[path = "it/fuzz.rs"]
mod fuzz;
#[path = "it/golden.rs"]
mod golden;
#[path = "it/kill.rs"]
mod kill;
#[path = "../examples/common/kl.rs"]
mod kl;
#[path = "it/life.rs"]
mod life;
#[path = "it/life_kinds.rs"]
mod life_kinds;
#[path = "it/life_model.rs"]
mod life_model;
#[path = "it/life_rows.rs"]
mod life_rows;
#[path = "it/life_states.rs"]
mod life_states;
#[path = "it/life_traps.rs"]
mod life_traps;
#[path = "it/live_bytes.rs"]
mod live_bytes;
#[path = "it/loader.rs"]
mod loader;
#[path = "it/long_run.rs"]
mod long_run;
#[path = "it/memory.rs"]
mod memory;
#[path = "it/memory_doc.rs"]
mod memory_doc;
#[path = "it/oracle.rs"]
mod oracle;
#[path = "it/oracle_random.rs"]
mod oracle_random;
#[path = "it/patching.rs"]
mod patching;
#[path = "it/planner.rs"]
mod planner;
#[path = "it/plans.rs"]
mod plans;
#[path = "it/policies.rs"]
mod policies;
#[path = "it/random.rs"]
mod random;
#[path = "it/real.rs"]
mod real;
#[path = "it/real_configs.rs"]
mod real_configs;
#[path = "../examples/common/recorder.rs"]
mod recorder;
#[path = "it/reference.rs"]
mod reference;
#[path = "it/refused_fields.rs"]
mod refused_fields;
#[path = "it/replays.rs"]
mod replays;
#[path = "it/rope_fields.rs"]
mod rope_fields;
#[path = "it/sampling.rs"]
mod sampling;
#[path = "it/session.rs"]
mod session;
#[path = "it/session_file.rs"]
mod session_file;
#[path = "it/session_fuzz.rs"]
mod session_fuzz;
#[path = "it/simulator.rs"]
mod simulator;
#[path = "it/sliding.rs"]
mod sliding;
#[path = "it/support.rs"]
mod support;
#[path = "it/text.rs"]
mod text;
#[path = "it/threads.rs"]
mod threads;
#[path = "it/twin.rs"]
mod twin;
#[path = "it/warnings.rs"]
mod warnings;
#[path = "it/wide_keys.rs"]
mod wide_keys;
#[path = "it/window_fields.rs"]
mod window_fields;
#[path = "it/zoo.rs"]
mod zoo;
