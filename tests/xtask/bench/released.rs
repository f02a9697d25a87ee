//! The programs that are measured: with optimizations, as they are published.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::images::NO_REGISTRY;
use crate::programs::{self, MANAGER, Profile};
use crate::tools::{self, root, run, run_loud};

/// Which manager is measured.
#[derive(Clone, Debug, clap::Args)]
pub struct Released {
    /// The manager to measure, instead of building it
    #[arg(long, value_name = "FILE")]
    manager: Option<PathBuf>,
    /// This program is a release build, and so is the manager
    #[arg(long, hide = true)]
    built: bool,
}

impl Released {
    /// The manager to measure. `None`: a release build of this program has done the task `name` with the same arguments.
    pub fn manager(&self, name: &str) -> Result<Option<&Path>> {
        if !self.built {
            self.run_again(name)?;
            return Ok(None);
        }
        self.manager.as_deref().context("--built needs --manager").map(Some)
    }

    /// Builds the manager as it is published, and this program with optimizations, and goes on there: a slow client would flatter the manager.
    fn run_again(&self, name: &str) -> Result<()> {
        let mut command = Command::new(tools::cargo());
        command.current_dir(root());
        command.args(["run", "--release", "--quiet", "--features", "dev", "--bin", "xtask", "--", name, "--built"]);
        if self.manager.is_none() {
            let built = programs::build(Profile::Release, NO_REGISTRY, &[MANAGER])?;
            command.arg("--manager").args(built);
        }
        run_loud(command.args(std::env::args_os().skip(2)))
    }
}

/// The commit that is measured.
pub fn commit() -> Result<String> {
    let git = |args: &[&str]| run(Command::new("git").current_dir(root()).args(args));
    let changed = !git(&["status", "--porcelain", "--untracked-files=no"])?.trim().is_empty();
    Ok(git(&["rev-parse", "--short=12", "HEAD"])?.trim().to_owned() + if changed { "-changed" } else { "" })
}
