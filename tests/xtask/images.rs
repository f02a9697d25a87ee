//! The operator's container images, from the Containerfiles that users build from.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::programs::{MANAGER, NODE_DEVICES, Program, RUNNER, Source, VMCTL, WEB};
use crate::tools::{
    Stage, cache_dir, dev_dir, fingerprint, is_root, make_dir, read, remove, root, run, run_loud, run_raw, sha256_file,
    tied, try_hold, wait_for, write,
};

/// The registry in the names of images that are in none.
pub const NO_REGISTRY: &str = "localhost";

/// One of the operator's images. It has the name of its first program.
struct Image {
    programs: &'static [Program],
    registry: String,
}

fn images(registry: &str) -> impl Iterator<Item = Image> {
    let programs: [&[Program]; 3] = [&[MANAGER, NODE_DEVICES, WEB], &[RUNNER], &[VMCTL]];
    programs.into_iter().map(|programs| Image { programs, registry: registry.to_owned() })
}

/// Builds the images and returns their archives; what has not changed since last time is left alone.
pub fn build(source: &Source, registry: &str, offline: bool) -> Result<Vec<PathBuf>> {
    let programs: Vec<_> = images(registry).flat_map(|image| image.programs).copied().collect();
    let mut built = source.programs(registry, &programs)?.into_iter();
    images(registry)
        .map(|image| image.build(&built.by_ref().take(image.programs.len()).collect::<Vec<_>>(), offline))
        .collect()
}

/// Pushes the images, which were built for that registry, and writes their names with their digests into `dist/images.txt`.
pub fn push(registry: &str) -> Result<()> {
    let (dist, digests) = (root().join("dist"), dev_dir().join("images"));
    make_dir(&dist)?;
    make_dir(&digests)?;
    let mut pushed = String::new();
    for image in images(registry) {
        let tag = image.tag();
        if !run_raw(buildah()?.args(["inspect", "--type", "image", &tag]))?.status.success() {
            bail!("there is no image {tag}: build it with `make images REGISTRY={registry}`");
        }
        let digest = digests.join(format!("{}.digest", image.programs[0].name));
        run_loud(buildah()?.args(["push", "--digestfile"]).arg(&digest).args([&tag, &format!("docker://{tag}")]))
            .with_context(|| format!("pushing {tag}; `buildah login` logs in to a registry"))?;
        pushed += &format!("{tag}@{}\n", read(&digest)?.trim());
    }
    print!("{pushed}");
    write(&dist.join("images.txt"), pushed)
}

/// The names that the images have.
pub fn names(registry: &str) -> impl Iterator<Item = String> {
    images(registry).map(|image| image.tag())
}

impl Image {
    fn tag(&self) -> String {
        format!("{}/{}:{}", self.registry, self.programs[0].name, env!("CARGO_PKG_VERSION"))
    }

    fn build(&self, programs: &[PathBuf], offline: bool) -> Result<PathBuf> {
        let start = Instant::now();
        let Program { name, feature } = self.programs[0];
        let containerfile = root().join("deploy/images").join(format!("{feature}.Containerfile"));
        let recipe = read(&containerfile)?;
        let sums = programs.iter().map(|program| sha256_file(program)).collect::<Result<String>>()?;
        let key = fingerprint([recipe.as_bytes(), self.tag().as_bytes(), sums.as_bytes()]);
        let out = dev_dir().join("images");
        make_dir(&out)?;
        let _held = wait_for("another build of images", Duration::from_secs(1800), || try_hold(&storage()?))?;
        let archive = out.join(format!("{name}.tar"));
        let marker = out.join(format!("{name}.key"));
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
        let context = out.join(format!("{name}.context"));
        remove(&context)?;
        make_dir(&context)?;
        for (program, Program { name, .. }) in programs.iter().zip(self.programs) {
            // Two thirds of a program that is built for tests say where its lines come from.
            run(tied("strip").arg("-o").arg(context.join(name)).arg(program))?;
        }
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
