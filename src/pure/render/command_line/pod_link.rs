//! How QEMU reaches the program that connects a network of type pod.

use std::path::{Path, PathBuf};

use crate::runner_config::{NetworkSection, VmSection};

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
