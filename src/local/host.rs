//! What this computer must have: programs, firmware, free ports. What is missing is an error that says what to install.

use std::{
    fs, io,
    net::{SocketAddr, TcpListener, UdpSocket},
};

use super::plan::LocalPlan;
use crate::{
    api::Firmware,
    runner::{Programs, prepare, programs::find},
    runner_config::{Forward, NetworkSection, Protocol},
};

/// What is missing or in use.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A program or firmware is not installed.
    #[error("{what} is not installed: {how}")]
    Missing {
        /// What.
        what: String,
        /// How to install it.
        how: String,
    },
    /// A port can't be used.
    #[error("--publish: the port {0} of this computer can't be used")]
    Port(String, #[source] io::Error),
}

/// A program, with its packages in Debian, Fedora, Arch and Alpine.
struct Package {
    debian: &'static str,
    fedora: &'static str,
    arch: &'static str,
    alpine: &'static str,
}

const QEMU: Package = Package {
    debian: "qemu-system-x86",
    fedora: "qemu-system-x86",
    arch: "qemu-system-x86",
    alpine: "qemu-system-x86_64",
};
const QEMU_IMG: Package = Package { debian: "qemu-utils", fedora: "qemu-img", arch: "qemu-img", alpine: "qemu-img" };
const SWTPM: Package = Package { debian: "swtpm", fedora: "swtpm", arch: "swtpm", alpine: "swtpm" };
const CURL: Package = Package { debian: "curl", fedora: "curl", arch: "curl", alpine: "curl" };
const OVMF: Package = Package { debian: "ovmf", fedora: "edk2-ovmf", arch: "edk2-ovmf", alpine: "ovmf" };

/// The program with which images are examined and made.
pub const IMAGE_TOOL: &str = "qemu-img";
/// The program with which images are downloaded.
pub use crate::runner::cd::CURL as DOWNLOADER;

/// Checks that everything is there that the VM needs.
///
/// # Errors
/// The first that is missing.
pub fn check(plan: &LocalPlan, programs: &Programs, downloads: bool) -> Result<(), Error> {
    let os_release = fs::read_to_string("/etc/os-release").unwrap_or_default();
    let vm = &plan.config.vm;
    let needed = [
        (programs.qemu.as_str(), QEMU, true),
        (programs.swtpm.as_str(), SWTPM, vm.use_tpm),
        (IMAGE_TOOL, QEMU_IMG, plan.overlay.is_some()),
        (DOWNLOADER, CURL, downloads),
    ];
    for (program, package, is_needed) in needed {
        if is_needed && find(program).is_none() {
            return Err(Error::Missing { what: format!("the program {program}"), how: install(&package, &os_release) });
        }
    }
    if !prepare::has_firmware(vm.firmware) {
        let kind = serde_json::to_value(vm.firmware).unwrap_or_default();
        let what = format!("the firmware {}", kind.as_str().unwrap_or_default());
        let instead = if vm.firmware == Firmware::Uefi { ", or start with --set spec.vm.firmware=bios" } else { "" };
        return Err(Error::Missing { what, how: install(&OVMF, &os_release) + instead });
    }
    for network in &vm.network {
        if let NetworkSection::User { forwards, .. } = network {
            forwards.iter().try_for_each(check_port)?;
        }
    }
    Ok(())
}

/// Whether QEMU could listen on the port.
fn check_port(forward: &Forward) -> Result<(), Error> {
    let address = SocketAddr::from((forward.address, forward.port));
    let outcome = match forward.protocol {
        Protocol::Tcp => TcpListener::bind(address).map(drop),
        Protocol::Udp => UdpSocket::bind(address).map(drop),
    };
    outcome.map_err(|error| Error::Port(address.to_string(), error))
}

/// How to install a package on the system with this `os-release` (<https://www.freedesktop.org/software/systemd/man/os-release.html>).
fn install(package: &Package, os_release: &str) -> String {
    let Package { debian, fedora, arch, alpine } = package;
    let systems = [
        ("debian", format!("apt install {debian}")),
        ("ubuntu", format!("apt install {debian}")),
        ("fedora", format!("dnf install {fedora}")),
        ("rhel", format!("dnf install {fedora}")),
        ("arch", format!("pacman -S {arch}")),
        ("alpine", format!("apk add {alpine}")),
    ];
    let values = os_release.lines().filter_map(|line| line.strip_prefix("ID=").or(line.strip_prefix("ID_LIKE=")));
    let names: Vec<&str> = values.flat_map(|value| value.trim_matches(['"', '\'']).split(' ')).collect();
    match systems.iter().find(|(name, _)| names.contains(name)) {
        Some((_, command)) => command.clone(),
        None => format!("its package is {debian} in Debian, {fedora} in Fedora, {arch} in Arch and {alpine} in Alpine"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_the_package_of_the_system() {
        for (os_release, expected) in [
            ("PRETTY_NAME=x\nID=debian\n", "apt install qemu-utils"),
            ("ID=linuxmint\nID_LIKE=\"ubuntu debian\"\n", "apt install qemu-utils"),
            ("ID=\"rocky\"\nID_LIKE=\"rhel centos fedora\"", "dnf install qemu-img"),
            ("ID=arch", "pacman -S qemu-img"),
            ("ID=alpine", "apk add qemu-img"),
            (
                "ID=nixos",
                "its package is qemu-utils in Debian, qemu-img in Fedora, qemu-img in Arch and qemu-img in Alpine",
            ),
        ] {
            assert_eq!(install(&QEMU_IMG, os_release), expected, "{os_release}");
        }
    }

    #[test]
    fn a_port_in_use_is_named() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let SocketAddr::V4(address) = listener.local_addr().unwrap() else { unreachable!() };
        let forward = Forward { protocol: Protocol::Tcp, address: *address.ip(), port: address.port(), guest_port: 22 };
        let error = check_port(&forward).unwrap_err().to_string();
        assert!(error.contains(&address.to_string()), "{error}");
    }
}
