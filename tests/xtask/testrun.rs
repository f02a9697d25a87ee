//! Running all tests, and counting them.

use std::io::{BufRead, BufReader, Write};
use std::ops::Add;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, anyhow};

use crate::setup::{self, Purpose};
use crate::tools::{is_root, root};

/// The test program of what is tested on an API server without a node.
const API_SERVER: &str = "api_server";
/// The one of what is tested on a node.
const NODE: &str = "node";

/// How many tests there were, over all test programs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Count {
    passed: u64,
    failed: u64,
    skipped: u64,
}

impl Add for Count {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            passed: self.passed + other.passed,
            failed: self.failed + other.failed,
            skipped: self.skipped + other.skipped,
        }
    }
}

impl Count {
    /// Adds what a line of a test program says, if it is one that counts.
    fn read(&mut self, line: &str) {
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

/// Runs the tests whose names contain one of `filters`, or all. The last line says how many there were.
///
/// ```text
///  on a node: one guest at a time, so mostly waiting ──────────────────────┐
///  on an API server, mostly waiting ─▶ the others, some with guests ───────┴─▶ how many there were
/// ```
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
    let (mut count, mut all_well) = (Count::default(), true);
    std::thread::scope(|scope| {
        let node = scope.spawn(|| {
            let mut said = Vec::new();
            cargo(&["--test", NODE], cores, filters, &mut said).map(|suites| (suites, said))
        });
        for (suites, threads) in [(&["--test", API_SERVER][..], 2 * cores), (&others, cores)] {
            let found = cargo(suites, threads, filters, &mut std::io::stdout())?;
            (count, all_well) = (count + found.count, all_well && found.is_well);
        }
        let (found, said) = node.join().map_err(|_| anyhow!("the thread with the tests on a node panicked"))??;
        (count, all_well) = (count + found.count, all_well && found.is_well);
        std::io::stdout().write_all(&said).context("passing on what the tests say")
    })?;
    println!("{} passed, {} failed, {} skipped", count.passed, count.failed, count.skipped);
    Ok(all_well)
}

/// The test programs of `tests` that have no line of their own in [`run`].
fn other_suites() -> Result<Vec<String>> {
    let mut suites = Vec::new();
    for entry in std::fs::read_dir(root().join("tests")).context("reading the folder tests")? {
        let path = entry.context("reading the folder tests")?.path();
        let is_suite = path.extension().is_some_and(|end| end == "rs");
        suites.extend(path.file_stem().filter(|_| is_suite).map(|stem| stem.to_string_lossy().into_owned()));
    }
    suites.retain(|suite| ![API_SERVER, NODE].contains(&suite.as_str()));
    suites.sort();
    Ok(suites)
}

/// How some test programs went.
struct Suites {
    is_well: bool,
    count: Count,
}

/// Runs test programs with so many tests at once. What they say goes to `out`.
fn cargo(suites: &[&str], threads: usize, filters: &[String], out: &mut dyn Write) -> Result<Suites> {
    let threads = format!("--test-threads={threads}");
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(["test", "--all-features", "--no-fail-fast"]).args(suites).args(["--", &threads]).args(filters);
    writeln!(out, "$ cargo test {} -- {threads}", suites.join(" ")).context("passing on what the tests say")?;
    let mut child = command.current_dir(root()).stdout(Stdio::piped()).spawn().context("starting cargo")?;
    let output = child.stdout.take().context("no pipe from cargo")?;
    let mut count = Count::default();
    for line in BufReader::new(output).split(b'\n') {
        let line = line.context("reading what the tests say")?;
        count.read(&String::from_utf8_lossy(&line));
        out.write_all(&line).and_then(|()| out.write_all(b"\n")).context("passing on what the tests say")?;
    }
    Ok(Suites { is_well: child.wait().context("waiting for cargo")?.success(), count })
}

#[cfg(test)]
mod tests {
    use super::Count;

    #[test]
    fn counts_over_test_programs() {
        let mut count = Count::default();
        count.read("test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 3 filtered out; finished in 0.01s");
        count
            .read("test result: FAILED. 2 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 64.20s");
        count.read("test a::b ... ok");
        assert_eq!(count, Count { passed: 14, failed: 2, skipped: 1 });
    }
}
