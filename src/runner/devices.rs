//! What of the guest's devices does not work. Pure.

use serde_json::Value;

use super::state::Helper;
use crate::{api::Reason, render::command_line::DeviceId, runner_config::VmSection};

/// A device that does not work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Problem {
    /// A disk cannot be written, so QEMU has stopped the guest.
    Disk {
        /// The disk. `None`: one of a custom QEMU template.
        device: Option<DeviceId>,
        /// The disk's name, or the path of its file.
        name: String,
        /// Whether there is no space left. Otherwise it is another error.
        is_full: bool,
    },
    /// A program that QEMU is connected to has ended.
    Helper(Helper),
}

impl Problem {
    /// Whether it is about this device. `is_of_pod`: the device is a network card of type pod.
    pub fn is_of(&self, id: DeviceId, is_of_pod: bool) -> bool {
        match self {
            Self::Disk { device, .. } => *device == Some(id),
            Self::Helper(Helper::PodNetwork | Helper::PodContainer) => is_of_pod,
            Self::Helper(Helper::Tpm) => false,
        }
    }

    /// The reason of the condition.
    pub fn reason(&self) -> Reason {
        match self {
            Self::Disk { is_full: true, .. } => Reason::StorageFull,
            Self::Disk { is_full: false, .. } => Reason::StorageFailed,
            Self::Helper(Helper::Tpm) => Reason::TpmLost,
            Self::Helper(Helper::PodNetwork | Helper::PodContainer) => Reason::NetworkLost,
        }
    }

    /// What is wrong, and what to do.
    pub fn message(&self) -> String {
        match self {
            Self::Disk { device: _, name, is_full: true } => format!(
                "The storage of the disk {name} is full, so QEMU has stopped the guest before it loses data. Make space there, or let it \
                 grow; the guest goes on by itself then."
            ),
            Self::Disk { device: _, name, is_full: false } => format!(
                "The storage of the disk {name} has an error, so QEMU has stopped the guest before it loses data. Mend the storage; the \
                 guest goes on by itself then."
            ),
            Self::Helper(Helper::Tpm) => {
                "The guest has no TPM any more, because the program that emulates it has ended. What the TPM had \
                 stored is kept. Restart the VM."
                    .into()
            }
            Self::Helper(Helper::PodNetwork) => {
                "The guest has lost its network of type pod, because the program passt has ended. Restart \
                 the VM."
                    .into()
            }
            Self::Helper(Helper::PodContainer) => {
                "The guest has no network of type pod now, because the program passt has ended. The network comes back by itself when \
                 passt runs again; the log of the Pod's container passt says why it has ended."
                    .into()
            }
        }
    }
}

/// The disks that have stopped the guest, from an answer of `query-block`. QEMU keeps a disk's error until the guest is continued.
pub fn failed_disks(blocks: &Value, vm: &VmSection) -> Vec<Problem> {
    let problem = |block: &Value| {
        let is_full = match block["io-status"].as_str()? {
            "nospace" => true,
            "failed" => false,
            _ => return None,
        };
        let path = block["qdev"].as_str()?;
        let device = DeviceId::at(path);
        let name = match device {
            Some(DeviceId::Disk(slot)) => disk_name(slot, vm),
            Some(DeviceId::Cd(_) | DeviceId::Network(_)) | None => None,
        };
        let name = name.unwrap_or_else(|| path.to_owned());
        Some(Problem::Disk { device, name, is_full })
    };
    blocks.as_array().into_iter().flatten().filter_map(problem).collect()
}

/// The name of the disk with this slot as people know it: that of the Pod's volume, or the path of a file elsewhere.
fn disk_name(slot: u32, vm: &VmSection) -> Option<String> {
    let (_, disk) = vm.disks().find(|(of_disk, _)| *of_disk == slot)?;
    disk.volume().or(disk.resource()).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_disks_that_have_stopped_the_guest_have_the_names_that_people_know() {
        let vm: VmSection = serde_json::from_value(json!({ "name": "apple", "drives": [
            { "type": "raw", "resource": "/dev/system-disk" },
            { "type": "ide-cd", "file": "" },
            { "type": "raw", "resource": "/var/local/vm-disks/data-disk/disk.img" },
            { "type": "qcow2", "resource": "/home/alice/more.qcow2" },
        ] }))
        .unwrap();
        let blocks = |statuses: [&str; 4]| {
            json!([
                { "qdev": "/machine/peripheral/disk0/virtio-backend", "io-status": statuses[0] },
                { "qdev": "cd0", "io-status": "ok" },
                { "qdev": "/machine/peripheral/disk1/virtio-backend", "io-status": statuses[1] },
                { "qdev": "disk2", "io-status": statuses[2] },
                { "qdev": "mine", "io-status": statuses[3] },
                { "device": "without a status" },
            ])
        };
        let failed = |statuses| {
            let problems = failed_disks(&blocks(statuses), &vm);
            let text = |problem| match problem {
                Problem::Disk { device: _, name, is_full } => format!("{name}{}", if is_full { " full" } else { "" }),
                Problem::Helper(helper) => panic!("{helper:?}"),
            };
            problems.into_iter().map(text).collect::<Vec<_>>().join(", ")
        };
        assert_eq!(failed(["ok", "ok", "ok", "ok"]), "");
        assert_eq!(failed(["failed", "nospace", "ok", "ok"]), "system-disk, data-disk full");
        assert_eq!(failed(["ok", "ok", "nospace", "nospace"]), "/home/alice/more.qcow2 full, mine full");
    }
}
