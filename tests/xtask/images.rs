//! The operator's container images, from the Containerfiles that users build from.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::tools::{
    Stage, cache_dir, dev_dir, fingerprint, is_root, make_dir, read, remove, root, run, run_raw, sha256_file, tied,
    try_hold, wait_for, write,
};

/// How programs are built for an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Profile {
    /// Fast to build: for tests and the demo
    Image,
    /// As they are published
    Release,
}

impl Profile {
    fn name(self) -> &'static str {
        match self {
            Self::Image => "image",
            Self::Release => "release",
        }
    }
}

/// One of the operator's images.
struct Image {
    name: &'static str,
    feature: &'static str,
    program: &'static str,
}

const IMAGES: &[Image] = &[
    Image { name: "vm-operator", feature: "manager", program: "vm-operator" },
    Image { name: "vm-runner", feature: "runner", program: "vm-runner" },
];

const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Builds both images and returns their archives; what has not changed since last time is left alone.
pub fn build(profile: Profile, offline: bool) -> Result<Vec<PathBuf>> {
    IMAGES.iter().map(|image| image.build(profile, offline)).collect()
}

/// The names that the images have in a cluster.
pub fn names() -> impl Iterator<Item = String> {
    IMAGES.iter().map(Image::tag)
}

impl Image {
    fn tag(&self) -> String {
        format!("localhost/{}:{}", self.name, env!("CARGO_PKG_VERSION"))
    }

    fn build(&self, profile: Profile, offline: bool) -> Result<PathBuf> {
        let start = Instant::now();
        let program = self.build_program(profile)?;
        let containerfile = root().join("deploy/images").join(format!("{}.Containerfile", self.feature));
        let recipe = read(&containerfile)?;
        let key = fingerprint([recipe.as_bytes(), sha256_file(&program)?.as_bytes()]);
        let out = dev_dir().join("images");
        make_dir(&out)?;
        let _held = wait_for("another build of images", Duration::from_secs(1800), || try_hold(&storage()?))?;
        let archive = out.join(format!("{}.tar", self.name));
        let marker = out.join(format!("{}.key", self.name));
        if archive.is_file() && fs::read_to_string(&marker).is_ok_and(|known| known == key) {
            eprintln!("{} is up to date", self.tag());
            return Ok(archive);
        }
        if !is_root() {
            bail!(
                "building images with buildah needs root here; docker or podman can do it from {}",
                containerfile.display()
            );
        }
        // What a build that was interrupted has left.
        run(buildah()?.args(["rm", "--all"]))?;
        for base in recipe.lines().filter_map(|line| line.strip_prefix("FROM ")).filter(|base| *base != "scratch") {
            ensure_base(base, offline)?;
        }
        let context = out.join(format!("{}.context", self.name));
        remove(&context)?;
        make_dir(&context)?;
        fs::copy(&program, context.join(self.program)).with_context(|| format!("copying {}", program.display()))?;
        // Timestamps of the program would make a new layer of the same content.
        run(buildah()?
            .args(["bud", "--layers", "--isolation", "chroot", "--pull=never", "--quiet", "--timestamp", "0"])
            .args(["--tag", &self.tag(), "--file"])
            .arg(&containerfile)
            .arg(&context))
        .with_context(|| format!("building the image {}", self.tag()))?;
        remove(&archive)?;
        // Docker's format is not compressed: that takes longer than reading it.
        run(buildah()?.args(["push", "--quiet", &self.tag()]).arg(format!(
            "docker-archive:{}:{}",
            archive.display(),
            self.tag()
        )))
        .with_context(|| format!("writing {}", archive.display()))?;
        remove(&context)?;
        write(&marker, key)?;
        let size = fs::metadata(&archive).map_or(0, |meta| meta.len() / 1_000_000);
        eprintln!("{} built in {:.1} s, {size} MB", self.tag(), start.elapsed().as_secs_f32());
        Ok(archive)
    }

    /// A static program, from its own features alone. In a directory of its own: other flags would make Cargo build
    /// everything anew each time.
    fn build_program(&self, profile: Profile) -> Result<PathBuf> {
        let target_dir = root().join("target/static");
        run(tied(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
            .current_dir(root())
            .args(["build", "--quiet", "--profile", profile.name(), "--no-default-features"])
            .args(["--features", self.feature, "--bin", self.program, "--target", TARGET, "--target-dir"])
            .arg(&target_dir)
            .env("RUSTFLAGS", "-C target-feature=+crt-static"))
        .with_context(|| format!("building {}", self.program))?;
        Ok(target_dir.join(TARGET).join(profile.name()).join(self.program))
    }
}

fn storage() -> Result<PathBuf> {
    Ok(cache_dir()?.join("buildah"))
}

/// buildah with a storage of its own: what the machine has there is not ours, and ours is easy to remove.
fn buildah() -> Result<Command> {
    let storage = storage()?;
    make_dir(&storage)?;
    let mut command = tied("buildah");
    command.arg("--root").arg(storage.join("root")).arg("--runroot").arg(storage.join("run"));
    command.args(["--storage-driver", if crate::tools::lies_on_overlay(&storage)? { "vfs" } else { "overlay" }]);
    Ok(command)
}

/// Makes sure that the image is there that a Containerfile begins with: from its registry, or, where that can't be
/// reached, made of Debian's packages under the same name.
fn ensure_base(name: &str, offline: bool) -> Result<()> {
    if run_raw(buildah()?.args(["inspect", "--type", "image", name]))?.status.success() {
        return Ok(());
    }
    if !offline {
        eprintln!("Pulling {name} ...");
        let pulled = run_raw(
            tied("timeout")
                .arg("60")
                .arg(buildah()?.get_program())
                .args(buildah()?.get_args())
                .args(["pull", "--quiet", "--retry", "0", name]),
        )?;
        if pulled.status.success() {
            return Ok(());
        }
        let why = String::from_utf8_lossy(&pulled.stderr).trim().to_owned();
        eprintln!("It can't be pulled ({})", why.lines().last().unwrap_or("no answer in 60 s"));
    }
    let Some(suite) = name.rsplit_once("debian:").map(|(_, tag)| tag.trim_end_matches("-slim")) else {
        bail!("the base image {name} can't be pulled, and only Debian's can be made here instead");
    };
    eprintln!("Making {name} from Debian's packages ...");
    let start = Instant::now();
    let held = Stage::new("base")?;
    let stage = held.path();
    let tree = stage.join("base.tar");
    run(tied("mmdebstrap")
        .args([
            "--variant=minbase",
            "--quiet",
            "--dpkgopt=path-exclude=/usr/share/doc/*",
            "--dpkgopt=path-exclude=/usr/share/man/*",
        ])
        .args(["--dpkgopt=path-exclude=/usr/share/locale/*", suite])
        .arg(&tree))
    .with_context(|| format!("making a Debian {suite}"))?;
    write(&stage.join("Containerfile"), "FROM scratch\nADD base.tar /\nCMD [\"/bin/bash\"]\n")?;
    run(buildah()?.args(["bud", "--quiet", "--isolation", "chroot", "--timestamp", "0", "--tag", name]).arg(stage))
        .with_context(|| format!("making the image {name}"))?;
    eprintln!("Made in {:.1} s", start.elapsed().as_secs_f32());
    Ok(())
}
