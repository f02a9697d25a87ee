//! From the configuration and what was found on this machine to QEMU's command line. Pure.
//!
//! The command line is a template that users can replace. It renders a YAML list; see `templates/runner/standard.yaml.j2`
//! for its rules. Whatever a template interpolates is written as JSON (minijinja does that for names that end in
//! `.yaml.j2`), so no value can become another argument.

use std::path::Path;

use minijinja::{Environment, UndefinedBehavior, syntax::SyntaxConfig, value::Serde};
use serde::Serialize;
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::files::RuntimeDir;
use crate::runner_config::{Drive, NetworkSection, RunnerConfig, VmSection};

/// The template that is used if the configuration names none.
pub const STANDARD: &str = "standard.yaml.j2";
/// The templates that are built in.
const BUILT_IN: [(&str, &str); 1] = [(STANDARD, include_str!("../../templates/runner/standard.yaml.j2"))];

/// Instructions that a template may take: some hundred times what the standard template needs for a large machine.
const FUEL: u64 = 1_000_000;
/// q35's SATA controller has six ports.
const CD_PORTS: usize = 6;
/// Eight slots of eight functions.
const DISK_ADDRESSES: usize = 64;
/// Four slots of eight functions.
const NETWORK_ADDRESSES: usize = 32;

/// Why there is no command line.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The configuration asks for what the runner cannot do.
    #[error("{0}")]
    Unsupported(String),
    /// The template is wrong.
    #[error("{name}:{line}: {what}")]
    Template {
        /// The template's name.
        name: String,
        /// The line, from 1; 0 if unknown.
        line: usize,
        /// The template engine's words.
        what: String,
    },
    /// What the template renders is not YAML.
    #[error("{name} renders something that is not YAML: {what}")]
    Yaml {
        /// The template's name.
        name: String,
        /// The parser's words.
        what: String,
    },
    /// What the template renders is not a list of arguments.
    #[error("{name} renders {what}; it must be a list of texts, numbers and mappings")]
    Shape {
        /// The template's name.
        name: String,
        /// What it renders.
        what: String,
    },
}

/// What was found or made on this machine before QEMU can start.
#[derive(Clone, Debug)]
pub struct Facts {
    /// QEMU's machine type with its version.
    pub machine_type: String,
    /// `kvm` or `tcg`.
    pub accelerator: &'static str,
    /// The machine's UUID.
    pub uuid: String,
    /// UEFI's code and the machine's own variables; `None`: QEMU's BIOS.
    pub firmware: Option<Firmware>,
    /// The cloud-init disk.
    pub cloud_init_disk: Option<String>,
    /// Whether each of the raw drives is a block device, in their order.
    pub block_devices: Vec<bool>,
    /// Whether the display wants a password.
    pub display_password: bool,
}

/// UEFI's files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Firmware {
    /// The code.
    pub code: String,
    /// The variables.
    pub vars: String,
    /// Whether it is a build with Secure Boot.
    pub secure: bool,
}

/// What a template sees. All keys are always there, so a template can ask for any of them.
#[derive(Debug, Serialize)]
struct Context<'a> {
    /// The section `vm` of the configuration.
    vm: &'a VmSection,
    machine: Machine<'a>,
    firmware: FirmwareContext<'a>,
    disks: Vec<DiskContext<'a>>,
    cds: Vec<CdContext<'a>>,
    cloud_init_disk: Option<&'a str>,
    networks: Vec<NetworkContext<'a>>,
    uses_bridge: bool,
    display: DisplayContext<'a>,
    sockets: Sockets,
}

#[derive(Debug, Serialize)]
struct Machine<'a> {
    #[serde(rename = "type")]
    type_: &'a str,
    accelerator: &'a str,
    cpu_model: &'a str,
    uuid: &'a str,
    memory: u64,
}

#[derive(Debug, Serialize)]
struct FirmwareContext<'a> {
    code: Option<&'a str>,
    vars: Option<&'a str>,
    secure: bool,
}

#[derive(Debug, Serialize)]
struct DiskContext<'a> {
    id: String,
    path: &'a str,
    block: bool,
    bootindex: Option<u32>,
    address: String,
}

#[derive(Debug, Serialize)]
struct CdContext<'a> {
    id: String,
    /// `None`: the drive is empty.
    image: Option<&'a str>,
    /// For a URL.
    protocol: Option<&'a str>,
    bootindex: Option<u32>,
    bus: String,
}

#[derive(Debug, Serialize)]
struct NetworkContext<'a> {
    id: String,
    #[serde(rename = "type")]
    type_: &'static str,
    device: &'a str,
    mac: String,
    bridge: Option<&'a str>,
    net: Option<&'a str>,
    /// passt's.
    socket: Option<String>,
    address: String,
}

#[derive(Debug, Serialize)]
struct DisplayContext<'a> {
    outputs: u32,
    password: bool,
    spice: Option<SpiceContext<'a>>,
    vnc: Option<VncContext>,
}

#[derive(Debug, Serialize)]
struct SpiceContext<'a> {
    port: u16,
    streaming_video: Option<&'a str>,
    usb_redirects: u32,
}

#[derive(Debug, Serialize)]
struct VncContext {
    port: u16,
}

#[derive(Debug, Serialize)]
struct Sockets {
    monitor: String,
    agent: String,
    serial: String,
    guest_agent: String,
    vmop_agent: String,
    tpm: Option<String>,
}

/// A built-in template.
pub fn built_in(name: &str) -> Option<&'static str> {
    BUILT_IN.iter().find(|(built_in, _)| *built_in == name).map(|(_, text)| *text)
}

/// QEMU's arguments.
///
/// # Errors
/// If the configuration asks for something that does not exist yet, or the template is wrong.
pub fn qemu(
    config: &RunnerConfig,
    facts: &Facts,
    runtime: &RuntimeDir,
    name: &str,
    template: &str,
) -> Result<Vec<String>, Error> {
    let context = context(config, facts, runtime)?;
    let arguments = arguments(name, &render(name, template, &context)?)?;
    // Templates that are older than this type make something else of it.
    for socket in context.networks.iter().filter_map(|network| network.socket.as_deref()) {
        if !arguments.iter().any(|argument| argument.contains(socket)) {
            return Err(Error::Unsupported(format!(
                "the QEMU template {name} has nothing for a network of type pod: see how the built-in one connects {socket}"
            )));
        }
    }
    Ok(arguments)
}

/// The TPM emulator's arguments (swtpm(8)). It ends with QEMU's connection.
pub fn swtpm(state_dir: &Path, runtime: &RuntimeDir) -> Vec<String> {
    vec![
        "socket".into(),
        "--tpm2".into(),
        "--tpmstate".into(),
        format!("dir={}", state_dir.display()),
        "--ctrl".into(),
        format!("type=unixio,path={},mode=0600", runtime.tpm().display()),
        "--terminate".into(),
        "--flags".into(),
        "startup-clear".into(),
    ]
}

/// Files that passt may have open for itself and for connections, besides one for each port.
const PASST_FILES: u64 = 1000;

/// The last port that is forwarded to a guest with a pod network, if ports up to `wanted` are asked for: passt needs two open
/// files for each, and starts with all of them or not at all.
pub fn last_port(wanted: u16, open_files: Option<u64>) -> u16 {
    let possible = open_files.map_or(u64::MAX, |limit| limit.saturating_sub(PASST_FILES) / 2);
    wanted.min(u16::try_from(possible).unwrap_or(u16::MAX)).max(1)
}

/// passt's arguments (passt(1)). It gives the guest the Pod's own address, and the connections that come in for it on the ports
/// up to `last_port`. It ends with QEMU's connection.
pub fn passt(vm: &VmSection, last_port: u16, user: (u32, u32), runtime: &RuntimeDir) -> Vec<String> {
    // QEMU itself listens on these.
    let display = vm.display.spice.iter().map(|spice| spice.port).chain(vm.display.vnc.iter().map(|vnc| vnc.port));
    let ports = display.fold(format!("1-{last_port}"), |ports, port| format!("{ports},~{port}"));
    vec![
        "--foreground".into(),
        "--one-off".into(),
        "--quiet".into(),
        // The user that it is. Root would become nobody, which needs capabilities; passt gives up all rights in either case.
        "--runas".into(),
        format!("{}:{}", user.0, user.1),
        "--socket".into(),
        runtime.passt().display().to_string(),
        // The guest's gateway is a way into the network, not to what listens on localhost in the Pod.
        "--no-map-gw".into(),
        "--tcp-ports".into(),
        ports.clone(),
        "--udp-ports".into(),
        ports,
    ]
}

fn context<'a>(config: &'a RunnerConfig, facts: &'a Facts, runtime: &RuntimeDir) -> Result<Context<'a>, Error> {
    let vm = &config.vm;
    let (disks, cds) = drives(&vm.drives, &facts.block_devices)?;
    let networks = vm
        .network
        .iter()
        .zip(macs(&vm.network, &facts.uuid))
        .enumerate()
        .map(|(index, (network, mac))| network_context(index, network, mac, runtime))
        .collect::<Result<Vec<_>, _>>()?;
    if networks.iter().filter(|network| network.type_ == "pod").count() > 1 {
        return Err(Error::Unsupported("there is more than one network of type pod, but a Pod has one address".into()));
    }
    let socket = |path: std::path::PathBuf| path.display().to_string();
    Ok(Context {
        vm,
        machine: Machine {
            type_: &facts.machine_type,
            accelerator: facts.accelerator,
            // Emulation has no host to pass through; `max` is all that it can do.
            cpu_model: if facts.accelerator == "tcg" && vm.cpu_model == "host" { "max" } else { &vm.cpu_model },
            uuid: &facts.uuid,
            memory: vm.maximum_ram.bytes(),
        },
        firmware: FirmwareContext {
            code: facts.firmware.as_ref().map(|firmware| firmware.code.as_str()),
            vars: facts.firmware.as_ref().map(|firmware| firmware.vars.as_str()),
            secure: facts.firmware.as_ref().is_some_and(|firmware| firmware.secure),
        },
        disks,
        cds,
        cloud_init_disk: facts.cloud_init_disk.as_deref(),
        uses_bridge: networks.iter().any(|network| network.type_ == "tap"),
        networks,
        display: DisplayContext {
            outputs: vm.display.outputs,
            password: facts.display_password,
            spice: vm.display.spice.as_ref().map(|spice| SpiceContext {
                port: spice.port,
                streaming_video: spice.streaming_video.as_deref(),
                usb_redirects: spice.usb_redirects,
            }),
            vnc: vm.display.vnc.as_ref().map(|vnc| VncContext { port: vnc.port }),
        },
        sockets: Sockets {
            monitor: socket(runtime.monitor()),
            agent: socket(runtime.agent_monitor()),
            serial: socket(runtime.serial()),
            guest_agent: socket(runtime.guest_agent()),
            vmop_agent: socket(runtime.vmop_agent()),
            tpm: vm.use_tpm.then(|| socket(runtime.tpm())),
        },
    })
}

/// Drives are named and addressed by their place among those of their kind.
fn drives<'a>(drives: &'a [Drive], block: &[bool]) -> Result<(Vec<DiskContext<'a>>, Vec<CdContext<'a>>), Error> {
    let (mut disks, mut cds) = (Vec::new(), Vec::new());
    // Without an order the drives are tried in theirs. Left to itself, the firmware goes by PCI addresses and may end in
    // whatever is not meant to boot.
    let ordered = drives.iter().any(|drive| match drive {
        Drive::Raw { bootindex, .. } | Drive::IdeCd { bootindex, .. } => bootindex.is_some(),
    });
    for (place, drive) in (0..).zip(drives) {
        let by_place = if ordered { None } else { Some(place) };
        match drive {
            Drive::Raw { resource, bootindex, size: _ } => {
                let index = disks.len();
                disks.push(DiskContext {
                    id: format!("disk{index}"),
                    path: resource,
                    block: block.get(index).copied().unwrap_or_default(),
                    bootindex: bootindex.or(by_place),
                    address: address(0x8, index),
                });
            }
            Drive::IdeCd { file, bootindex } => {
                let index = cds.len();
                cds.push(CdContext {
                    id: format!("cd{index}"),
                    image: Some(file.as_str()).filter(|file| !file.is_empty()),
                    protocol: url_protocol(file)?,
                    bootindex: bootindex.or(by_place),
                    bus: format!("ide.{index}"),
                });
            }
        }
    }
    for (kind, number, most) in [("disks", disks.len(), DISK_ADDRESSES), ("CD drives", cds.len(), CD_PORTS)] {
        if number > most {
            return Err(Error::Unsupported(format!("there are {number} {kind}, but only {most} are possible")));
        }
    }
    Ok((disks, cds))
}

fn url_protocol(file: &str) -> Result<Option<&str>, Error> {
    match file.split_once("://") {
        None => Ok(None),
        Some((protocol @ ("http" | "https" | "ftp" | "ftps"), _)) => Ok(Some(protocol)),
        Some((protocol, _)) => {
            let message = format!("the CD image {file:?} has the protocol {protocol}; use http, https, ftp or ftps");
            Err(Error::Unsupported(message))
        }
    }
}

fn network_context<'a>(
    index: usize,
    network: &'a NetworkSection,
    mac: String,
    runtime: &RuntimeDir,
) -> Result<NetworkContext<'a>, Error> {
    let (type_, device, bridge, net) = match network {
        NetworkSection::Tap { device, bridge, .. } => ("tap", device, Some(bridge.as_str()), None),
        NetworkSection::User { device, net, .. } => ("user", device, None, net.as_deref()),
        NetworkSection::Pod { device, .. } => ("pod", device, None, None),
    };
    if index >= NETWORK_ADDRESSES {
        return Err(Error::Unsupported(format!("there are more than {NETWORK_ADDRESSES} networks")));
    }
    Ok(NetworkContext {
        id: format!("net{index}"),
        type_,
        // Users write the short names; the long ones say that it is a PCI card.
        device: if device == "virtio-net" { "virtio-net-pci" } else { device },
        mac,
        bridge,
        net,
        socket: (type_ == "pod").then(|| runtime.passt().display().to_string()),
        address: address(0x10, index),
    })
}

/// The MAC addresses that the guest sees, in the order of the networks: no two are the same, unless the configuration says so.
pub fn macs(networks: &[NetworkSection], uuid: &str) -> Vec<String> {
    let mut taken: Vec<String> = networks.iter().filter_map(|network| Some(network.mac()?.to_lowercase())).collect();
    let mut mac = |(index, network): (usize, &NetworkSection)| match network.mac() {
        Some(mac) => mac.to_owned(),
        None => {
            let (mut free, mut attempt) = (derived_mac(uuid, index, 0), 0);
            while taken.contains(&free) {
                attempt += 1;
                free = derived_mac(uuid, index, attempt);
            }
            taken.push(free.clone());
            free
        }
    };
    networks.iter().enumerate().map(&mut mac).collect()
}

/// A MAC address for a network that was given none: the same at each start, and different from other machines', or two of
/// them on one bridge would get each other's packets. 52:54:00 is what QEMU's own default begins with.
fn derived_mac(uuid: &str, index: usize, attempt: u32) -> String {
    let hash = match attempt {
        0 => Sha256::digest(format!("{uuid}/{index}")),
        _ => Sha256::digest(format!("{uuid}/{index}/{attempt}")),
    };
    format!("52:54:00:{:02x}:{:02x}:{:02x}", hash[0], hash[1], hash[2])
}

/// A PCI address on the root bus: eight functions in each slot from `first` on.
fn address(first: usize, index: usize) -> String {
    format!("{:x}.{}", first + index / 8, index % 8)
}

fn render(name: &str, template: &str, context: &Context<'_>) -> Result<String, Error> {
    let error = |error: minijinja::Error| {
        let what = error.detail().map_or_else(|| error.kind().to_string(), |what| format!("{}: {what}", error.kind()));
        Error::Template { name: error.name().unwrap_or(name).to_owned(), line: error.line().unwrap_or_default(), what }
    };
    let mut environment = Environment::new();
    environment.set_undefined_behavior(UndefinedBehavior::Strict);
    environment.set_fuel(Some(FUEL));
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(error)?);
    environment.add_filter("opt", |text: String| text.replace(',', ",,"));
    for (built_in, text) in BUILT_IN {
        // A user's template can extend the one that is built in, whatever its own name is.
        environment.add_template_owned(format!("builtin/{built_in}"), text).map_err(error)?;
    }
    environment.add_template_owned(name.to_owned(), template.to_owned()).map_err(error)?;
    environment
        .get_template(name)
        .and_then(|template| template.render(minijinja::Value::from(Serde(context))))
        .map_err(error)
}

fn arguments(name: &str, yaml: &str) -> Result<Vec<String>, Error> {
    let shape = |what: String| Error::Shape { name: name.to_owned(), what };
    let value: Value =
        serde_yaml::from_str(yaml).map_err(|error| Error::Yaml { name: name.to_owned(), what: error.to_string() })?;
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
