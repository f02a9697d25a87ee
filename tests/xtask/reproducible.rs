//! Whether a release can be built again elsewhere: its programs are built in this tree and in a copy of it, and compared.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::programs::{ALL, Place};
use crate::tools::{cargo_home, make_dir, remove, root, run, sha256_file};

/// Builds the programs of these names, or all, twice, and says of each whether both are the same. The second time the paths of the sources, of the
/// target directory and of Cargo's home are others.
pub fn compare(registry: &str, names: &[String]) -> Result<bool> {
    if let Some(unknown) = names.iter().find(|name| !ALL.iter().any(|program| program.name == **name)) {
        bail!("there is no program {unknown}: {}", ALL.map(|program| program.name).join(", "));
    }
    let folder = root().join("target/reproducible");
    remove(&folder)?;
    let there = Place {
        sources: folder.join("another/path/of/the/sources"),
        target: folder.join("built"),
        cargo_home: folder.join("home-of-cargo"),
    };
    make_dir(&there.sources)?;
    symlink(fs::canonicalize(cargo_home()?).context("looking for Cargo's home")?, &there.cargo_home)
        .context("linking Cargo's home")?;
    // What Git knows, and what it would be told of.
    let copy = "git ls-files -z --cached --others --exclude-standard | tar -c --null --files-from=- | tar -x -C \"$1\"";
    run(Command::new("sh").args(["-ec", copy, "sh"]).arg(&there.sources).current_dir(root()))
        .context("copying the tree")?;
    let here = Place::here()?;
    let mut is_same = true;
    for program in ALL.into_iter().filter(|program| names.is_empty() || names.iter().any(|name| name == program.name)) {
        let builds = [here.build(registry, program)?, there.build(registry, program)?];
        is_same &= say(program.name, [&builds[0], &builds[1]])?;
    }
    Ok(is_same)
}

/// Says whether two builds of a program have the same bytes.
fn say(name: &str, builds: [&Path; 2]) -> Result<bool> {
    let sums = [sha256_file(builds[0])?, sha256_file(builds[1])?];
    let is_same = sums[0] == sums[1];
    println!("{name:<16} {}", if is_same { format!("same     {}", sums[0]) } else { "differs".to_owned() });
    if !is_same {
        for (sum, build) in sums.iter().zip(builds) {
            println!("  {sum}  {}", build.display());
        }
    }
    Ok(is_same)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_byte_makes_a_difference() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, content: &[u8]| {
            let path = folder.path().join(name);
            fs::write(&path, content).unwrap();
            path
        };
        let (first, second, other) = (file("a", b"\x7fELF"), file("b", b"\x7fELF"), file("c", b"\x7fELG"));
        assert!(say("vmctl", [&first, &second]).unwrap());
        assert!(!say("vmctl", [&first, &other]).unwrap());
    }
}
