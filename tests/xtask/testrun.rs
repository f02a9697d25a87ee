//! Running all tests, and counting them.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::setup::{self, Purpose};
use crate::tools::{self, is_root, root};

/// The test program of what is tested on an API server without a node.
const API_SERVER: &str = "api_server";
/// The one of what is tested on a node with kubelet and guests.
const NODE: &str = "node";

/// How many tests there were, over all test programs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Count {
    passed: u64,
    failed: u64,
    skipped: u64,
}

impl Count {
    /// Adds what a line of a test program says, if it is one that counts.
    fn add(&mut self, line: &str) {
        let Some(result) = line.strip_prefix("test result: ") else { return };
        for part in result.split(['.', ';']) {
            let mut words = part.split_whitespace();
            let (Some(number), Some(what)) = (words.next().and_then(|word| word.parse::<u64>().ok()), words.next())
            else {
                continue;
            };
            match what {
                "passed" => self.passed += number,
                "failed" => self.failed += number,
                "ignored" => self.skipped += number,
                _ => {}
            }
        }
    }
}

/// Why tests have failed, as their programs say it after all tests:
///
/// ```text
/// ---- module::test stdout ----
///
/// thread 'module::test' (123) panicked at tests/module.rs:10:5:
/// waited 600 s in vain for it
/// note: run with `RUST_BACKTRACE=1` environment variable to display a backtrace
/// ```
#[derive(Debug, Default)]
struct Failures {
    /// A line for each test, with at most [`Failures::LINES`] of its message.
    told: Vec<String>,
    /// How many lines of the message are still to come.
    open: usize,
}

impl Failures {
    const LINES: usize = 3;

    fn add(&mut self, line: &str) {
        let name = line.strip_prefix("---- ").and_then(|rest| rest.strip_suffix(" stdout ----"));
        if let Some(name) = name {
            self.told.push(format!("failed: {name}"));
            self.open = 0;
        } else if line.starts_with("thread '") && line.contains(" panicked at ") {
            // A test may panic in a thread of its own before.
            self.open = Self::LINES;
        } else if line.is_empty() || line.starts_with("note: ") {
            self.open = 0;
        } else if self.open > 0
            && let Some(last) = self.told.last_mut()
        {
            self.open -= 1;
            last.push_str("\n  ");
            last.push_str(line);
        }
    }
}

/// Runs the tests whose names contain one of `filters`, or all. The last line says how many there were.
///
/// Returns whether all passed; there is nothing to say about it after that line.
pub fn run(filters: &[String]) -> Result<bool> {
    if is_root() {
        setup::ensure(&[Purpose::All])?;
    } else {
        eprintln!("The tests that need a node fail: that takes root.");
        setup::ensure(&[Purpose::ControlPlane, Purpose::Guest, Purpose::Tests])?;
    }
    let cores = std::thread::available_parallelism().map_or(1, Into::into);
    let others = other_suites()?;
    let others = others.iter().flat_map(|suite| ["--test", suite.as_str()]);
    let others: Vec<_> = ["--lib", "--bins"].into_iter().chain(others).collect();
    // Tests on an API server or a node often wait: for watches, Pods, the boot of one guest. Those with nothing but guests do not. The Pods of more tests would
    // not fit on the node. Beside each other the node's and the API server's tests would be done sooner by a tenth, but on two cores requests then take so
    // long that managers lose their leases.
    let runs = [(&others[..], cores), (&["--test", NODE], cores + 1), (&["--test", API_SERVER], cores + 2)];
    let mut outcome = Outcome::default();
    for (suites, threads) in runs {
        let begin = Instant::now();
        if let Err(error) = cargo(suites, threads, filters, &mut outcome) {
            outcome.failures.told.push(format!("failed: {}: {error:#}", suites.join(" ")));
            outcome.has_failed = true;
        }
        println!("took {} s", begin.elapsed().as_secs());
    }
    // Whoever sees only the end of a long output sees these.
    let Outcome { count, failures, has_failed } = outcome;
    failures.told.iter().for_each(|failure| println!("{failure}"));
    println!("{} passed, {} failed, {} skipped", count.passed, count.failed, count.skipped);
    Ok(!has_failed)
}

/// How some test programs have ended.
#[derive(Debug, Default)]
struct Outcome {
    count: Count,
    failures: Failures,
    /// Also a program that was killed has failed, and one that can't be built.
    has_failed: bool,
}

/// The test programs of Cargo.toml but for [`API_SERVER`] and [`NODE`].
fn other_suites() -> Result<Vec<String>> {
    let mut command = Command::new(tools::cargo());
    command.args(["metadata", "--no-deps", "--format-version", "1"]).current_dir(root());
    let said = command.output().context("starting cargo")?;
    let metadata: Value = serde_json::from_slice(&said.stdout).context("reading what cargo metadata says")?;
    let targets =
        metadata["packages"].as_array().into_iter().flatten().flat_map(|package| package["targets"].as_array());
    let tests = targets.flatten().filter(|target| target["kind"] == json!(["test"]));
    let mut suites: Vec<String> = tests.filter_map(|target| target["name"].as_str().map(str::to_owned)).collect();
    ensure!(suites.iter().any(|suite| suite == API_SERVER), "cargo metadata names no test program {API_SERVER}");
    suites.retain(|suite| suite != API_SERVER && suite != NODE);
    suites.sort();
    Ok(suites)
}

/// Runs test programs with so many tests at once, and notes how they end.
fn cargo(suites: &[&str], threads: usize, filters: &[String], outcome: &mut Outcome) -> Result<()> {
    let threads = format!("--test-threads={threads}");
    let mut command = Command::new(tools::cargo());
    command.args(["static-test", "--no-fail-fast"]).args(suites).args(["--", &threads]).args(filters);
    // They would take the place of the alias's flags.
    command.env_remove("RUSTFLAGS");
    println!("$ cargo static-test {} -- {threads}", suites.join(" "));
    let mut child = command.current_dir(root()).stdout(Stdio::piped()).spawn().context("starting cargo")?;
    let output = child.stdout.take().context("no pipe from cargo")?;
    for line in BufReader::new(output).split(b'\n') {
        let line = line.context("reading what the tests say")?;
        let text = String::from_utf8_lossy(&line);
        outcome.count.add(&text);
        outcome.failures.add(&text);
        let mut out = std::io::stdout().lock();
        out.write_all(&line).and_then(|()| out.write_all(b"\n")).context("passing on what the tests say")?;
    }
    outcome.has_failed |= !child.wait().context("waiting for cargo")?.success();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{Count, Failures};

    #[test]
    fn counts_over_test_programs() {
        let mut count = Count::default();
        count.add("test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 3 filtered out; finished in 0.01s");
        count.add("test result: FAILED. 2 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 64.20s");
        count.add("test a::b ... ok");
        assert_eq!(count, Count { passed: 14, failed: 2, skipped: 1 });
    }

    #[test]
    fn a_failed_test_is_named_with_its_message() {
        let mut failures = Failures::default();
        let said = "test a::b ... FAILED\n\nfailures:\n\n---- a::b stdout ----\nguest: up\n\nthread 'a::b' (7) panicked at tests/a.rs:1:2:\n\
            assertion `left == right` failed: the guest\n  left: 1\n right: 2\nmore\nnote: run with `RUST_BACKTRACE=1`\n$ kubectl get\n\n\
            ---- c stdout ----\n\nthread 'c' (8) panicked at tests/c.rs:1:2:\nwaited\n\n\nfailures:\n    a::b\n    c\n";
        said.lines().for_each(|line| failures.add(line));
        assert_eq!(
            failures.told,
            [
                "failed: a::b\n  assertion `left == right` failed: the guest\n    left: 1\n   right: 2",
                "failed: c\n  waited"
            ]
        );
    }
}
