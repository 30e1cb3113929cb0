//! What is evicted.

mod at_prompt_end;
mod beyond_context;
mod golden;
mod limits;
mod random_rules;
mod rules;
mod unusual;
