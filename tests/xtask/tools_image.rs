//! The small image that clusters need themselves.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::json;

use crate::tools::{Stage, cache_dir, find_program, fingerprint, make_dir, run, sha256_file, write};

/// Keeps a Pod's namespaces open, and is a small image for the Pods of tests: it is busybox.
pub const NAME: &str = "localhost/vm-operator-tools:1";

/// The archive of the tools' image, for whatever version of busybox the machine has.
///
/// It is one static program: for that no image builder is needed, only the archive format that all know.
pub fn archive() -> Result<PathBuf> {
    let busybox = find_program("busybox").context("there is no busybox on the PATH")?;
    let program = fs::read(&busybox).with_context(|| format!("reading {}", busybox.display()))?;
    // The last part is the version of what is made here.
    let archive = cache_dir()?.join(format!("tools-{}.tar", fingerprint([program.as_slice(), b"1"])));
    if archive.is_file() {
        return Ok(archive);
    }
    make(NAME, &archive, &[])?;
    Ok(archive)
}

/// Writes the archive of an image that has busybox and some more files (their names in it, and where they are).
pub fn make(name: &str, archive: &Path, files: &[(&str, &Path)]) -> Result<()> {
    let busybox = find_program("busybox").context("there is no busybox on the PATH")?;
    let held = Stage::new("image")?;
    let stage = held.path();
    let tree = stage.join("tree");
    for dir in ["bin", "etc", "tmp"] {
        make_dir(&tree.join(dir))?;
    }
    fs::copy(&busybox, tree.join("bin/busybox")).context("copying busybox")?;
    for applet in run(Command::new(&busybox).arg("--list"))?.lines().filter(|applet| *applet != "busybox") {
        std::os::unix::fs::symlink("busybox", tree.join("bin").join(applet)).context("linking a program of busybox")?;
    }
    write(&tree.join("etc/passwd"), "root:x:0:0:root:/:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n")?;
    let mut names = vec!["bin", "etc", "tmp"];
    for (file, path) in files {
        fs::copy(path, tree.join(file)).with_context(|| format!("copying {}", path.display()))?;
        names.push(file);
    }
    pack(&tree, &names, &stage.join("layer.tar"))?;
    let layer = sha256_file(&stage.join("layer.tar"))?;
    let config = json!({
        "architecture": if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" },
        "os": "linux",
        "config": {
            "Env": ["PATH=/bin"],
            // As the first process of a Pod it must end when told to.
            "Entrypoint": ["/bin/sh", "-c", "trap 'exit 0' TERM INT; while :; do sleep 2147483647 & wait; done"],
        },
        "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{layer}")]},
    });
    write(&stage.join("config.json"), config.to_string())?;
    let manifest = json!([{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]);
    write(&stage.join("manifest.json"), manifest.to_string())?;
    let unfinished = stage.join("image.tar");
    pack(stage, &["manifest.json", "config.json", "layer.tar"], &unfinished)?;
    // The cache may be on another file system than the target.
    let beside = archive.with_extension("unfinished");
    fs::copy(&unfinished, &beside).with_context(|| format!("writing {}", beside.display()))?;
    fs::rename(&beside, archive).with_context(|| format!("writing {}", archive.display()))
}

fn pack(dir: &Path, names: &[&str], archive: &Path) -> Result<()> {
    run(Command::new("tar")
        .args(["--create", "--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--mtime=@0", "--file"])
        .arg(archive)
        .arg("--directory")
        .arg(dir)
        .args(names))
    .map(drop)
}
