//! All integration tests in one binary: linking burn once is enough. Grouped as the source is.
#![allow(missing_docs, unreachable_pub, reason = "test names say what holds")]

mod contract;

mod cache;
mod exact;
mod generate;
mod model;
mod planner;
mod policy;
mod pretrained;
mod residual;
mod session;
mod storage;
mod support;
mod text;
