//! Running all tests, and counting them.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result};

use crate::setup::{self, Purpose};
use crate::tools::{is_root, root, tied};

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
    // Most tests wait more than they compute. What those on a node need is built meanwhile.
    let images = (is_root() && filters.is_empty()).then(build_images).transpose()?;
    let mut count = Count::default();
    let mut args = vec!["test", "--all-features", "--no-fail-fast", "--"];
    args.extend(filters.iter().map(String::as_str));
    let all_well = cargo(&args, &mut count)?;
    if let Some(mut images) = images {
        // The tests have waited for it, or have failed.
        images.kill().and_then(|()| images.wait()).context("ending the build of the images")?;
    }
    println!("{} passed, {} failed, {} skipped", count.passed, count.failed, count.skipped);
    Ok(all_well)
}

/// Starts the build of the images. The tests that need them do the same, wait for this one, and say what is wrong if it fails.
fn build_images() -> Result<Child> {
    let helper = std::env::current_exe().context("where is this program")?;
    let mut command = tied("nice");
    command.args(["-n", "19"]).arg(helper).arg("images").stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().context("starting the build of the images")
}

fn cargo(args: &[&str], count: &mut Count) -> Result<bool> {
    println!("$ cargo {}", args.join(" "));
    let mut child = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(args)
        .current_dir(root())
        .stdout(Stdio::piped())
        .spawn()
        .context("starting cargo")?;
    let output = child.stdout.take().context("no pipe from cargo")?;
    for line in BufReader::new(output).split(b'\n') {
        let line = line.context("reading what the tests say")?;
        count.add(&String::from_utf8_lossy(&line));
        let mut out = std::io::stdout().lock();
        out.write_all(&line).and_then(|()| out.write_all(b"\n")).context("passing on what the tests say")?;
    }
    Ok(child.wait().context("waiting for cargo")?.success())
}

#[cfg(test)]
mod tests {
    use super::Count;

    #[test]
    fn counts_over_test_programs() {
        let mut count = Count::default();
        count.add("test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 3 filtered out; finished in 0.01s");
        count.add("test result: FAILED. 2 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 64.20s");
        count.add("test a::b ... ok");
        assert_eq!(count, Count { passed: 14, failed: 2, skipped: 1 });
    }
}
