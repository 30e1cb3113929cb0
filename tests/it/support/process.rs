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

/// Runs the tests of a module again in a process with these variables, except those whose name contains `skipped`, and
/// fails as they do.
#[track_caller]
pub fn again(module: &str, skipped: &str, variables: &[(&str, &str)]) {
    let (_, module) = module.split_once("::").expect("a module of this crate");
    let mut command = Command::new(env::current_exe().expect("this program"));
    command.args([module, "--skip", skipped]);
    let output = command.envs(variables.iter().copied()).output();
    let output = output.expect("this program can be started");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{variables:?}: {text}");
    assert!(!text.contains(" 0 passed"), "{variables:?}: no test ran");
}
