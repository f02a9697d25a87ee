//! What QEMU and passt say when they can't work, in their own words: they say it in no other way. This is the only place that reads them.

/// A well-known message of QEMU or passt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// A part of the message.
    says: &'static str,
    /// What the runner adds to the message, on a line of its own. Empty if the message says enough.
    pub hint: &'static str,
    /// The field of the VM that is to blame.
    pub field: Option<&'static str>,
    /// What a person can do.
    pub what_to_do: &'static str,
}

impl Fault {
    const fn new(says: &'static str, hint: &'static str) -> Self {
        Self { says, hint, field: None, what_to_do: "mend what it names" }
    }

    const fn of(self, field: &'static str, what_to_do: &'static str) -> Self {
        Self { field: Some(field), what_to_do, ..self }
    }
}

/// What to do if passt fails.
const UNCONFINED: &str = "\na pod network needs seccomp and AppArmor profiles that let passt isolate itself (see passt in the manager's configuration), and a node that lets users make user namespaces";

const FAULTS: [Fault; 12] = [
    Fault::new(
        "block-curl not found",
        "\na CD image from a URL needs the package qemu-block-extra in the runner's image",
    ),
    Fault::new(
        "no option group 'spice'",
        "\nthis QEMU has no SPICE: install qemu-system-modules-spice, or use display.vnc",
    ),
    Fault::new(
        "-spice: invalid option",
        "\nthis QEMU has no SPICE: install qemu-system-modules-spice, or use display.vnc",
    ),
    Fault::new(
        "unsupported machine type",
        "\nthis runner's QEMU does not have the VM's machine type: use a runner image with a QEMU at least as new as the one that the VM was created with",
    ),
    Fault {
        what_to_do: "another process has the disk open: end it",
        ..Fault::new("Failed to get \"write\" lock", "\nanother process uses the disk; a VM must run only once")
    },
    Fault::new(
        "bridge helper failed",
        "\nthe Pod needs hostNetwork, CAP_NET_ADMIN, /dev/net/tun, and the bridge in /etc/opt/vmrunner/bridge.conf, which the VM's ConfigMap has",
    )
    .of("spec.vm.networks", "correct spec.vm.networks"),
    Fault::new("user namespace", UNCONFINED),
    Fault::new("Failed to sandbox process", UNCONFINED),
    Fault::new("unable to find CPU model", "").of("spec.vm.cpuModel", "correct spec.vm.cpuModel"),
    Fault::new("phys-bits", "").of("spec.vm.maximumRam", "correct spec.vm.maximumRam"),
    Fault::new(
        "cannot set up guest memory",
        "\nthe node or the container does not have enough memory for vm.maximumRam",
    )
    .of("spec.vm.maximumRam", "correct spec.vm.maximumRam"),
    Fault::new(
        "Cannot allocate memory",
        "\nthe node or the container does not have enough memory for vm.maximumRam",
    ),
];

/// The fault that a message is about, if it is well known.
pub fn fault(message: &str) -> Option<&'static Fault> {
    FAULTS.iter().find(|fault| message.contains(fault.says))
}
