//! The programs as they go into images and archives: static, so that they need nothing of the system that they run on.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::json;

use crate::images::NO_REGISTRY;
use crate::tools::{self, cargo_home, root, run_loud, tied};

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

/// All programs of a release.
pub const ALL: [Program; 6] = [MANAGER, NODE_DEVICES, WEB, RUNNER, VMCTL, PLUGIN];

/// The only target that there are images for.
pub const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Where a release is built. Nothing of it is in the programs.
pub struct Place {
    /// The tree of the sources.
    pub sources: PathBuf,
    /// Cargo's target directory.
    pub target: PathBuf,
    /// Cargo's home, below which the crates are.
    pub cargo_home: PathBuf,
}

impl Place {
    /// This tree.
    pub fn here() -> Result<Self> {
        Ok(Self { sources: root().to_owned(), target: root().join("target/static"), cargo_home: cargo_home()? })
    }

    /// Builds a program as it is published, and returns where it is: alone with its own feature, so it has nothing of the others even if a
    /// crate behaves otherwise with more features.
    pub fn build(&self, registry: &str, program: Program) -> Result<PathBuf> {
        let Program { name, feature } = program;
        let mut flags = vec!["-Ctarget-feature=+crt-static".to_owned()];
        // Messages of panics name files. Of prefixes that contain each other the last one counts.
        for (from, to) in [(&self.sources, "/vm-operator"), (&self.target, "/target"), (&self.cargo_home, "/cargo")] {
            flags.push(format!("--remap-path-prefix={}={to}", from.display()));
        }
        let mut command = cargo("build", registry);
        command.current_dir(&self.sources).env("CARGO_HOME", &self.cargo_home);
        command.args(["--release", "--locked", "--target", TARGET, "--target-dir"]).arg(&self.target);
        command.args(["--config", &format!("build.rustflags={}", json!(flags))]);
        command.args(["--no-default-features", "--features", feature, "--bin", name]);
        run_loud(&mut command).with_context(|| format!("building {name}"))?;
        Ok(self.target.join(TARGET).join("release").join(name))
    }
}

/// Builds programs and returns where they are. With the registry they know the name of the runner's image.
pub fn build(profile: Profile, registry: &str, programs: &[Program]) -> Result<Vec<PathBuf>> {
    match profile {
        // All at once and with all features, as the helper itself for the demo: so each crate is compiled once for all of them. What a
        // program does not use of that the linker leaves out.
        Profile::Dev => {
            let mut command = cargo("static", registry);
            command.args(programs.iter().flat_map(|program| ["--bin", program.name]));
            run_loud(&mut command).context("building the programs")?;
            let folder = root().join("target/static").join(TARGET).join("debug");
            Ok(programs.iter().map(|program| folder.join(program.name)).collect())
        }
        Profile::Release => {
            let here = Place::here()?;
            programs.iter().map(|program| here.build(registry, *program)).collect()
        }
    }
}

/// A command of Cargo, or one of the aliases of .cargo/config.toml.
fn cargo(subcommand: &str, registry: &str) -> Command {
    let mut command = tied(tools::cargo());
    command.current_dir(root()).arg(subcommand).stdout(std::io::stderr());
    // They would take the place of our flags.
    command.env_remove("RUSTFLAGS").env_remove("CARGO_ENCODED_RUSTFLAGS");
    // Without the variable, programs that are for no registry need not be built anew.
    if registry != NO_REGISTRY {
        command.env("VM_OPERATOR_REGISTRY", registry);
    }
    command
}
