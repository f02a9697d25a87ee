//! SBOMs: of which crates each program is made, with the features with which it is built, in the format of CycloneDX.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::programs::{Program, TARGET};
use crate::tools::{cargo, make_dir, read, remove, root, run, run_loud, tied, write};

/// The version of cargo-cyclonedx that writes them.
const VERSION: &str = "0.5.9";

/// cargo-cyclonedx, which is built once.
fn cargo_cyclonedx() -> Result<PathBuf> {
    let folder = root().join("target/tools");
    // Without optimizations it is built sooner, and validates what it writes.
    let mut install = tied(cargo());
    install.args(["install", "--quiet", "--locked", "--debug", "--root"]).arg(&folder);
    run_loud(install.arg(format!("cargo-cyclonedx@{VERSION}"))).context("building cargo-cyclonedx")?;
    Ok(folder.join("bin/cargo-cyclonedx"))
}

/// Makes a copy of the crate without what only its tests need: for them Cargo turns features on, and with these come crates that no program has.
fn without_tests() -> Result<PathBuf> {
    let folder = root().join("target/sbom");
    remove(&folder)?;
    make_dir(&folder)?;
    for name in ["src", "tests", "benches"] {
        symlink(root().join(name), folder.join(name)).with_context(|| format!("linking {name}"))?;
    }
    write(&folder.join("Cargo.lock"), read(&root().join("Cargo.lock"))?)?;
    let manifest = read(&root().join("Cargo.toml"))?;
    let (before, rest) =
        manifest.split_once("\n[dev-dependencies]\n").context("Cargo.toml has no [dev-dependencies]")?;
    let after = rest.split_once("\n[").map_or("", |(_, after)| after);
    write(&folder.join("Cargo.toml"), format!("{before}\n[{after}"))?;
    fs::canonicalize(&folder).context("looking for the copy of the crate")
}

/// Writes an SBOM for each program into the folder, and returns the names of the files.
pub fn write_into(folder: &Path, programs: &[Program]) -> Result<Vec<String>> {
    make_dir(folder)?;
    let (tool, copy) = (cargo_cyclonedx()?, without_tests()?);
    programs
        .iter()
        .map(|Program { name, feature }| {
            let mut command = Command::new(&tool);
            command.current_dir(&copy).args(["cyclonedx", "--quiet", "--format", "json", "--spec-version", "1.5"]);
            command.args([
                "--describe",
                "binaries",
                "--target",
                TARGET,
                "--no-default-features",
                "--features",
                feature,
            ]);
            run(&mut command).with_context(|| format!("writing the SBOM of {name}"))?;
            // It has written one for each program of the crate, beside Cargo.toml. As in the programs, no path is that of this tree.
            let sbom = read(&copy.join(format!("{name}_bin.cdx.json")))?;
            let file = format!("{name}.cdx.json");
            write(&folder.join(&file), sbom.replace(&copy.display().to_string(), "/vm-operator"))?;
            Ok(file)
        })
        .collect()
}
