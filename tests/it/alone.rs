//! Tests that need a process of their own.

use std::{env, process::Command};

/// A process in which one ignored test runs, and nothing else.
pub fn alone(test: &str) -> Command {
    let mut command = Command::new(env::current_exe().expect("this program"));
    command.args([
        "--exact",
        test,
        "--ignored",
        "--nocapture",
        "--test-threads=1",
    ]);
    command
}

/// Runs an ignored test in a process of its own, and fails as it does.
#[track_caller]
pub fn passes_alone(test: &str) {
    let output = alone(test).output().expect("this program can be started");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}\n{errors}");
    assert!(text.contains("1 passed"), "there is no test {test}");
    println!("{text}");
}
