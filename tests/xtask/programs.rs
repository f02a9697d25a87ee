//! The programs as they go into images and archives: static, so that they need nothing of the system that they run on.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};

use crate::images::NO_REGISTRY;
use crate::tools::{root, run_loud, tied};

/// How programs are built.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Profile {
    /// Fast to build: for tests and the demo
    Dev,
    /// As they are published
    Release,
}

/// Where the programs of images come from.
pub enum Source {
    /// They are built.
    Build(Profile),
    /// They were built, with their libraries in them, into this folder.
    Folder(PathBuf),
}

impl Source {
    /// Where the programs are.
    pub fn programs(&self, registry: &str, programs: &[Program]) -> Result<Vec<PathBuf>> {
        match self {
            Self::Build(profile) => build(*profile, registry, programs),
            Self::Folder(folder) => programs
                .iter()
                .map(|program| fs::canonicalize(folder.join(program.name)))
                .collect::<std::io::Result<_>>()
                .with_context(|| format!("looking for the programs in {}", folder.display())),
        }
    }
}

/// One of the operator's programs.
#[derive(Clone, Copy)]
pub struct Program {
    pub name: &'static str,
    /// The Cargo feature that it needs.
    pub feature: &'static str,
}

pub const MANAGER: Program = Program { name: "vm-operator", feature: "manager" };
pub const NODE_DEVICES: Program = Program { name: "vm-node-devices", feature: "node-devices" };
pub const WEB: Program = Program { name: "vm-web", feature: "web" };
pub const RUNNER: Program = Program { name: "vm-runner", feature: "runner" };
pub const VMCTL: Program = Program { name: "vmctl", feature: "vmctl" };
pub const PLUGIN: Program = Program { name: "kubectl-vm", feature: "cli" };

/// The only target that there are images for.
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Builds programs and returns where they are. With the registry they know the name of the runner's image.
pub fn build(profile: Profile, registry: &str, programs: &[Program]) -> Result<Vec<PathBuf>> {
    match profile {
        // All at once and with all features, as the helper itself for the demo: so each crate is compiled once for all of them. What a
        // program does not use of that the linker leaves out.
        Profile::Dev => {
            let mut command = cargo("static", registry);
            command.args(programs.iter().flat_map(|program| ["--bin", program.name]));
            run_loud(&mut command).context("building the programs")?;
        }
        // Each alone with its own feature: what is published has nothing of the others even if a crate behaves otherwise with more
        // features.
        Profile::Release => {
            for Program { name, feature } in programs {
                let features = ["--no-default-features", "--features", feature];
                run_loud(cargo("static-release", registry).args(["--bin", name]).args(features))
                    .with_context(|| format!("building {name}"))?;
            }
        }
    }
    let folder = match profile {
        Profile::Dev => "debug",
        Profile::Release => "release",
    };
    let dir = root().join("target/static").join(TARGET).join(folder);
    Ok(programs.iter().map(|program| dir.join(program.name)).collect())
}

/// Cargo with one of the aliases of .cargo/config.toml.
fn cargo(alias: &str, registry: &str) -> Command {
    let mut command = tied(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root()).arg(alias).stdout(std::io::stderr());
    // It would take the place of the aliases' flags.
    command.env_remove("RUSTFLAGS");
    // Without the variable, programs that are for no registry need not be built anew.
    if registry != NO_REGISTRY {
        command.env("VM_OPERATOR_REGISTRY", registry);
    }
    command
}
