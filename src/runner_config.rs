//! What the manager hands to the runner: the file `config.yaml` and the places in the Pod where the two meet.
//!
//! Both sides use these types: the manager to write the file ([`crate::render`]), the runner to read it. The format is that
//! of the runners that existing users have (section `/Runner`); what is new is optional for them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::api::{Accelerator, Firmware, Quantity};

/// Where things are in the runner's container.
pub mod paths {
    /// The projected configuration: `config.yaml`, `logging.properties`, `display-password`, `password-expiry`.
    pub const CONFIG_DIR: &str = "/etc/opt/vmrunner";
    /// The file, and the key of a display secret, with the display's password. Empty or not there: it has none.
    pub const PASSWORD_FILE: &str = "display-password";
    /// The file, and the key of a display secret, that says when the password ends: `never`, `now`, `+n` seconds from when it is set,
    /// or seconds since 1970. Empty or not there: never.
    pub const EXPIRY_FILE: &str = "password-expiry";
    /// The end of a password that has none.
    pub const NEVER: &str = "never";
    /// Below [`CONFIG_DIR`]: `meta-data`, `user-data`, `network-config`.
    pub const CLOUD_INIT_DIR: &str = "cloud-init";
    /// The machine's own small volume: firmware variables, TPM state, the copied QEMU template, the UUID of old machines.
    pub const DATA_DIR: &str = "/var/local/vm-data";
    /// Sockets and state files that the roles of the runner share; gone with the Pod.
    pub const RUNTIME_DIR: &str = "/run/vm-runner";
    /// The image repository, mounted read-only.
    pub const IMAGE_REPOSITORY: &str = "/var/local/vmop-image-repository";
    /// Claims with a file system: a disk is the file `disk.img` in a folder of this one, named like the disk.
    pub const DISK_DIR: &str = "/var/local/vm-disks";
}

/// The file `config.yaml`.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
pub struct ConfigFile {
    /// The runner's section. Other sections belong to other programs.
    #[serde(rename = "/Runner")]
    pub runner: RunnerConfig,
}

/// The section `/Runner`.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct RunnerConfig {
    /// Default: [`paths::DATA_DIR`].
    #[serde(default = "data_dir")]
    pub data_dir: String,
    /// Default: [`paths::RUNTIME_DIR`].
    #[serde(default = "runtime_dir")]
    pub runtime_dir: String,
    /// The QEMU template's name in the runner's image. Absent: the standard template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template: Option<String>,
    /// false: a copy of the template in the data directory, made at the first start, is used.
    #[serde(default = "yes")]
    pub update_template: bool,
    /// The VM's namespace.
    pub namespace: String,
    /// The UID of the resource. One that was deleted and made again hears anew of the machine that runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resource_uid: Option<String>,
    /// Whether a shutdown that the guest made leaves the machine down.
    #[serde(default)]
    pub guest_shutdown_stops: bool,
    /// When it grows, the machine is reset.
    #[serde(default)]
    pub reset_counter: u64,
    /// Data for cloud-init; the files in [`paths::CLOUD_INIT_DIR`] come before it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cloud_init: Option<CloudInitSection>,
    /// The machine.
    pub vm: VmSection,
}

/// Data for cloud-init.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct CloudInitSection {
    /// `meta-data`.
    #[serde(default)]
    pub meta_data: BTreeMap<String, Value>,
    /// `user-data`; `{}` when absent.
    #[serde(default)]
    pub user_data: Value,
    /// `network-config`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network_config: Option<Value>,
}

/// The machine.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct VmSection {
    /// The VM's name.
    pub name: String,
    /// The machine's UUID. Absent: the one in the data directory, made at the first start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// QEMU's machine type with its version. Absent: the newest `pc-q35` of this QEMU; the status tells which.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine_type: Option<String>,
    /// Whether there is a TPM.
    #[serde(default)]
    pub use_tpm: bool,
    /// The firmware.
    #[serde(default)]
    pub firmware: Firmware,
    /// Whether the firmware shows a boot menu.
    #[serde(default)]
    pub boot_menu: bool,
    /// Seconds that the guest may take to power down.
    #[serde(default = "powerdown_timeout")]
    pub powerdown_timeout: u64,
    /// QEMU's CPU model.
    #[serde(default = "host")]
    pub cpu_model: String,
    /// The most CPUs.
    #[serde(default = "one")]
    pub maximum_cpus: u32,
    /// Sockets; 0: left out, as the next three.
    #[serde(default)]
    pub sockets: u32,
    /// Dies in a socket.
    #[serde(default)]
    pub dies_per_socket: u32,
    /// Cores on a die.
    #[serde(default)]
    pub cores_per_die: u32,
    /// Threads of a core.
    #[serde(default)]
    pub threads_per_core: u32,
    /// The CPUs that the guest has now.
    #[serde(default = "one")]
    pub current_cpus: u32,
    /// The most memory.
    #[serde(default = "one_gigabyte")]
    pub maximum_ram: Quantity,
    /// The memory that the guest has now. Absent: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub current_ram: Option<Quantity>,
    /// What executes the guest's instructions.
    #[serde(default)]
    pub accelerator: Accelerator,
    /// The base of the real time clock.
    #[serde(default = "utc")]
    pub rtc_base: String,
    /// The clock that drives it.
    #[serde(default = "rt")]
    pub rtc_clock: String,
    /// The network interfaces.
    #[serde(default)]
    pub network: Vec<NetworkSection>,
    /// The drives, in the order of the VM's `disks`.
    #[serde(default)]
    pub drives: Vec<Drive>,
    /// The display.
    #[serde(default)]
    pub display: DisplaySection,
}

/// A network interface.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum NetworkSection {
    /// An interface on a bridge of the node.
    Tap {
        /// The card that the guest sees.
        device: String,
        /// The bridge.
        bridge: String,
        /// The MAC address.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        mac: Option<String>,
    },
    /// QEMU's user networking.
    User {
        /// The card that the guest sees.
        device: String,
        /// The network that the guest sees.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        net: Option<String>,
        /// The MAC address.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        mac: Option<String>,
    },
    /// The Pod's own network.
    Pod {
        /// The card that the guest sees.
        device: String,
        /// The MAC address.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        mac: Option<String>,
    },
}

impl NetworkSection {
    /// The MAC address, if the configuration says one.
    pub fn mac(&self) -> Option<&str> {
        let (Self::Tap { mac, .. } | Self::User { mac, .. } | Self::Pod { mac, .. }) = self;
        mac.as_deref()
    }

    /// Says which MAC address it is.
    pub fn set_mac(&mut self, address: String) {
        let (Self::Tap { mac, .. } | Self::User { mac, .. } | Self::Pod { mac, .. }) = self;
        *mac = Some(address);
    }
}

/// A drive.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
#[serde(tag = "type", rename_all = "kebab-case")]
pub enum Drive {
    /// A disk without a format of its own.
    Raw {
        /// A block device (`/dev/NAME-disk`) or a file.
        resource: String,
        /// The place in the boot order.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        bootindex: Option<u32>,
        /// The size that a file has at least when the machine starts, in bytes: it is made, or grows.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        size: Option<u64>,
    },
    /// A CD drive.
    IdeCd {
        /// The CD's path or URL; empty: no CD.
        file: String,
        /// The place in the boot order.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        bootindex: Option<u32>,
    },
}

/// The display.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct DisplaySection {
    /// Screens.
    #[serde(default = "one")]
    pub outputs: u32,
    /// The user to log in in the guest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logged_in_user: Option<String>,
    /// SPICE; absent with VNC.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spice: Option<SpiceSection>,
    /// VNC.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vnc: Option<VncSection>,
}

impl DisplaySection {
    /// What a viewer has to speak, as QEMU names it; `None`: there is no display.
    pub fn protocol(&self) -> Option<&'static str> {
        self.vnc.as_ref().map(|_| "vnc").or(self.spice.as_ref().map(|_| "spice"))
    }
}

/// SPICE.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct SpiceSection {
    /// The port.
    pub port: u16,
    /// The password; the file `display-password` comes before it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ticket: Option<String>,
    /// SPICE's `streaming-video`.
    #[serde(default, rename = "streaming-video", skip_serializing_if = "Option::is_none")]
    pub streaming_video: Option<String>,
    /// USB devices that a viewer can redirect.
    #[serde(default, rename = "usbRedirects")]
    pub usb_redirects: u32,
}

/// VNC.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct VncSection {
    /// The port.
    pub port: u16,
}

/// A projected file's text without the newline that editors and `kubectl create secret --from-file` leave at the end, if there is
/// any.
pub fn text(content: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(content);
    Some(text.trim_end_matches(['\r', '\n']).to_owned()).filter(|text| !text.is_empty())
}

impl RunnerConfig {
    /// Reads `config.yaml`.
    ///
    /// # Errors
    /// If it is not YAML, or a field is missing or of the wrong type; the error has line and column.
    pub fn parse(text: &str) -> Result<Self, serde_yaml::Error> {
        serde_yaml::from_str::<ConfigFile>(text).map(|file| file.runner)
    }
}

fn yes() -> bool {
    true
}
fn one() -> u32 {
    1
}
fn powerdown_timeout() -> u64 {
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
