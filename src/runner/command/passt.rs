//! The command line of passt, and how QEMU reaches it. Pure.

use std::path::{Path, PathBuf};

use crate::runner_config::{NetworkSection, VmSection};

/// The number of open files that passt needs for itself and for connections.
const PASST_FILES: u64 = 1000;

/// The last port that passt can forward to the guest, at most `desired`. passt needs two open files for each port, and it does not
/// start if it cannot open all of them. `open_files` is the limit of open files; `None`: there is no limit.
pub fn last_port(desired: u16, open_files: Option<u64>) -> u16 {
    let possible = open_files.map_or(u64::MAX, |limit| limit.saturating_sub(PASST_FILES) / 2);
    desired.min(u16::try_from(possible).unwrap_or(u16::MAX)).max(1)
}

/// A user and a group, as numbers.
#[derive(Clone, Copy, Debug)]
pub struct UserAndGroup {
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
}

/// How QEMU reaches passt: the protocol, and the path of passt's socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PodLink {
    /// Packets go through the socket.
    Stream(PathBuf),
    /// passt reads and writes packets in the guest's memory.
    VhostUser(PathBuf),
}

impl PodLink {
    /// The path of the socket.
    pub fn socket(&self) -> &Path {
        match self {
            Self::Stream(socket) | Self::VhostUser(socket) => socket,
        }
    }
}

/// Whether the VM has a network of type pod.
pub fn has_pod_network(vm: &VmSection) -> bool {
    vm.network.iter().any(|network| matches!(network, NetworkSection::Pod { .. }))
}

/// The ports on which QEMU itself listens.
pub fn own_ports(vm: &VmSection) -> Vec<u16> {
    let display = &vm.display;
    let ports = display.spice.iter().map(|spice| spice.port).chain(display.vnc.iter().map(|vnc| vnc.port));
    ports.filter(|port| *port != 0).collect()
}

/// The arguments of passt (passt(1)). passt gives the guest the Pod's own address, and forwards connections to the ports from 1 to
/// `last_port` to the guest, but not those to the ports `kept`. With `one_off` it ends when QEMU closes the connection. `run_as` is the user
/// that passt runs as.
pub fn passt(kept: &[u16], last_port: u16, run_as: UserAndGroup, link: &PodLink, one_off: bool) -> Vec<String> {
    let ports = kept.iter().fold(format!("1-{last_port}"), |ports, port| format!("{ports},~{port}"));
    let protocol = match link {
        PodLink::Stream(_) => None,
        PodLink::VhostUser(_) => Some("--vhost-user"),
    };
    let words = [Some("--foreground"), one_off.then_some("--one-off"), protocol, Some("--quiet")];
    let mut arguments: Vec<String> = words.into_iter().flatten().map(str::to_owned).collect();
    arguments.extend([
        // As root, passt would become the user nobody by default, for which it needs capabilities. It drops all rights in any case.
        "--runas".into(),
        format!("{}:{}", run_as.uid, run_as.gid),
        "--socket".into(),
        link.socket().display().to_string(),
        // By default passt would forward the guest's connections to its gateway to programs that listen on localhost in the Pod.
        "--no-map-gw".into(),
        "--tcp-ports".into(),
        ports.clone(),
        "--udp-ports".into(),
        ports,
    ]);
    arguments
}
