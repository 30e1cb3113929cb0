//! Tests that need a process of their own.

use std::{env, process::Command};

/// A process in which one ignored test runs, and nothing else. `module` is the `module_path!()` of the test.
pub fn alone(module: &str, test: &str) -> Command {
    let (_, module) = module.split_once("::").expect("a module of this crate");
    let mut command = Command::new(env::current_exe().expect("this program"));
    command.args([
        "--exact",
        &format!("{module}::{test}"),
        "--ignored",
        "--nocapture",
        "--test-threads=1",
    ]);
    command
}

/// Runs an ignored test in a process of its own, and fails as it does.
#[track_caller]
pub fn passes_alone(module: &str, test: &str) {
    let output = alone(module, test).output();
    let output = output.expect("this program can be started");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}\n{errors}");
    assert!(
        text.contains("1 passed"),
        "there is no test {module}::{test}"
    );
    println!("{text}");
}
