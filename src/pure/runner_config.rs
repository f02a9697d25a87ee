//! The configuration that the manager writes for the runner: the file `config.yaml`, and the paths in the Pod that both use.
//!
//! The types are plain data. The manager writes the file with them, the runner reads it; a person can write the file by hand
//! to run a VM without a cluster. Only `namespace` and `vm.name` have no default. The format is that of earlier runners
//! (section `/Runner`); fields that earlier runners do not have are optional.
//!
//! Sizes are quantities such as `4Gi`, `4 GiB`, `512M` or a number of bytes.

pub mod at_start;
pub mod faults;

use std::{collections::BTreeMap, fmt, net::Ipv4Addr};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::api::{Accelerator, Clipboard, Firmware, OnPanic, Quantity, Watchdog};

/// Paths in the runner's container, and the names of files there.
pub mod paths {
    /// The directory of the projected configuration: `config.yaml`, `logging.properties`, [`PASSWORD_FILE`], [`EXPIRY_FILE`],
    /// [`CLOUD_INIT_DIR`].
    pub const CONFIG_DIR: &str = "/etc/opt/vmrunner";
    /// The file with the display's password, and the key in a display Secret. Empty or missing: the display has no password.
    pub const PASSWORD_FILE: &str = "display-password";
    /// The file with the time when the password expires, and the key in a display Secret: `never`, `now`, `+N` (N seconds from the
    /// moment when the runner sets the password), or Unix time in seconds. Empty or missing: never.
    pub const EXPIRY_FILE: &str = "password-expiry";
    /// The file with the runner's configuration ([`ConfigFile`](super::ConfigFile)).
    pub const CONFIG_FILE: &str = "config.yaml";
    /// The file with the QEMU templates of the VM's set ([`QemuFile`](crate::render::command_line::QemuFile)). Missing: the set has none.
    pub const QEMU_FILE: &str = "qemu.yaml";
    /// The value of [`EXPIRY_FILE`] for a password that does not expire.
    pub const NEVER: &str = "never";
    /// The directory of the cloud-init files `meta-data`, `user-data`, `vendor-data` and `network-config`, in [`CONFIG_DIR`].
    pub const CLOUD_INIT_DIR: &str = "cloud-init";
    /// The volume for the VM's own data: firmware variables, TPM state, UUID, machine type, the copy of the QEMU template.
    pub const DATA_DIR: &str = "/var/local/vm-data";
    /// The directory of sockets and state files, which both roles of the runner use. It is deleted with the Pod.
    pub const RUNTIME_DIR: &str = "/run/vm-runner";
    /// The volume with CD images, mounted read-only.
    pub const IMAGE_REPOSITORY: &str = "/var/local/vmop-image-repository";
    /// The directory where claims with a file system are mounted. A disk is the file `disk.img` in a subdirectory with the disk's name.
    pub const DISK_DIR: &str = "/var/local/vm-disks";
    /// The directory of the socket of passt, which the container passt shares with the runner's.
    pub const PASST_DIR: &str = "/run/vm-passt";
    /// The folder of the agent's container with the certificate and the token of the relay.
    pub const RELAY_DIR: &str = "/run/secrets/vm-relay";
}

/// The file `config.yaml`.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
pub struct ConfigFile {
    /// The runner's section. The runner ignores other sections.
    #[serde(rename = "/Runner")]
    pub runner: RunnerConfig,
}

impl ConfigFile {
    /// The digest of the file's text. With it the runner says which configuration it has read.
    pub fn digest(text: &str) -> String {
        digest(text, 16)
    }
}

/// The section `/Runner`.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct RunnerConfig {
    /// The directory of the VM's own data, which must survive restarts. Default: [`paths::DATA_DIR`].
    #[serde(default = "data_dir")]
    pub data_dir: String,
    /// The directory of sockets and state files; its path has at most 80 bytes. Default: [`paths::RUNTIME_DIR`].
    #[serde(default = "runtime_dir")]
    pub runtime_dir: String,
    /// The name of a QEMU template in the runner's image. Default: `standard.yaml.j2`, which is built in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template: Option<String>,
    /// false: the VM keeps the QEMU template of its first start, as a copy in the data directory. Default: true.
    #[serde(default = "yes")]
    pub update_template: bool,
    /// The digest of the QEMU templates of the VM's set, which are in [`paths::QEMU_FILE`]: with them this file changes, so that whoever
    /// reads it again reads them again. Default: none, the set has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub qemu_templates: Option<String>,
    /// The VM's namespace. Without a cluster it is only a name for the log.
    pub namespace: String,
    /// The UID of the VirtualMachine. If it changes while the VM runs, the runner reports the whole status again, because the
    /// VirtualMachine was deleted and created again. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resource_uid: Option<String>,
    /// true: the VM stays down after the guest has shut itself down. false: the runner ends, so that the kubelet starts the VM again.
    /// Default: false.
    #[serde(default)]
    pub guest_shutdown_stops: bool,
    /// When this number grows, the agent resets the VM. Default: 0.
    #[serde(default)]
    pub reset_counter: u64,
    /// When this number grows, the agent asks the guest to reboot. Default: 0.
    #[serde(default, skip_serializing_if = "is_default")]
    pub reboot_counter: u64,
    /// Whether the guest is paused. Default: false.
    #[serde(default, skip_serializing_if = "is_default")]
    pub paused: bool,
    /// The cloud-init data. Files in [`paths::CLOUD_INIT_DIR`] have precedence. Default: none, and without files no cloud-init disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cloud_init: Option<CloudInitSection>,
    /// Folders of which CDs may be, beside [`paths::IMAGE_REPOSITORY`]. Default: none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cd_folders: Vec<String>,
    /// The VM's hardware.
    pub vm: VmSection,
}

/// The cloud-init data (NoCloud).
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct CloudInitSection {
    /// `meta-data`. Default: `instance-id` and `local-hostname` are the VM's name.
    #[serde(default)]
    pub meta_data: BTreeMap<String, Value>,
    /// `user-data`: a text, or the content of a cloud-config. The manager leaves it out, because it may contain passwords; the file has
    /// it. Default: an empty cloud-config.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub user_data: Value,
    /// `vendor-data`, in the forms of `user-data`. The manager leaves it out, as that. Default: none.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub vendor_data: Value,
    /// `network-config`. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network_config: Option<Value>,
}

/// The VM's hardware.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct VmSection {
    /// The VM's name.
    pub name: String,
    /// The VM's UUID. Default: generated at the first start and kept in the data directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// QEMU's machine type with its version, such as `pc-q35-7.2`. Default: QEMU's newest `pc-q35` at the first start, kept in the
    /// data directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine_type: Option<String>,
    /// How the devices are arranged: `multi-queue`, `root-ports`, `standard` or `legacy`; `latest`: the first of these, from this start on. Default:
    /// the first of these at the first start, kept in the data directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hardware: Option<String>,
    /// Whether the VM has a TPM 2.0. Default: false.
    #[serde(default)]
    pub use_tpm: bool,
    /// The firmware. Default: `uefi`.
    #[serde(default)]
    pub firmware: Firmware,
    /// Whether the firmware shows a boot menu for 5 s. Default: false.
    #[serde(default)]
    pub boot_menu: bool,
    /// The time in seconds that the guest has to power down. After that the runner ends QEMU. Default: 900.
    #[serde(default = "default_powerdown_timeout")]
    pub powerdown_timeout: u64,
    /// QEMU's CPU model. `host` is the node's CPU with KVM, and `max` with TCG. Default: `host`.
    #[serde(default = "host")]
    pub cpu_model: String,
    /// The number of CPUs that the running VM can get at most. Default: 1.
    #[serde(default = "one")]
    pub maximum_cpus: u32,
    /// The number of sockets. 0: QEMU calculates it. Default: 0.
    #[serde(default)]
    pub sockets: u32,
    /// The number of dies in a socket. 0: QEMU calculates it. Default: 0.
    #[serde(default)]
    pub dies_per_socket: u32,
    /// The number of cores on a die. 0: QEMU calculates it. Default: 0.
    #[serde(default)]
    pub cores_per_die: u32,
    /// The number of threads of a core. 0: QEMU calculates it. Default: 0.
    #[serde(default)]
    pub threads_per_core: u32,
    /// The number of CPUs now, between 1 and `maximumCpus`. It can change while the VM runs. Default: 1.
    #[serde(default = "one")]
    pub current_cpus: u32,
    /// The memory that the running VM can get at most. Default: 1 GB (10⁹ bytes).
    #[serde(default = "one_gigabyte")]
    pub maximum_ram: Quantity,
    /// The memory now, at most `maximumRam`. It can change while the VM runs. Default: `maximumRam`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub current_ram: Option<Quantity>,
    /// The accelerator: `auto`, `kvm` or `tcg`. Default: `auto`.
    #[serde(default)]
    pub accelerator: Accelerator,
    /// The base of the real-time clock, as in QEMU's option `-rtc`: `utc`, `localtime` or a time. Default: `utc`.
    #[serde(default = "utc")]
    pub rtc_base: String,
    /// The time zone whose time the clock has with `localtime`, such as `Europe/Berlin`. Default: UTC.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rtc_timezone: Option<String>,
    /// The clock that drives the real-time clock, as in QEMU's option `-rtc`: `host`, `rt` or `vm`. Default: `rt`.
    #[serde(default = "rt")]
    pub rtc_clock: String,
    /// What is done when the guest panics, or its watchdog is not fed in time. Default: there is neither a panic device nor a watchdog.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_panic: Option<OnPanic>,
    /// The watchdog, if another one than that of `on_panic`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub watchdog: Option<Watchdog>,
    /// The network interfaces. Default: none.
    #[serde(default)]
    pub network: Vec<NetworkSection>,
    /// The drives, in the order of the VM's `disks`. Default: none.
    #[serde(default)]
    pub drives: Vec<Drive>,
    /// The display. Default: none.
    #[serde(default)]
    pub display: DisplaySection,
}

impl VmSection {
    /// The slots of the network interfaces, in their order.
    pub fn network_slots(&self) -> impl Iterator<Item = u32> {
        self.network.iter().enumerate().map(|(index, network)| network.slot(index))
    }

    /// The disks in their order, each with its slot.
    pub fn disks(&self) -> impl Iterator<Item = (u32, &Drive)> {
        with_slots(self.drives.iter().filter(|drive| drive.cd().is_none()))
    }

    /// The CD drives in their order, each with its slot.
    pub fn cds(&self) -> impl Iterator<Item = (u32, &Drive)> {
        with_slots(self.drives.iter().filter(|drive| drive.cd().is_some()))
    }
}

/// A network interface. Its `type` is `tap`, `user` or `pod`.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum NetworkSection {
    /// An interface on a bridge of the node.
    Tap {
        /// The QEMU device of the network card, such as `virtio-net` or `e1000e`.
        device: String,
        /// The name of the bridge.
        bridge: String,
        /// The MAC address. Default: derived from the VM's UUID and the interface's slot.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        mac: Option<String>,
        /// The name, if the VM's spec gives one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        name: Option<String>,
        /// The slot, which gives the PCI address. Default: the interface's position.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        slot: Option<u32>,
    },
    /// QEMU's user networking. The guest reaches the network through the Pod; nothing can connect to the guest but through `forwards`.
    User {
        /// The QEMU device of the network card, such as `virtio-net` or `e1000e`.
        device: String,
        /// The network that the guest sees, such as `10.0.2.0/24`. Default: QEMU's.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        net: Option<String>,
        /// The MAC address. Default: derived from the VM's UUID and the interface's slot.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        mac: Option<String>,
        /// The name, if the VM's spec gives one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        name: Option<String>,
        /// The slot, which gives the PCI address. Default: the interface's position.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        slot: Option<u32>,
        /// The ports on which QEMU listens and that it forwards to the guest. Default: none.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        forwards: Vec<Forward>,
    },
    /// The Pod's own network, through passt. The guest uses the Pod's address. A VM can have at most one such interface.
    Pod {
        /// The QEMU device of the network card, such as `virtio-net` or `e1000e`.
        device: String,
        /// The MAC address. Default: derived from the VM's UUID and the interface's slot.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        mac: Option<String>,
        /// The name, if the VM's spec gives one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        name: Option<String>,
        /// The slot, which gives the PCI address. Default: the interface's position.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        slot: Option<u32>,
    },
}

/// A port that is forwarded to the guest.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Forward {
    /// The protocol. Default: `tcp`.
    #[serde(default)]
    pub protocol: Protocol,
    /// The IPv4 address on which QEMU listens.
    pub address: Ipv4Addr,
    /// The port on which QEMU listens.
    pub port: u16,
    /// The port in the guest.
    pub guest_port: u16,
}

/// The protocol of a forwarded port.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// TCP.
    #[default]
    Tcp,
    /// UDP.
    Udp,
}

impl fmt::Display for Forward {
    /// As QEMU's option `hostfwd` has it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { protocol, address, port, guest_port } = self;
        let protocol = match protocol {
            Protocol::Tcp => "tcp",
            Protocol::Udp => "udp",
        };
        write!(f, "{protocol}:{address}:{port}-:{guest_port}")
    }
}

impl NetworkSection {
    /// The MAC address in the configuration, if there is one.
    pub fn mac(&self) -> Option<&str> {
        let (Self::Tap { mac, .. } | Self::User { mac, .. } | Self::Pod { mac, .. }) = self;
        mac.as_deref()
    }

    /// Whether passt connects it with the network of the Pod.
    pub const fn is_pod(&self) -> bool {
        matches!(self, Self::Pod { .. })
    }

    /// Sets the MAC address.
    pub fn set_mac(&mut self, address: String) {
        let (Self::Tap { mac, .. } | Self::User { mac, .. } | Self::Pod { mac, .. }) = self;
        *mac = Some(address);
    }

    /// The name, if the VM's spec gives one.
    pub fn name(&self) -> Option<&str> {
        let (Self::Tap { name, .. } | Self::User { name, .. } | Self::Pod { name, .. }) = self;
        name.as_deref()
    }

    /// The slot of the interface that is the `index`th of the configuration.
    pub fn slot(&self, index: usize) -> u32 {
        let (Self::Tap { slot, .. } | Self::User { slot, .. } | Self::Pod { slot, .. }) = self;
        slot.unwrap_or_else(|| u32::try_from(index).unwrap_or(u32::MAX))
    }

    /// Gives the interface that is the `index`th of the configuration a slot. It is written only if it is not that of the position, as in the files of
    /// earlier releases.
    pub fn place(&mut self, index: usize, number: u32) {
        let (Self::Tap { slot, .. } | Self::User { slot, .. } | Self::Pod { slot, .. }) = self;
        *slot = Some(number).filter(|number| usize::try_from(*number) != Ok(index));
    }

    /// Takes the name away, which nothing in the running VM has.
    pub fn forget_name(&mut self) {
        let (Self::Tap { name, .. } | Self::User { name, .. } | Self::Pod { name, .. }) = self;
        *name = None;
    }

    /// A hash of what the interface is, without what belongs to it: by it an interface without a name is found again.
    pub fn parameters(&self) -> String {
        let parts = match self {
            Self::Tap { device, bridge, .. } => ["tap", device, bridge],
            Self::User { device, net, .. } => ["user", device, net.as_deref().unwrap_or_default()],
            Self::Pod { device, .. } => ["pod", device, ""],
        };
        digest(parts.join("\n"), 8)
    }
}

/// A drive. Its `type` is `raw`, `qcow2` or `ide-cd`.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
#[serde(tag = "type", rename_all = "kebab-case")]
pub enum Drive {
    /// A disk: a block device or a file without a format of its own.
    Raw {
        /// The path of the block device (`/dev/NAME-disk`) or of the file.
        resource: String,
        /// The position in the boot order; 0 is first. Default: if no drive has one, the order of the drives; else the drive is
        /// not in the boot order.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        bootindex: Option<u32>,
        /// The size of a file in bytes. At the start the runner creates the file, or enlarges a smaller one, and while the guest runs it
        /// lets QEMU do so. Default: the file or device must exist; a file keeps its size.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        size: Option<u64>,
        /// The serial number that the guest sees. Default: the disk's name in a VM that has started with such names, else none.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        serial: Option<String>,
        /// The slot, which gives the PCI address. Default: the position among the disks.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        slot: Option<u32>,
    },
    /// A disk: a file in QEMU's format qcow2, which may have a backing file.
    Qcow2 {
        /// The path of the file, which must exist.
        resource: String,
        /// As with `raw`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        bootindex: Option<u32>,
        /// As with `raw`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        serial: Option<String>,
        /// As with `raw`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        slot: Option<u32>,
    },
    /// A CD drive.
    IdeCd {
        /// The path or URL (http, https) of the CD image. Empty: no CD. It can change while the VM runs.
        file: String,
        /// The position in the boot order; 0 is first. Default: if no drive has one, the order of the drives; else the drive is
        /// not in the boot order.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        bootindex: Option<u32>,
        /// The name, if the VM's spec gives one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        name: Option<String>,
        /// The slot, which gives the SATA port. Default: the position among the CD drives.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        slot: Option<u32>,
    },
}

/// The display. It has either `spice` or `vnc`, or neither: then the VM has no display.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct DisplaySection {
    /// The number of screens. Default: 1.
    #[serde(default = "one")]
    pub outputs: u32,
    /// The user that the login agent logs in. It can change while the VM runs. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logged_in_user: Option<String>,
    /// SPICE. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spice: Option<SpiceSection>,
    /// VNC. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vnc: Option<VncSection>,
    /// Which viewers share the guest's clipboard. Default: those of SPICE, or, without SPICE, those of VNC.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clipboard: Option<Clipboard>,
}

impl DisplaySection {
    /// The display's protocol, with QEMU's name: `spice` or `vnc`. `None`: the VM has no display.
    pub fn protocol(&self) -> Option<&'static str> {
        self.vnc.as_ref().map(|_| "vnc").or(self.spice.as_ref().map(|_| "spice"))
    }

    /// The protocol of the port that others can connect to, and that a password protects. `None`: nobody outside the Pod reaches the display.
    pub fn open_protocol(&self) -> Option<&'static str> {
        let is_open = self.vnc.is_some() || self.spice.as_ref().is_some_and(|spice| spice.port != 0);
        self.protocol().filter(|_| is_open)
    }
}

/// SPICE.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct SpiceSection {
    /// The TCP port. 0: none, and QEMU listens on a Unix socket in the runtime directory.
    pub port: u16,
    /// The password, which does not expire. The file [`paths::PASSWORD_FILE`] has precedence. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ticket: Option<String>,
    /// QEMU's option `streaming-video`: `off`, `all` or `filter`. Default: QEMU's.
    #[serde(default, rename = "streaming-video", skip_serializing_if = "Option::is_none")]
    pub streaming_video: Option<String>,
    /// The number of USB devices that a viewer can redirect to the guest. Default: 0.
    #[serde(default, rename = "usbRedirects")]
    pub usb_redirects: u32,
    /// The path of a Unix socket on which QEMU listens instead of the port. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub socket: Option<String>,
}

/// VNC.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct VncSection {
    /// The TCP port, from 5900 on.
    pub port: u16,
    /// The path of a Unix socket on which QEMU listens instead of the port. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub socket: Option<String>,
}

/// The value of [`VmSection::hardware`] for the newest arrangement that the runner knows.
pub const LATEST_HARDWARE: &str = "latest";

/// The first `bytes` bytes of a SHA-256 digest, in hexadecimal digits.
pub fn digest(content: impl AsRef<[u8]>, bytes: usize) -> String {
    Sha256::digest(content).iter().take(bytes).map(|byte| format!("{byte:02x}")).collect()
}

/// The text of a projected file, without newlines at the end: editors and `kubectl create secret --from-file` add one. `None` if the text
/// is empty.
pub fn text(content: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(content);
    Some(text.trim_end_matches(['\r', '\n']).to_owned()).filter(|text| !text.is_empty())
}

/// The PCI slots for networks and disks in the hardware of the VM-Operator in Java, from slot 7 on, without that of the cloud-init disk.
pub const LEGACY_PLACES: u32 = 23;

/// The drives of one kind in their order, each with its slot.
fn with_slots<'a>(drives: impl Iterator<Item = &'a Drive>) -> impl Iterator<Item = (u32, &'a Drive)> {
    drives.enumerate().map(|(index, drive)| (drive.slot(index), drive))
}

impl Drive {
    /// The CD, if this is a CD drive; empty: no CD.
    pub fn cd(&self) -> Option<&str> {
        match self {
            Self::IdeCd { file, .. } => Some(file),
            Self::Raw { .. } | Self::Qcow2 { .. } => None,
        }
    }

    /// The path of the disk's device or file, if this is a disk.
    pub fn resource(&self) -> Option<&str> {
        match self {
            Self::Raw { resource, .. } | Self::Qcow2 { resource, .. } => Some(resource),
            Self::IdeCd { .. } => None,
        }
    }

    /// The Pod's volume that has the disk, if this is a disk of a volume: `NAME-disk` or `disk-N`.
    pub fn volume(&self) -> Option<&str> {
        let path = self.resource()?;
        let in_file_system = || path.strip_prefix(paths::DISK_DIR)?.strip_prefix('/')?.split('/').next();
        path.strip_prefix("/dev/").or_else(in_file_system)
    }

    /// The name, if this is a CD drive with one.
    pub fn cd_name(&self) -> Option<&str> {
        match self {
            Self::IdeCd { name, .. } => name.as_deref(),
            Self::Raw { .. } | Self::Qcow2 { .. } => None,
        }
    }

    /// What people call it: its name, or that of its volume or file; of a CD drive without a name its number among the CD drives, counted from 0.
    pub fn label(&self, number: usize) -> String {
        self.cd_name().or(self.volume()).or(self.resource()).map_or_else(|| number.to_string(), str::to_owned)
    }

    /// A hash of what a CD drive holds: by it a drive without a name is found again when others were taken out.
    pub fn parameters(&self) -> String {
        digest(self.cd().unwrap_or_default(), 8)
    }

    /// The slot of the drive that is the `index`th of its kind.
    pub fn slot(&self, index: usize) -> u32 {
        let (Self::Raw { slot, .. } | Self::Qcow2 { slot, .. } | Self::IdeCd { slot, .. }) = self;
        slot.unwrap_or_else(|| u32::try_from(index).unwrap_or(u32::MAX))
    }

    /// Gives the drive that is the `index`th of its kind a slot. It is written only if it is not that of the position, as in the files of earlier
    /// releases.
    pub fn place(&mut self, index: usize, number: u32) {
        let (Self::Raw { slot, .. } | Self::Qcow2 { slot, .. } | Self::IdeCd { slot, .. }) = self;
        *slot = Some(number).filter(|number| usize::try_from(*number) != Ok(index));
    }
}

impl RunnerConfig {
    /// Parses the text of `config.yaml`.
    ///
    /// # Errors
    /// If the text is not YAML, or a field is missing or has the wrong type. The error has the line and the column.
    pub fn parse(text: &str) -> Result<Self, crate::yaml::Error> {
        crate::yaml::from_str::<ConfigFile>(text).map(|file| file.runner)
    }
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}
fn yes() -> bool {
    true
}
fn one() -> u32 {
    1
}

/// The default of [`VmSection::powerdown_timeout`], in seconds.
pub fn default_powerdown_timeout() -> u64 {
    900
}
fn data_dir() -> String {
    paths::DATA_DIR.into()
}
fn runtime_dir() -> String {
    paths::RUNTIME_DIR.into()
}
fn host() -> String {
    "host".into()
}
fn utc() -> String {
    "utc".into()
}
fn rt() -> String {
    "rt".into()
}
fn one_gigabyte() -> Quantity {
    Quantity::from_bytes(1_000_000_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_with_only_the_names_has_all_defaults() {
        let config = RunnerConfig::parse("/Runner: { namespace: orchard, vm: { name: apple } }").unwrap();
        insta::assert_yaml_snapshot!(config);
    }

    #[test]
    fn a_file_needs_the_names() {
        for text in
            ["/Runner: { vm: { name: apple } }", "/Runner: { namespace: orchard, vm: {} }", "namespace: orchard"]
        {
            let error = RunnerConfig::parse(text).unwrap_err().to_string();
            assert!(error.contains("missing field"), "{text}: {error}");
        }
    }

    #[test]
    fn the_text_of_a_file_has_no_newline_at_its_end() {
        assert_eq!(text(b"secret\r\n\n").as_deref(), Some("secret"));
        assert_eq!(text(b"two\nlines").as_deref(), Some("two\nlines"));
        assert_eq!(text(b"\n"), None);
        assert_eq!(text(b""), None);
    }
}
