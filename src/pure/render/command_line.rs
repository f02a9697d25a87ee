//! QEMU's command line. Pure.
//!
//! It is rendered from a template as the VM's objects are, `qemu/NAME.yaml.j2` of the VM's set. A template renders a YAML list of arguments;
//! `templates/qemu/standard.yaml.j2` describes the rules. Every value that a template inserts is written as JSON, so no value can become
//! another argument.
//!
//! ```text
//!  manager: set ─▶ check with samples of what a node has ─▶ QemuFile (templates, values) in the VM's ConfigMap
//!  runner:  QemuFile, or a file of the image, or the built-in one ─▶ context (configuration, Prepared, sockets) ─▶ arguments ─▶ relied_on
//! ```

use std::{borrow::Cow, iter, path::Path};

use minijinja::value::Serde;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

use self::hardware::{Addresses, RootPort, Slots, fillers, memory_limit, root_ports};
use super::{
    TemplateError, TemplateSet,
    builtin::BUILTIN_OF_QEMU,
    templates::{Layers, QEMU_FOLDER, SUFFIX},
};
use crate::{
    api::{
        Clipboard,
        network::MOST_NETWORKS,
        status::{CdIdentity, DiskIdentity},
    },
    jinja,
    runner_config::{DisplaySection, Drive, LEGACY_PLACES, NetworkSection, RunnerConfig, VmSection, digest},
};

mod check;
mod device;
mod environment;
mod hardware;
mod medium;
mod pod_link;
mod reactions;
mod relied_on;

pub use check::{Sample, check, sample_context, sampled};
pub use device::DeviceId;
pub use environment::Environment;
pub use hardware::Hardware;
pub use medium::Medium;
pub use pod_link::{PodLink, has_pod_network};
pub use reactions::{Panic, Reaction, Reactions};

/// The name of the template that is used if the configuration names none.
pub const STANDARD: &str = "standard.yaml.j2";
/// The most CD drives.
const CD_PORTS: usize = CdIdentity::MOST as usize;
/// The most disks.
const DISK_ADDRESSES: usize = DiskIdentity::MOST as usize;
/// The longest serial number of a virtio disk (virtio specification, 5.2.6).
const SERIAL: usize = 20;
/// The most networks: four PCI slots with eight functions each.
const NETWORK_ADDRESSES: usize = MOST_NETWORKS as usize;

/// Why there is no command line.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The runner cannot do what the configuration describes.
    #[error("{0}")]
    Unsupported(String),
    /// The template can't be rendered, or what it renders is no command line that the runner can use.
    #[error(transparent)]
    Template(#[from] TemplateError),
}

/// What `prepare` has found or made on the node, and the command line needs.
#[derive(Clone, Debug)]
pub struct Prepared {
    /// How the devices are arranged.
    pub hardware: Hardware,
    /// QEMU's machine type with its version.
    pub machine_type: String,
    /// `kvm` or `tcg`.
    pub accelerator: &'static str,
    /// The VM's UUID.
    pub uuid: String,
    /// The UEFI firmware. `None`: QEMU's own BIOS.
    pub firmware: Option<Firmware>,
    /// The path of the cloud-init disk's image, if there is one.
    pub cloud_init_disk: Option<String>,
    /// For each raw drive, in their order: whether it is a block device.
    pub block_devices: Vec<bool>,
    /// For each CD drive, in their order, its medium. `None`: the drive is empty.
    pub media: Vec<Option<Medium>>,
    /// How a network of type pod is reached, if there is one.
    pub pod_network: PodLink,
    /// Whether the display has a password.
    pub display_password: bool,
    /// Whether a disk without a serial number has its name as one.
    pub names_disks: bool,
    /// The ID of the VM's generation, if the guest has a device for that.
    pub generation_id: Option<String>,
    /// The base of the real-time clock, if it is the time of a zone: that time now.
    pub rtc_base: Option<String>,
    /// The environment of the runner's container, as far as templates may read it.
    pub environment: Environment,
}

/// The files of a UEFI firmware.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Firmware {
    /// The path of the code, in the runner's image.
    pub code: String,
    /// The path of the VM's own variables.
    pub vars: String,
    /// Whether the firmware has Secure Boot.
    pub secure: bool,
}

/// The file `qemu.yaml`: the QEMU templates of the VM's set, with what they use of the manager's.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
pub struct QemuFile {
    /// The templates, in their layers.
    pub templates: Layers,
    /// `values` in the templates, as far as they use them.
    #[serde(default)]
    pub values: Value,
    /// `config` in the templates: the manager's configuration.
    #[serde(default)]
    pub config: Value,
    /// The built-in template that they extend, in the copy of a VM that keeps its templates. `None`: the runner's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub standard: Option<String>,
}

impl QemuFile {
    /// By what two files can be compared.
    pub fn digest(&self) -> String {
        digest(serde_json::json!(self).to_string(), 16)
    }
}

/// A QEMU template.
#[derive(Clone, Debug, PartialEq)]
pub struct Template {
    /// Its name among the templates of `file`.
    pub name: String,
    /// The templates that it can extend or include, and the values of the set.
    pub file: QemuFile,
}

impl Template {
    /// A template of one file, as the runner's image can have them.
    pub fn alone(name: &str, text: String) -> Self {
        // There a template may have any name.
        let name = if name.ends_with(SUFFIX) { name.to_owned() } else { format!("{name}{SUFFIX}") };
        let templates = Layers { base: [(name.clone(), text)].into(), named: None };
        Self { name, file: QemuFile { templates, ..QemuFile::default() } }
    }
}

/// The variables of a template. Every key always exists, so that a template can test it.
#[derive(Debug, Serialize)]
struct Context<'a> {
    /// The section `vm` of the configuration.
    vm: Cow<'a, VmSection>,
    machine: MachineContext<'a>,
    firmware: FirmwareContext<'a>,
    slots: Slots,
    root_ports: Vec<RootPort>,
    /// Whether several disks, and several networks, share a PCI slot.
    shared_slots: bool,
    /// The interface of the TPM.
    tpm_device: &'static str,
    /// The threads of QEMU that serve the disks in turn; the first serves the cloud-init disk, too.
    io_threads: Vec<String>,
    disks: Vec<DiskContext<'a>>,
    cds: Vec<CdContext<'a>>,
    cloud_init_disk: Option<&'a str>,
    networks: Vec<NetworkContext<'a>>,
    uses_bridge: bool,
    display: DisplayContext,
    sockets: Sockets,
    /// The values of the template set, as in the other templates.
    values: &'a Value,
    /// The manager's configuration, as in the other templates.
    config: &'a Value,
    /// The variables in which device plugins name the devices of the container.
    #[serde(serialize_with = "environment::as_object")]
    env: &'a Environment,
}

#[derive(Debug, Serialize)]
struct MachineContext<'a> {
    #[serde(rename = "type")]
    type_: &'a str,
    accelerator: &'a str,
    cpu_model: Cow<'a, str>,
    uuid: &'a str,
    memory: u64,
    /// The memory with all that can be plugged while the guest runs. `None`: none can be.
    memory_limit: Option<u64>,
    /// The name of the memory in QEMU, if it is a file that other programs can map. `None`: QEMU's default.
    shared_memory: Option<&'static str>,
    /// Whether another program can access the guest's memory. Templates that are copies of earlier built-in ones ask this.
    shares_memory: bool,
    /// The ID of the VM's generation, which is another one after the VM was brought back to an earlier state. `None`: the guest has no such device.
    generation_id: Option<&'a str>,
    /// Whether the runner must hear of panics.
    reports_panics: bool,
    /// What QEMU itself does when the watchdog is not fed. `None`: there is none.
    watchdog: Option<&'static str>,
}

#[derive(Debug, Serialize)]
struct FirmwareContext<'a> {
    code: Option<&'a str>,
    vars: Option<&'a str>,
    secure: bool,
}

#[derive(Debug, Serialize)]
struct DiskContext<'a> {
    id: DeviceId,
    path: &'a str,
    /// `raw` or `qcow2`.
    format: &'static str,
    block: bool,
    bootindex: Option<u32>,
    address: String,
    /// The serial number that the guest sees.
    serial: Option<String>,
    /// The number of its queues. `None`: QEMU's default.
    queues: Option<u32>,
}

#[derive(Debug, Serialize)]
struct CdContext<'a> {
    id: DeviceId,
    /// The path or URL of the image. `None`: the drive is empty.
    image: Option<&'a str>,
    /// The protocol of a URL; `None` for a path.
    protocol: Option<&'a str>,
    bootindex: Option<u32>,
    bus: String,
}

#[derive(Debug, Serialize)]
struct NetworkContext<'a> {
    id: DeviceId,
    #[serde(rename = "type")]
    type_: &'static str,
    device: &'a str,
    mac: String,
    bridge: Option<&'a str>,
    net: Option<&'a str>,
    /// The forwarded ports of a network of type user, as QEMU's option `hostfwd` has them.
    forwards: Vec<String>,
    /// The socket of passt, for a network of type pod.
    socket: Option<String>,
    /// Whether passt accesses the guest's memory through it.
    vhost_user: bool,
    address: String,
}

#[derive(Debug, Serialize)]
struct DisplayContext {
    outputs: u32,
    password: bool,
    spice: Option<SpiceContext>,
    vnc: Option<VncContext>,
    /// The socket of VNC for programs in the Pod, beside `spice` or `vnc`. `None`: there is no display.
    inner_vnc: Option<String>,
    /// Which viewers share the guest's clipboard: `spice` or `vnc`. `None`: there is no display.
    clipboard: Option<Clipboard>,
}

#[derive(Debug, Serialize)]
struct SpiceContext {
    port: u16,
    socket: Option<String>,
    streaming_video: Option<String>,
    usb_redirects: u32,
}

#[derive(Debug, Serialize)]
struct VncContext {
    port: u16,
    socket: Option<String>,
}

/// The paths of QEMU's sockets.
#[derive(Clone, Debug, Serialize)]
pub struct Sockets {
    /// Of the monitor of the machine role.
    pub monitor: String,
    /// Of the monitor of the agent role.
    pub agent: String,
    /// Of the serial console.
    pub serial: String,
    /// Of the port of QEMU's guest agent.
    pub guest_agent: String,
    /// Of the port of the login agent.
    pub vmop_agent: String,
    /// Of the TPM emulator. `None`: the guest has no TPM.
    pub tpm: Option<String>,
    /// Of the display as SPICE, if it has no port.
    #[serde(skip)]
    pub spice: String,
    /// Of the display as VNC, for programs in the Pod.
    #[serde(skip)]
    pub vnc: String,
}

/// What QEMU's sockets are called in the runner's folder.
pub mod sockets {
    /// Of the monitor of the machine role.
    pub const MONITOR: &str = "monitor.sock";
    /// Of the monitor of the agent role.
    pub const AGENT: &str = "agent.sock";
    /// Of the serial console.
    pub const SERIAL: &str = "serial.sock";
    /// Of the port of QEMU's guest agent.
    pub const GUEST_AGENT: &str = "guest-agent.sock";
    /// Of the port of the login agent.
    pub const VMOP_AGENT: &str = "vmop-agent.sock";
    /// Of the TPM emulator.
    pub const TPM: &str = "swtpm.sock";
    /// Of the display as SPICE.
    pub const SPICE: &str = "spice.sock";
    /// Of the display as VNC.
    pub const VNC: &str = "vnc.sock";
}

impl Sockets {
    /// Those in a folder.
    pub fn in_folder(folder: &str) -> Self {
        let path = |name: &str| format!("{folder}/{name}");
        Self {
            monitor: path(sockets::MONITOR),
            agent: path(sockets::AGENT),
            serial: path(sockets::SERIAL),
            guest_agent: path(sockets::GUEST_AGENT),
            vmop_agent: path(sockets::VMOP_AGENT),
            tpm: Some(path(sockets::TPM)),
            spice: path(sockets::SPICE),
            vnc: path(sockets::VNC),
        }
    }
}

/// The name of a VM's QEMU template.
pub fn template_name(config: &RunnerConfig) -> &str {
    match config.template.as_deref() {
        // The standard template of the VM-Operator in Java. Its definition stored the name in VMs.
        None | Some("Standard-VM-latest.ftl.yaml") => STANDARD,
        Some(name) => name,
    }
}

/// Whether a file of a set is a QEMU template, and none that others include.
pub fn is_template(name: &str) -> bool {
    name.strip_prefix(QEMU_FOLDER).is_some_and(|name| name.ends_with(SUFFIX) && !name.contains('/'))
}

/// The text of a built-in template.
pub fn built_in(name: &str) -> Option<&'static str> {
    BUILTIN_OF_QEMU.iter().find(|(built_in, _)| *built_in == name).map(|(_, text)| *text)
}

/// QEMU's arguments, without the program's name.
///
/// # Errors
/// If the runner does not support something in the configuration, or the template is wrong.
pub fn qemu(
    config: &RunnerConfig,
    prepared: &Prepared,
    sockets: Sockets,
    Template { name, file }: &Template,
) -> Result<Vec<String>, Error> {
    let builtin = BUILTIN_OF_QEMU.map(|(name, text)| (name, file.standard.as_deref().unwrap_or(text)));
    let compiled = jinja::on_large_stack(|| TemplateSet::over(&builtin, &[], file.templates.clone()));
    let set = compiled.map_err(|error| TemplateError::refused(name, error.to_string()))??;
    arguments_of(&set, name, &context(config, prepared, sockets, file)?, prepared.hardware)
}

/// What a template makes of the context, with what no template has.
fn arguments_of(
    set: &TemplateSet,
    name: &str,
    context: &Context<'_>,
    hardware: Hardware,
) -> Result<Vec<String>, Error> {
    let text = set.render(name, &minijinja::Value::from(Serde(context)))?;
    let mut arguments = arguments(&text).map_err(|message| TemplateError::refused(set.file_of(name), message))?;
    relied_on::check(context, &arguments).map_err(|message| TemplateError::refused(set.file_of(name), message))?;
    if hardware != Hardware::Legacy {
        arguments.extend(fillers(&context.vm).iter().flat_map(RootPort::arguments));
    }
    Ok(arguments)
}

fn context<'a>(
    config: &'a RunnerConfig,
    prepared: &'a Prepared,
    sockets: Sockets,
    file: &'a QemuFile,
) -> Result<Context<'a>, Error> {
    let vm = &config.vm;
    let hardware = prepared.hardware;
    let addresses = Addresses { hardware, networks: slots_in_use(vm.network_slots()) };
    let DriveContexts { disks, cds } = drives(vm, prepared, addresses)?;
    let disk_slots = slots_in_use(vm.disks().map(|(slot, _)| slot));
    let networks = networks(vm, &prepared.uuid, addresses, &prepared.pod_network)?;
    if hardware == Hardware::Legacy {
        // The cloud-init disk has a slot, too.
        check_number("networks and disks", addresses.networks.max(1) + disk_slots, LEGACY_PLACES as usize)?;
    }
    Ok(Context {
        vm: match &prepared.rtc_base {
            Some(base) => Cow::Owned(VmSection { rtc_base: base.clone(), ..vm.clone() }),
            None => Cow::Borrowed(vm),
        },
        machine: machine_context(vm, prepared),
        firmware: firmware_context(prepared.firmware.as_ref()),
        slots: Slots::of(hardware, addresses.networks, disk_slots),
        root_ports: root_ports(hardware),
        shared_slots: hardware != Hardware::Legacy,
        tpm_device: match hardware {
            Hardware::MultiQueue | Hardware::RootPorts | Hardware::Standard => "tpm-crb",
            Hardware::Legacy => "tpm-tis",
        },
        io_threads: hardware.io_threads(disks.len()),
        disks,
        cds,
        cloud_init_disk: prepared.cloud_init_disk.as_deref(),
        uses_bridge: networks.iter().any(|network| network.type_ == "tap"),
        networks,
        display: display_context(&vm.display, prepared.display_password, &sockets),
        sockets: Sockets { tpm: sockets.tpm.filter(|_| vm.use_tpm), ..sockets },
        values: &file.values,
        config: &file.config,
        env: &prepared.environment,
    })
}

fn machine_context<'a>(vm: &'a VmSection, prepared: &'a Prepared) -> MachineContext<'a> {
    let has_vhost_user = matches!(prepared.pod_network, PodLink::VhostUser(_)) && has_pod_network(vm);
    // Memory that is a file has no huge pages: QEMU maps it at an address at which the kernel gives none. So it is one only where it must be.
    // `pc.ram` is the name that QEMU gives other memory, and it compares the names when a guest is handed over to another QEMU.
    let name = if prepared.hardware.is_multi_queue() { "pc.ram" } else { "memory" };
    let shared_memory = has_vhost_user.then_some(name);
    MachineContext {
        type_: &prepared.machine_type,
        accelerator: prepared.accelerator,
        cpu_model: cpu_model(&vm.cpu_model, prepared.accelerator),
        uuid: &prepared.uuid,
        memory: vm.maximum_ram.bytes(),
        reports_panics: vm.on_panic.is_some(),
        watchdog: Reactions::of(vm).watchdog().map(Reaction::by_qemu),
        memory_limit: memory_limit(prepared.hardware, vm.maximum_ram.bytes()),
        shared_memory,
        shares_memory: shared_memory.is_some(),
        generation_id: prepared.generation_id.as_deref(),
    }
}

/// The CPU model with its features. TCG can't pass the host's CPU through: `max` is the CPU with all features that it can emulate. It has none of
/// Hyper-V's features, and QEMU does not start if it is to have some of them (`kernel doesn't allow setting HyperV VP_INDEX`).
fn cpu_model<'a>(wanted: &'a str, accelerator: &str) -> Cow<'a, str> {
    if accelerator != "tcg" {
        return Cow::Borrowed(wanted);
    }
    let (name, features) = wanted.split_once(',').unwrap_or((wanted, ""));
    let name = if name == "host" { "max" } else { name };
    let is_of_hyper_v =
        |feature: &&str| ["hv-", "hv_"].iter().any(|begin| feature.trim_start_matches('+').starts_with(begin));
    let features = features.split(',').filter(|feature| !feature.is_empty() && !is_of_hyper_v(feature));
    Cow::Owned(iter::once(name).chain(features).collect::<Vec<_>>().join(","))
}

fn firmware_context(firmware: Option<&Firmware>) -> FirmwareContext<'_> {
    FirmwareContext {
        code: firmware.map(|firmware| firmware.code.as_str()),
        vars: firmware.map(|firmware| firmware.vars.as_str()),
        secure: firmware.is_some_and(|firmware| firmware.secure),
    }
}

fn display_context(display: &DisplaySection, password: bool, sockets: &Sockets) -> DisplayContext {
    let spice = display.spice.as_ref().map(|spice| SpiceContext {
        port: spice.port,
        socket: spice.socket.clone().or_else(|| (spice.port == 0).then(|| sockets.spice.clone())),
        streaming_video: spice.streaming_video.clone(),
        usb_redirects: spice.usb_redirects,
    });
    let vnc = display.vnc.as_ref().map(|vnc| VncContext { port: vnc.port, socket: vnc.socket.clone() });
    let has_display = spice.is_some() || vnc.is_some();
    let by_protocol = if spice.is_some() { Clipboard::Spice } else { Clipboard::Vnc };
    DisplayContext {
        outputs: display.outputs,
        password: password && display.open_protocol().is_some(),
        inner_vnc: has_display.then(|| sockets.vnc.clone()),
        clipboard: has_display.then(|| display.clipboard.unwrap_or(by_protocol)),
        spice,
        vnc,
    }
}

fn networks<'a>(
    vm: &'a VmSection,
    uuid: &str,
    addresses: Addresses,
    pod: &PodLink,
) -> Result<Vec<NetworkContext<'a>>, Error> {
    if vm.network.len() > NETWORK_ADDRESSES {
        return Err(Error::Unsupported(format!("there are more than {NETWORK_ADDRESSES} networks")));
    }
    vm.network.iter().filter_map(NetworkSection::mac).try_for_each(check_mac)?;
    check_slots("network", vm.network_slots(), NETWORK_ADDRESSES)?;
    let networks: Vec<_> = vm
        .network
        .iter()
        .zip(macs(&vm.network, uuid, addresses.hardware))
        .enumerate()
        .map(|(at, (network, mac))| network_context(network.slot(at), network, mac, addresses, pod))
        .collect();
    if networks.iter().filter(|network| network.type_ == "pod").count() > 1 {
        return Err(Error::Unsupported("there is more than one network of type pod, but a Pod has one address".into()));
    }
    Ok(networks)
}

/// How many slots of a kind there are up to the last one, used or not.
fn slots_in_use(slots: impl Iterator<Item = u32>) -> usize {
    slots.max().map_or(0, |last| as_index(last).saturating_add(1))
}

/// A slot as an index of addresses.
fn as_index(slot: u32) -> usize {
    usize::try_from(slot).unwrap_or(usize::MAX)
}

/// A template could give two devices one address, and an address that no bus has.
fn check_slots(kind: &str, slots: impl Iterator<Item = u32>, most: usize) -> Result<(), Error> {
    let mut slots: Vec<usize> = slots.map(as_index).collect();
    slots.sort_unstable();
    if slots.last().is_some_and(|last| *last >= most) || slots.windows(2).any(|pair| pair[0] == pair[1]) {
        return Err(Error::Unsupported(format!(
            "each {kind} needs a slot of its own, from 0 to {}, and these are {slots:?}",
            most - 1
        )));
    }
    Ok(())
}

/// A text that is no address of one card would confuse QEMU or the switch, and with an own template it might become another option.
fn check_mac(mac: &str) -> Result<(), Error> {
    let pairs: Vec<&str> = mac.split(':').collect();
    let is_pair = |pair: &&str| pair.len() == 2 && pair.bytes().all(|byte| byte.is_ascii_hexdigit());
    let is_address = pairs.len() == 6 && pairs.iter().all(is_pair);
    let is_of_group = || u8::from_str_radix(pairs[0], 16).is_ok_and(|first| first & 1 == 1);
    if !is_address || is_of_group() {
        return Err(Error::Unsupported(format!(
            "{mac:?} can't be the MAC address of a network: it must have six pairs of hexadecimal digits with colons between them, and the \
             second digit must be even"
        )));
    }
    Ok(())
}

#[derive(Debug)]
struct DriveContexts<'a> {
    disks: Vec<DiskContext<'a>>,
    cds: Vec<CdContext<'a>>,
}

/// Names and addresses the drives by their slots.
fn drives<'a>(vm: &'a VmSection, prepared: &'a Prepared, addresses: Addresses) -> Result<DriveContexts<'a>, Error> {
    let Prepared { block_devices, media, names_disks, .. } = prepared;
    let drives = &vm.drives;
    check_number("disks", vm.disks().count(), DISK_ADDRESSES)?;
    check_number("CD drives", vm.cds().count(), CD_PORTS)?;
    check_slots("disk", vm.disks().map(|(slot, _)| slot), DISK_ADDRESSES)?;
    check_slots("CD drive", vm.cds().map(|(slot, _)| slot), CD_PORTS)?;
    let (mut disks, mut cds) = (Vec::new(), Vec::new());
    // If no drive has a place in the boot order, the order is that of the drives. Without any order the firmware would use the order
    // of the PCI addresses, and might boot from a device that is not meant for that.
    let has_boot_order = drives.iter().any(|drive| match drive {
        Drive::Raw { bootindex, .. } | Drive::Qcow2 { bootindex, .. } | Drive::IdeCd { bootindex, .. } => {
            bootindex.is_some()
        }
    });
    let format = |drive: &Drive| if matches!(drive, Drive::Qcow2 { .. }) { "qcow2" } else { "raw" };
    for (place, drive) in (0..).zip(drives) {
        let by_place = if has_boot_order { None } else { Some(place) };
        match drive {
            Drive::Raw { resource, bootindex, serial, .. } | Drive::Qcow2 { resource, bootindex, serial, .. } => {
                let at = disks.len();
                let slot = drive.slot(at);
                disks.push(DiskContext {
                    id: DeviceId::Disk(slot),
                    path: resource,
                    format: format(drive),
                    block: block_devices.get(at).copied().unwrap_or_default(),
                    bootindex: bootindex.or(by_place),
                    address: addresses.disk(as_index(slot)),
                    serial: serial.clone().or_else(|| names_disks.then(|| default_serial(resource)).flatten()),
                    queues: addresses.hardware.disk_queues(vm.maximum_cpus),
                });
            }
            Drive::IdeCd { bootindex, .. } => {
                let slot = drive.slot(cds.len());
                let medium = media.get(cds.len()).and_then(Option::as_ref);
                cds.push(CdContext {
                    id: DeviceId::Cd(slot),
                    image: medium.map(Medium::text),
                    protocol: medium.and_then(Medium::protocol),
                    bootindex: bootindex.or(by_place),
                    bus: format!("ide.{slot}"),
                });
            }
        }
    }
    Ok(DriveContexts { disks, cds })
}

/// The serial number of a disk without one: its name. `resource` is the path of its device or file.
fn default_serial(resource: &str) -> Option<String> {
    let path = Path::new(resource);
    // A disk in a file system is `NAME-disk/disk.img`.
    let path = if path.file_name()? == "disk.img" { path.parent()? } else { path };
    let volume = path.file_stem()?.to_str()?;
    let name = volume.strip_suffix("-disk").unwrap_or(volume);
    if name.len() <= SERIAL {
        return Some(name.to_owned());
    }
    // Two names may begin with the same letters.
    let hash = digest(name, 4);
    let begin = name.get(..SERIAL - hash.len() - 1)?;
    Some(format!("{begin}-{hash}"))
}

fn check_number(kind: &str, number: usize, most: usize) -> Result<(), Error> {
    if number > most {
        return Err(Error::Unsupported(format!("there are {number} {kind}, but only {most} are possible")));
    }
    Ok(())
}

fn network_context<'a>(
    slot: u32,
    network: &'a NetworkSection,
    mac: String,
    addresses: Addresses,
    pod: &PodLink,
) -> NetworkContext<'a> {
    let (type_, device, bridge, net) = match network {
        NetworkSection::Tap { device, bridge, .. } => ("tap", device, Some(bridge.as_str()), None),
        NetworkSection::User { device, net, .. } => ("user", device, None, net.as_deref()),
        NetworkSection::Pod { device, .. } => ("pod", device, None, None),
    };
    NetworkContext {
        id: DeviceId::Network(slot),
        type_,
        // Users write the short name. QEMU needs the name of the PCI device.
        device: if device == "virtio-net" { "virtio-net-pci" } else { device },
        mac,
        bridge,
        net,
        forwards: match network {
            NetworkSection::User { forwards, .. } => forwards.iter().map(ToString::to_string).collect(),
            NetworkSection::Tap { .. } | NetworkSection::Pod { .. } => Vec::new(),
        },
        socket: (type_ == "pod").then(|| pod.socket().display().to_string()),
        vhost_user: type_ == "pod" && matches!(pod, PodLink::VhostUser(_)),
        address: addresses.network(as_index(slot)),
    }
}

/// The MAC addresses of the guest's network cards, in the order of the networks. A network without an address gets one that no other
/// network has, which follows from its slot.
pub fn macs(networks: &[NetworkSection], uuid: &str, hardware: Hardware) -> Vec<String> {
    let default = |index, attempt| match hardware {
        Hardware::MultiQueue | Hardware::RootPorts | Hardware::Standard => derived_mac(uuid, index, attempt),
        Hardware::Legacy => qemus_mac(attempt),
    };
    let mut taken: Vec<String> = networks.iter().filter_map(|network| Some(network.mac()?.to_lowercase())).collect();
    let mut mac = |(index, network): (usize, &NetworkSection)| match network.mac() {
        Some(mac) => mac.to_owned(),
        None => {
            let (mut free, mut attempt) = (default(index, 0), 0);
            while taken.contains(&free) {
                attempt += 1;
                free = default(index, attempt);
            }
            taken.push(free.clone());
            free
        }
    };
    networks.iter().enumerate().map(|(index, network)| mac((as_index(network.slot(index)), network))).collect()
}

/// A MAC address for a network that has none in the configuration. It is the same at each start, and differs from those of other VMs;
/// otherwise two VMs on one bridge would receive each other's packets. 52:54:00 is the prefix of QEMU's own defaults.
fn derived_mac(uuid: &str, index: usize, attempt: u32) -> String {
    let hash = match attempt {
        0 => Sha256::digest(format!("{uuid}/{index}")),
        _ => Sha256::digest(format!("{uuid}/{index}/{attempt}")),
    };
    format!("52:54:00:{:02x}:{:02x}:{:02x}", hash[0], hash[1], hash[2])
}

/// The address that QEMU gives to the first network card without one (52:54:00:12:34:56), or to a later one.
fn qemus_mac(number: u32) -> String {
    format!("52:54:00:12:34:{:02x}", (0x56 + number) & 0xff)
}

/// Reads a rendered YAML list. The error is for people.
fn arguments(yaml: &str) -> Result<Vec<String>, String> {
    let shape = |what: String| format!("it renders {what}; it must be a list of texts, numbers and mappings");
    let value: Value =
        crate::yaml::from_str(yaml).map_err(|error| format!("it renders something that is not YAML: {error}"))?;
    let Value::Array(items) = value else { return Err(shape("something other than a list".into())) };
    items
        .into_iter()
        .enumerate()
        .map(|(index, item)| match item {
            Value::String(text) => Ok(text),
            Value::Number(number) => Ok(number.to_string()),
            Value::Object(_) => Ok(item.to_string()),
            Value::Null | Value::Bool(_) | Value::Array(_) => Err(shape(format!("{item} as argument {}", index + 1))),
        })
        .collect()
}

#[cfg(test)]
mod tests;
