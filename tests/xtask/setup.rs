//! Finding out what is missing on this machine, and installing it.

use std::process::Command;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;

use crate::tools::{find_program, is_root, read, run, run_loud};

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
    /// All of the above, from nothing to a running guest
    Demo,
    /// What only tests use: the runner without a container, a clock that jumps
    Tests,
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
    need("ip", "iproute2", "the cluster's own network", &[Purpose::Cluster, Purpose::Tests]),
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
    need("/usr/lib/x86_64-linux-gnu/libc.a", "libc6-dev", "static programs", &[Purpose::Images]),
    need("qemu-system-x86_64", "qemu-system-x86", "the runner's tests start VMs", &[Purpose::Tests]),
    need("/usr/lib/x86_64-linux-gnu/qemu/block-curl.so", "qemu-block-extra", "CD images at a URL", &[Purpose::Tests]),
    need("/usr/share/OVMF/OVMF_CODE_4M.fd", "ovmf", "the VMs' UEFI firmware", &[Purpose::Tests]),
    need("qemu-img", "qemu-utils", "disks over images", &[Purpose::Tests]),
    need("swtpm", "swtpm", "the VMs' TPM", &[Purpose::Tests]),
    need("passt", "passt", "connects VMs with the network of their Pod", &[Purpose::Tests]),
    need("ssh", "openssh-client", "logs in to guests", &[Purpose::Tests]),
    need("curl", "curl", "asks the guests' web servers", &[Purpose::Tests]),
    need("nsenter", "util-linux", "network namespaces of the tests' own", &[Purpose::Tests]),
    need(
        "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1",
        "libfaketime",
        "lets the manager's clock jump in a test",
        &[Purpose::Tests],
    ),
    need("chromium", "chromium", "shows the web interface's pages", &[Purpose::Tests]),
    need("/usr/share/fonts/truetype/liberation", "fonts-liberation", "the texts of these pages", &[Purpose::Tests]),
    need("cpio", "cpio", "packs the guest's first root", &[Purpose::Guest]),
    need("grub-mkimage", "grub-common", "makes the guest bootable with UEFI", &[Purpose::Guest]),
    need("mcopy", "mtools", "makes the guest's boot partition", &[Purpose::Guest]),
    need("zstd", "zstd", "compresses the guest's first root", &[Purpose::Guest]),
];

impl Purpose {
    fn covers(self, requirement: &Requirement) -> bool {
        match self {
            Purpose::All => true,
            Purpose::Demo => requirement.purposes != [Purpose::Tests],
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

/// Makes sure that all is there that `purposes` need, if possible by installing it.
pub fn ensure(purposes: &[Purpose]) -> Result<()> {
    let missing: Vec<&Requirement> = REQUIREMENTS
        .iter()
        .filter(|requirement| purposes.iter().any(|purpose| purpose.covers(requirement)) && !is_there(requirement))
        .collect();
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
        bail!("only root can install packages; run this, then try again:\n  sudo apt-get update && sudo {by_hand}");
    }
    eprintln!("Installing with apt-get ...");
    // One that was interrupted makes apt-get refuse anything else. Most have not: then it does nothing.
    run_loud(Command::new("dpkg").args(["--configure", "--pending"]).stdout(std::io::stderr()))
        .context("an earlier installation was interrupted, and can't be completed")?;
    // The lists of packages may be missing, as they are in a new container, or older than what the servers have.
    let lists_are_good = run(&mut install(&["--simulate"], &packages)).is_ok();
    if !lists_are_good || run_loud(&mut install(&[], &packages)).is_err() {
        run_loud(apt().args(["-qq", "update"])).context("apt-get can't fetch the lists of packages")?;
        run_loud(&mut install(&[], &packages))
            .with_context(|| format!("find out why this fails, then try again: {by_hand}"))?;
    }
    if let Some(requirement) = missing.iter().find(|requirement| !is_there(requirement)) {
        bail!("the package {} is installed, but {} is still not there", requirement.package, requirement.probe);
    }
    Ok(())
}

fn apt() -> Command {
    let mut command = Command::new("apt-get");
    // A machine that has just started often updates itself.
    command.args(["-o", "DPkg::Lock::Timeout=300"]);
    command.env("DEBIAN_FRONTEND", "noninteractive").env("NEEDRESTART_MODE", "l").stdout(std::io::stderr());
    command
}

fn install(options: &[&str], packages: &[&str]) -> Command {
    let mut command = apt();
    command.args(["-qq", "install", "--yes", "--no-install-recommends", "-o", "Dpkg::Use-Pty=0"]);
    command.args(options).args(packages);
    command
}

/// Checks that there is a Go that can build the control plane.
pub fn ensure_go() -> Result<()> {
    let wanted = read(&crate::tools::root().join("tests/controlplane/go.mod"))?
        .lines()
        .find_map(|line| line.strip_prefix("go ").map(str::to_owned))
        .context("tests/controlplane/go.mod names no Go version")?;
    let advice = format!(
        "install Go {wanted} or newer (https://go.dev/dl), or set KUBEBUILDER_ASSETS to a directory with etcd, \
         kube-apiserver and kubectl, or KUBECONFIG to a cluster that tests may use"
    );
    if find_program("go").is_none() {
        bail!("the control plane is built from Go modules, and there is no `go` on the PATH: {advice}");
    }
    // In the module's directory: there a newer Go than 1.20 fetches the one that the module wants.
    let module = crate::tools::root().join("tests/controlplane");
    let version = run(Command::new("go").args(["env", "GOVERSION"]).current_dir(module))
        .with_context(|| format!("the control plane is built from Go modules: {advice}"))?;
    if !is_new_enough(version.trim(), &wanted) {
        bail!("the control plane is built from Go modules, and {} is too old for that: {advice}", version.trim());
    }
    Ok(())
}

/// Whether a version of Go such as `go1.26.8` is at least `wanted`; one that can't be read, such as that of a Go built
/// from its repository, is for the compiler to judge.
fn is_new_enough(version: &str, wanted: &str) -> bool {
    let numbers = |text: &str| {
        let digits = text.trim_start_matches("go").split('-').next().unwrap_or_default();
        digits.split('.').map(|part| part.parse().ok()).collect::<Option<Vec<u32>>>()
    };
    match (numbers(version), numbers(wanted)) {
        (Some(version), Some(wanted)) => version >= wanted,
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::is_new_enough;

    #[test]
    fn compares_versions_of_go_by_their_numbers() {
        for (version, expected) in [
            ("go1.19.8", false),
            ("go1.9", false),
            ("go1.26.0", true),
            ("go1.26.8-X:nodwarf5", true),
            ("go1.100", true),
            ("go2.0", true),
            ("devel go1.27-abc", true),
        ] {
            assert_eq!(is_new_enough(version, "1.26.0"), expected, "{version}");
        }
    }
}
