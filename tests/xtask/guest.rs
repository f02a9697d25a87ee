//! The tiny guest of tests and of the demo, and the image that brings it into a cluster.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::tools::{dev_dir, make_dir, read, root, run_loud, write};
use crate::tools_image;

/// Builds the guest's disk image, if its inputs have changed.
pub fn disk() -> Result<PathBuf> {
    let script = root().join("tests/guest/build.sh");
    if !script.is_file() {
        bail!("{} is missing: it builds the guest", script.display());
    }
    let dir = dev_dir().join("guest");
    make_dir(&dir)?;
    let disk = dir.join("guest.img");
    run_loud(Command::new(script).arg(&disk).stdout(std::io::stderr())).context("building the guest")?;
    Ok(disk)
}

/// The name that its image has in a cluster.
pub fn image_name() -> String {
    format!("localhost/vm-demo-guest:{}", env!("CARGO_PKG_VERSION"))
}

/// The archive of an image that holds the disk as /guest.img, with busybox to copy it to where it is wanted.
pub fn image() -> Result<PathBuf> {
    let disk = disk()?;
    let archive = dev_dir().join("guest/image.tar");
    let marker = dev_dir().join("guest/image.sum");
    let sum = read(&disk.with_extension("img.sum")).unwrap_or_default();
    if sum.is_empty() || !archive.is_file() || fs::read_to_string(&marker).ok().as_ref() != Some(&sum) {
        tools_image::make(&image_name(), &archive, &[("guest.img", &disk)])?;
        write(&marker, sum)?;
    }
    Ok(archive)
}
