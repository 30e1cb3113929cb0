//! Runs a property on random cases.

use std::env;

use proptest::{
    strategy::Strategy,
    test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner},
};

fn config(cases: u32) -> Config {
    Config {
        cases,
        failure_persistence: None,
        max_shrink_iters: 2_000,
        max_shrink_time: 60_000,
        ..Config::default()
    }
}

/// Runs on other cases each time, and on `KV_DIRECT_CASES` times as many where that is set.
pub fn runner(cases: u32) -> TestRunner {
    let times = asked_for("KV_DIRECT_CASES").unwrap_or(1);
    TestRunner::new(config(cases * times))
}

/// Runs on the same cases each time.
pub fn repeating(cases: u32) -> TestRunner {
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    TestRunner::new_with_rng(config(cases), rng)
}

/// Runs `test` on cases of the strategy; the first that fails is the panic message.
#[track_caller]
pub fn check<S: Strategy>(
    mut runner: TestRunner,
    strategy: &S,
    test: impl Fn(S::Value) -> Result<(), TestCaseError>,
) {
    if let Err(error) = runner.run(strategy, test) {
        panic!("{error}");
    }
}

/// The number that an environment variable asks for.
pub fn asked_for(variable: &str) -> Option<u32> {
    let cases = env::var(variable).ok()?;
    Some(cases.parse().expect("a number"))
}
