//! The scripts of the web interface that are made of packages (noVNC, xterm.js), and axe-core for its tests. They are in Git, so that a build takes no
//! Node.js; this makes them anew.
//!
//! `src/web/browser/built.sha256` has the digests of what they are made of and of themselves. A test compares them without npm.

use std::{fs, process::Command};

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};

use crate::tools::{root, run_loud};

const SUMS: &str = "src/web/browser/built.sha256";
const AXE: &str = "tests/api_server/web/browser/axe.min.js";
/// What is made, and of what.
const FILES: [&str; 9] = [
    "src/web/browser/console.js",
    "src/web/browser/serial.js",
    "src/web/browser/viewer.js",
    "src/web/browser/package.json",
    "src/web/browser/package-lock.json",
    "src/web/assets/console.min.js",
    "src/web/assets/serial.min.js",
    "src/web/assets/xterm.min.css",
    AXE,
];

/// Installs the packages of the lock file and makes the scripts.
pub fn build() -> Result<()> {
    let folder = root().join("src/web/browser");
    for arguments in [&["ci", "--no-audit", "--no-fund"][..], &["run", "build"]] {
        run_loud(Command::new("npm").args(arguments).current_dir(&folder))
            .context("this takes npm (Node.js 20 or later)")?;
    }
    fs::copy(folder.join("node_modules/axe-core/axe.min.js"), root().join(AXE)).context("axe-core")?;
    let mut sums = String::new();
    for file in FILES {
        let digest = Sha256::digest(fs::read(root().join(file)).context(file)?);
        let digest: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        sums += &format!("{digest}  {file}\n");
    }
    fs::write(root().join(SUMS), sums).context(SUMS)
}
