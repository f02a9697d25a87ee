//! How the guest's devices are arranged: what a guest must find unchanged at each start. Pure.

use std::collections::BTreeSet;

use serde::Serialize;
use serde_json::json;

use crate::{api::network::MOST_NETWORKS, runner_config::VmSection};

/// The first PCI slot of the ports for devices that are plugged while the guest runs.
const ROOT_PORT_SLOT: usize = 0x15;
/// The most queues of a disk. Linux uses one for each CPU.
const MOST_QUEUES: u32 = 16;
/// The most threads of QEMU that serve the disks of a VM.
const IO_THREADS: usize = 4;
/// The first PCI slot of networks.
const NETWORK_SLOT: usize = 0x10;
/// The first PCI slot of disks.
const DISK_SLOT: usize = 0x8;
/// The number of the first filler among the guest's slots, behind those of all root ports.
const FILLER_NUMBER: usize = 101;
/// The same for disks, behind those of networks.
const DISK_FILLER_NUMBER: usize = FILLER_NUMBER + MOST_NETWORKS as usize;
/// Linux reserves 64 MB for devices that reach only the first 4 GiB if memory can be plugged above them. A guest with at least 3 GiB does so
/// anyway, because q35 puts a part of its memory there.
const MEMORY_SLOTS_FROM: u64 = 3 << 30;
/// QEMU does not start if the limit is more than the CPU can address, which is 512 GiB for the smallest CPUs with KVM.
const MEMORY_SLOTS_TO: u64 = 128 << 30;
/// The first PCI slot of networks and disks in [`Hardware::Legacy`].
const LEGACY_SLOT: usize = 7;

/// How the guest's devices are arranged, which a guest must find unchanged at each start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hardware {
    /// As [`Hardware::RootPorts`], with disks that have a queue for each CPU and their names as serial numbers, twice as many ports, an ID of
    /// the VM's generation, and memory that has the same name in QEMU in each VM.
    MultiQueue,
    /// As [`Hardware::Standard`], with ports into which devices can be plugged while the guest runs. PCI Express allows that nowhere else, and
    /// a guest that starts without ports never gets them: they would be new hardware for it.
    RootPorts,
    /// Every kind of device has slots of its own, so that a new disk moves no network card.
    Standard,
    /// As the runner of the VM-Operator in Java arranges them: each device takes the next free PCI slot, first the networks and then the
    /// disks; networks have QEMU's default MAC addresses; the TPM has the interface TIS.
    Legacy,
}

impl Hardware {
    /// What a new VM gets, and one that asks for the newest arrangement.
    pub const NEWEST: Self = Self::MultiQueue;

    /// The name in the data directory and in the VM's status.
    pub fn name(self) -> &'static str {
        match self {
            Self::MultiQueue => "multi-queue",
            Self::RootPorts => "root-ports",
            Self::Standard => "standard",
            Self::Legacy => "legacy",
        }
    }

    /// The arrangement with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::MultiQueue, Self::RootPorts, Self::Standard, Self::Legacy].into_iter().find(|it| it.name() == name)
    }

    /// The number of ports into which devices can be plugged.
    fn root_ports(self) -> usize {
        match self {
            Self::MultiQueue => 16,
            Self::RootPorts => 8,
            Self::Standard | Self::Legacy => 0,
        }
    }

    /// Whether the guest has what only [`Hardware::MultiQueue`] gives it.
    pub fn is_multi_queue(self) -> bool {
        match self {
            Self::MultiQueue => true,
            Self::RootPorts | Self::Standard | Self::Legacy => false,
        }
    }

    /// The number of queues of each disk, if it is not QEMU's choice, which follows from the CPUs with which QEMU starts: one.
    pub(super) fn disk_queues(self, cpus: u32) -> Option<u32> {
        self.is_multi_queue().then_some(cpus.clamp(1, MOST_QUEUES))
    }

    /// The threads of QEMU that serve that many disks. The guest does not notice them.
    pub(super) fn io_threads(self, disks: usize) -> Vec<String> {
        match self {
            Self::MultiQueue => (0..disks.clamp(1, IO_THREADS)).map(|number| format!("io{number}")).collect(),
            Self::RootPorts | Self::Standard | Self::Legacy => vec!["io".into()],
        }
    }
}

/// The PCI addresses of the devices that a VM has at most once.
#[derive(Debug, Serialize)]
pub(super) struct Slots {
    video: String,
    usb: String,
    ports: String,
    balloon: String,
    entropy: String,
    sound: String,
    cloud_init: String,
}

impl Slots {
    pub(super) fn of(hardware: Hardware, networks: usize, disks: usize) -> Self {
        let [video, usb, ports, balloon, entropy, sound, cloud_init] = match hardware {
            Hardware::MultiQueue | Hardware::RootPorts | Hardware::Standard => [1, 2, 3, 4, 5, 6, 0x14],
            Hardware::Legacy => {
                // QEMU gave a VM without networks a network card in slot 1.
                let [video, usb, ports, balloon, entropy, sound] =
                    [5, 3, 2, 1, 4, 6].map(|slot| slot + usize::from(networks == 0));
                [video, usb, ports, balloon, entropy, sound, legacy_disk_slot(networks, disks)]
            }
        }
        .map(|slot| format!("{slot:x}.0"));
        Self { video, usb, ports, balloon, entropy, sound, cloud_init }
    }
}

/// A port into which a device can be plugged while the guest runs.
#[derive(Debug, Serialize)]
pub(super) struct RootPort {
    pub(super) id: String,
    /// Its number among the guest's slots, from 1.
    number: usize,
    address: String,
    /// The bytes of I/O ports that the firmware keeps free for the device in it. `None`: as many as it likes, which are 4096, and more than ten times
    /// that there are not. The devices that can be plugged need none.
    io_reserve: Option<u32>,
}

impl RootPort {
    /// The arguments that make it.
    pub(super) fn arguments(&self) -> [String; 2] {
        let Self { id, number, address, io_reserve: _ } = self;
        let device = json!({
            "driver": "pcie-root-port", "id": id, "bus": "pcie.0", "addr": address, "multifunction": true, "chassis": number, "slot": number,
        });
        ["-device".to_owned(), device.to_string()]
    }
}

pub(super) fn root_ports(hardware: Hardware) -> Vec<RootPort> {
    let port = |index: usize| RootPort {
        id: format!("root-port{index}"),
        number: index + 1,
        address: address(ROOT_PORT_SLOT, index),
        io_reserve: hardware.is_multi_queue().then_some(0),
    };
    (0..hardware.root_ports()).map(port).collect()
}

/// In each PCI slot in which networks or disks have functions, but not the first one, a port without a device has it: guests look for further functions
/// only where there is a first. They are no part of the template, so that a VM with a template of an earlier release has them, too.
pub(super) fn fillers(vm: &VmSection) -> Vec<RootPort> {
    let filler = |id: String, number: usize, first: usize, slot: usize| RootPort {
        id,
        number: number + slot,
        address: address(first, slot),
        io_reserve: None,
    };
    let networks = without_first(vm.network_slots());
    let networks = networks.into_iter().map(|slot| filler(format!("filler{slot}"), FILLER_NUMBER, NETWORK_SLOT, slot));
    let disks = without_first(vm.disks().map(|(slot, _)| slot));
    let disks = disks.into_iter().map(|slot| filler(format!("disk-filler{slot}"), DISK_FILLER_NUMBER, DISK_SLOT, slot));
    networks.chain(disks).collect()
}

/// The first slots of the groups of eight in which there are others, and not the first.
fn without_first(slots: impl Iterator<Item = u32>) -> BTreeSet<usize> {
    let used: BTreeSet<u32> = slots.collect();
    let firsts = used.iter().map(|slot| slot / 8 * 8).filter(|first| !used.contains(first));
    firsts.map(|first| first as usize).collect()
}

/// Twice the memory, if the VM has at least [`MEMORY_SLOTS_FROM`] and at most [`MEMORY_SLOTS_TO`] bytes.
pub(super) fn memory_limit(hardware: Hardware, memory: u64) -> Option<u64> {
    (hardware.root_ports() > 0 && (MEMORY_SLOTS_FROM..=MEMORY_SLOTS_TO).contains(&memory)).then_some(2 * memory)
}

/// The PCI addresses of networks and disks.
#[derive(Clone, Copy)]
pub(super) struct Addresses {
    pub(super) hardware: Hardware,
    pub(super) networks: usize,
}

impl Addresses {
    pub(super) fn network(self, index: usize) -> String {
        match self.hardware {
            Hardware::MultiQueue | Hardware::RootPorts | Hardware::Standard => address(NETWORK_SLOT, index),
            Hardware::Legacy => format!("{:x}.0", LEGACY_SLOT + index),
        }
    }

    pub(super) fn disk(self, index: usize) -> String {
        match self.hardware {
            Hardware::MultiQueue | Hardware::RootPorts | Hardware::Standard => address(DISK_SLOT, index),
            Hardware::Legacy => format!("{:x}.0", legacy_disk_slot(self.networks, index)),
        }
    }
}

/// The slot of a disk in [`Hardware::Legacy`]: after the networks, or after the card that a VM without networks had.
fn legacy_disk_slot(networks: usize, index: usize) -> usize {
    LEGACY_SLOT + networks.max(1) + index
}

/// The PCI address on the root bus of the device with this index: eight functions in each slot, starting at slot `first`.
fn address(first: usize, index: usize) -> String {
    format!("{:x}.{}", first + index / 8, index % 8)
}
