//! Finding out what is missing on this machine, and installing it.

use std::process::Command;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;

use crate::tools::{find_program, is_root, read, run_loud};

/// What the machine is to be good for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Purpose {
    /// A control plane (API server, controllers), without a node
    ControlPlane,
    /// A cluster with a node that runs Pods
    Cluster,
    /// Building container images
    Images,
    /// Building the small guest of tests and of the demo
    Guest,
    /// All of the above
    Demo,
    /// Running the runner without a container, as its tests do
    Runner,
    /// All there is
    All,
}

struct Requirement {
    /// A program, or a file with its path: if it is there the package is not needed.
    probe: &'static str,
    package: &'static str,
    why: &'static str,
    purposes: &'static [Purpose],
}

const fn need(
    probe: &'static str,
    package: &'static str,
    why: &'static str,
    purposes: &'static [Purpose],
) -> Requirement {
    Requirement { probe, package, why, purposes }
}

const REQUIREMENTS: &[Requirement] = &[
    need("setpriv", "util-linux", "ends the cluster with its supervisor", &[Purpose::ControlPlane, Purpose::Cluster]),
    need("containerd", "containerd", "runs the containers of the node", &[Purpose::Cluster]),
    need("runc", "runc", "starts containers", &[Purpose::Cluster]),
    need("/usr/lib/cni/bridge", "containernetworking-plugins", "connects Pods", &[Purpose::Cluster]),
    need("iptables", "iptables", "kube-proxy makes Services with it", &[Purpose::Cluster]),
    need("ip", "iproute2", "the cluster's own network", &[Purpose::Cluster]),
    need("mount", "mount", "volumes; losetup for block volumes", &[Purpose::Cluster]),
    need("busybox", "busybox-static", "the pause image and the guest's programs", &[Purpose::Cluster, Purpose::Guest]),
    need("tar", "tar", "container images", &[Purpose::Cluster, Purpose::Images]),
    need("buildah", "buildah", "builds container images", &[Purpose::Images]),
    need("mmdebstrap", "mmdebstrap", "makes the base image where no registry can be reached", &[Purpose::Images]),
    need(
        "/usr/share/keyrings/debian-archive-keyring.gpg",
        "debian-archive-keyring",
        "checks Debian's packages for the base image",
        &[Purpose::Images],
    ),
    need("gcc", "gcc", "links Rust programs", &[Purpose::Images]),
    need("/usr/share/doc/libc6-dev", "libc6-dev", "static programs", &[Purpose::Images]),
    need("qemu-system-x86_64", "qemu-system-x86", "the runner's tests start machines", &[Purpose::Runner]),
    need("/usr/share/OVMF/OVMF_CODE_4M.fd", "ovmf", "the machines' UEFI firmware", &[Purpose::Runner]),
    need("swtpm", "swtpm", "the machines' TPM", &[Purpose::Runner]),
    need("cpio", "cpio", "packs the guest's first root", &[Purpose::Guest]),
    need("grub-mkimage", "grub-common", "makes the guest bootable", &[Purpose::Guest]),
    need("mcopy", "mtools", "makes the guest's boot partition", &[Purpose::Guest]),
    need("zstd", "zstd", "compresses the guest's first root", &[Purpose::Guest]),
];

impl Purpose {
    fn covers(self, requirement: &Requirement) -> bool {
        match self {
            Purpose::All => true,
            Purpose::Demo => requirement.purposes != [Purpose::Runner],
            purpose => requirement.purposes.contains(&purpose),
        }
    }
}

fn is_there(requirement: &Requirement) -> bool {
    if requirement.probe.starts_with('/') {
        std::path::Path::new(requirement.probe).exists()
    } else {
        find_program(requirement.probe).is_some()
    }
}

/// Makes sure that all is there that `purpose` needs, if possible by installing it.
pub fn ensure(purpose: Purpose) -> Result<()> {
    let missing: Vec<&Requirement> =
        REQUIREMENTS.iter().filter(|requirement| purpose.covers(requirement) && !is_there(requirement)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    eprintln!("Missing on this machine:");
    for requirement in &missing {
        eprintln!("  {:<28} {}", requirement.package, requirement.why);
    }
    let mut packages: Vec<&str> = missing.iter().map(|requirement| requirement.package).collect();
    packages.dedup();
    let by_hand = format!("apt-get install --no-install-recommends {}", packages.join(" "));
    if find_program("apt-get").is_none() {
        bail!(
            "this machine has no apt-get: install by hand what your system calls these Debian packages, then try again: {}",
            packages.join(" ")
        );
    }
    if !is_root() {
        bail!("only root can install packages; run this, then try again:\n  sudo {by_hand}");
    }
    eprintln!("Installing with apt-get ...");
    if install(&packages).is_err() {
        // The lists of packages may be missing or old, as they are in a new container.
        run_loud(apt().args(["-qq", "update"])).context("apt-get can't fetch the lists of packages")?;
        install(&packages).with_context(|| format!("find out why this fails, then try again: {by_hand}"))?;
    }
    if let Some(requirement) = missing.iter().find(|requirement| !is_there(requirement)) {
        bail!("the package {} is installed, but {} is still not there", requirement.package, requirement.probe);
    }
    Ok(())
}

fn apt() -> Command {
    let mut command = Command::new("apt-get");
    command.env("DEBIAN_FRONTEND", "noninteractive").env("NEEDRESTART_MODE", "l").stdout(std::io::stderr());
    command
}

fn install(packages: &[&str]) -> Result<()> {
    run_loud(apt().args(["-qq", "install", "--yes", "--no-install-recommends", "-o", "Dpkg::Use-Pty=0"]).args(packages))
}

/// Checks that there is a Go that can build the control plane.
pub fn ensure_go() -> Result<()> {
    let wanted = read(&crate::tools::root().join("tests/controlplane/go.mod"))?
        .lines()
        .find_map(|line| line.strip_prefix("go ").map(str::to_owned))
        .context("tests/controlplane/go.mod names no Go version")?;
    if find_program("go").is_none() {
        bail!(
            "the control plane is built from Go modules, and there is no `go` on the PATH: install Go {wanted} or newer \
             (https://go.dev/dl), or set KUBEBUILDER_ASSETS to a directory with etcd, kube-apiserver and kubectl, \
             or KUBECONFIG to a cluster that tests may use"
        );
    }
    Ok(())
}
