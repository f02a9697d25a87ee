//! The manifest of a VM, as it comes together from what the source says.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use super::source::Item;
use crate::{
    api::{GROUP, Quantity},
    exchange::Grade,
};

/// The most that the definition of the resource allows.
const CPUS: u64 = 1024;
const DISKS: usize = 64;
const NETWORKS: usize = 32;
/// The size of a disk whose source does not say it.
const UNKNOWN_SIZE: &str = "10Gi";

/// Where something is that has to be copied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// A file, or what else QEMU reads by a name, of the host that the VM comes from.
    File(String),
    /// A volume in a storage of Proxmox.
    Volume(String),
    /// A file of the node of a cluster on which the VM was.
    OnNode(String),
    /// Something without a path, in words.
    Words(String),
}

/// What is on a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// Nothing has to be copied.
    Empty,
    /// What is there.
    From(Place),
}

/// The network of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link<'a> {
    /// A bridge of the node.
    Bridge(&'a str),
    /// The Pod's network; user networking if the VM has one of that type already.
    Pod,
    /// User networking.
    User,
}

/// A disk whose content has to be copied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fill {
    /// The disk's name.
    pub disk: String,
    /// Where its content is.
    pub from: Place,
    /// Whether the source says the size.
    pub is_size_known: bool,
}

/// A disk that other VMs of the same text may have too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    /// What the source calls it.
    pub name: String,
    /// The name of the disk that it became.
    pub disk: String,
    /// The part that says so: its line, and what it is called.
    pub at: (usize, String),
}

/// A network card of the guest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Card {
    /// What the guest called it there, where that is known.
    pub before: Option<String>,
    /// Its MAC address in small letters, if it has one of its own.
    pub mac: Option<String>,
}

/// A file for the claim `VM-runner-data`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataFile {
    /// Where it is.
    pub from: Place,
    /// What it is called there.
    pub file: &'static str,
    /// For a firmware's variables: whether they are in a file of the format qcow2, and not on a volume or in a file as they are.
    pub variables: Option<bool>,
}

/// The size of a firmware's variables of 4 MiB (OVMF): volumes of other programs are larger.
pub const VARIABLES: u64 = 540_672;
/// What is said of variables of a firmware of 2 MiB.
pub const SMALL_VARIABLES: &str = "the firmware's variables can't be kept: they are of a firmware of 2 MiB, and the runner's image has one of 4 MiB; new ones \
     are made, in which entries of the boot menu and own Secure Boot keys are missing";

/// What is said of a part beside what it became.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// Its line.
    pub line: usize,
    /// What it is called.
    pub what: String,
    /// How well it is kept.
    pub grade: Grade,
    /// What there is to say.
    pub why: String,
}

/// A VM that comes together.
#[derive(Debug, Default)]
pub struct Draft {
    /// The name in the source.
    pub name: String,
    /// The namespace in the source.
    pub namespace: Option<String>,
    /// `metadata.labels`.
    pub labels: Map<String, Value>,
    /// `metadata.annotations`.
    pub annotations: Map<String, Value>,
    /// `spec`, without `vm`.
    pub spec: Map<String, Value>,
    /// `spec.vm`, without disks and networks.
    pub vm: Map<String, Value>,
    /// `spec.vm.disks`.
    pub disks: Vec<Value>,
    networks: Vec<Value>,
    /// Whether it has an interface on a bridge. Its Pod is then in the node's network, so it has none in the Pod's.
    pub has_bridge: bool,
    /// What has to be copied into disks.
    pub fills: Vec<Fill>,
    /// Disks that are not of this VM alone.
    pub origins: Vec<Origin>,
    /// Files for the claim `VM-runner-data`.
    pub data: Vec<DataFile>,
    /// The network cards, in the order of the networks.
    pub cards: Vec<Card>,
    /// What is said of parts beside what they became.
    pub notes: Vec<Note>,
}

impl Draft {
    /// Sets a field of `spec.vm`.
    pub fn set(&mut self, field: &str, value: impl Into<Value>) {
        self.vm.insert(field.into(), value.into());
    }

    /// A watchdog with an action of QEMU's `-action watchdog`. Returns what is said of it; `None`: the VM has no such action.
    pub fn watchdog(&mut self, action: &str) -> Option<String> {
        let action = match action {
            "reset" | "pause" | "none" => action,
            "poweroff" | "shutdown" => "poweroff",
            "debug" => "none",
            _ => return None,
        };
        self.set("watchdog", json!({ "action": action }));
        Some(format!("an iTCO watchdog, with spec.vm.watchdog.action: {action}"))
    }

    /// Says something of a part, beside what it became.
    pub fn note(&mut self, line: usize, what: &str, grade: Grade, why: impl Into<String>) {
        self.notes.push(Note { line, what: what.to_owned(), grade, why: why.into() });
    }

    /// Gives a network card a MAC address. False: its network has no setting for it.
    pub fn give_mac(&mut self, number: usize, mac: &str) -> bool {
        let network = self.networks.get_mut(number).and_then(Value::as_object_mut);
        let fields = network.and_then(|network| network.iter_mut().find(|(kind, _)| *kind != "user"));
        match fields {
            Some((_, fields)) => {
                fields["mac"] = json!(mac);
                true
            }
            None => false,
        }
    }

    /// Gives the disk that was added last its serial number. False: a disk can't have this one.
    pub fn serial(&mut self, serial: &str) -> bool {
        let is_valid = (1..=20).contains(&serial.len())
            && serial.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
        match self.disks.last_mut() {
            Some(disk) if is_valid && disk.get("volumeClaimTemplate").is_some() => {
                disk["serial"] = json!(serial);
                true
            }
            _ => false,
        }
    }

    /// Sets the CPUs: at most so many, and so many of them at the start.
    pub fn cpus(&mut self, item: &Item, maximum: u64, current: Option<u64>) {
        let most = maximum.clamp(1, CPUS);
        self.set("maximumCpus", most);
        if most == maximum {
            item.same(format!("spec.vm.maximumCpus: {most}"));
        } else {
            item.changed(format!("spec.vm.maximumCpus: {most}, because a VM has 1 to {CPUS} CPUs"));
        }
        if let Some(current) = current.filter(|current| (1..most).contains(current)) {
            self.set("currentCpus", current);
        }
    }

    /// The CPUs that it has at most.
    pub fn most_cpus(&self) -> u64 {
        let topology = self.vm.get("cpuTopology").and_then(Value::as_object);
        let of_topology = topology.map(|levels| levels.values().filter_map(Value::as_u64).product());
        of_topology.or_else(|| self.vm.get("maximumCpus")?.as_u64()).unwrap_or(1)
    }

    /// Sets the topology, if a VM can have it.
    pub fn topology(&mut self, sockets: u64, dies: u64, cores: u64, threads: u64) -> bool {
        let levels = [(sockets, 64), (dies, 64), (cores, 1024), (threads, 8)];
        // Each level first: the source may have any numbers.
        if levels.iter().any(|(level, most)| *level < 1 || level > most) {
            return false;
        }
        let cpus = levels.iter().map(|(level, _)| level).product::<u64>();
        if cpus > CPUS {
            return false;
        }
        let current = self.vm.remove("currentCpus").or_else(|| self.vm.get("maximumCpus").cloned());
        self.vm.remove("maximumCpus");
        let mut topology =
            json!({ "sockets": sockets, "diesPerSocket": dies, "coresPerDie": cores, "threadsPerCore": threads });
        if let Some(map) = topology.as_object_mut() {
            map.retain(|level, number| level == "sockets" || *number != json!(1));
        }
        self.set("cpuTopology", topology);
        if let Some(current) = current.filter(|current| current.as_u64().is_some_and(|it| (1..cpus).contains(&it))) {
            self.set("currentCpus", current);
        }
        true
    }

    /// Sets the memory in bytes: at most so much. False: a VM can't have that.
    pub fn ram(&mut self, maximum: u64, current: Option<u64>) -> bool {
        if !(1 << 20..=1 << 50).contains(&maximum) {
            return false;
        }
        self.set("maximumRam", size(maximum));
        if let Some(current) = current.filter(|current| (1 << 20..maximum).contains(current)) {
            self.set("currentRam", size(current));
        }
        true
    }

    /// Sets the CPU model and its features, in QEMU's words. False: these are no words.
    pub fn cpu_model(&mut self, model: &str) -> bool {
        let is_valid = !model.is_empty() && model.len() <= 4096 && !model.contains(char::is_control);
        if is_valid {
            self.set("cpuModel", model);
        }
        is_valid
    }

    /// Whether it has so many disks and CD drives as a VM can have.
    pub fn is_full(&self) -> bool {
        self.disks.len() >= DISKS
    }

    /// Adds a disk and returns its name. None: the VM has too many.
    pub fn disk(&mut self, wanted: &str, bytes: Option<u64>, content: Content) -> Option<String> {
        if self.is_full() {
            return None;
        }
        let taken: BTreeSet<String> = self.disks.iter().filter_map(disk_name).map(str::to_owned).collect();
        let name = word(wanted, 50).unwrap_or_else(|| "disk".into());
        let numbered = (2..).map(|number| format!("{name}-{number}"));
        let name = std::iter::once(name.clone()).chain(numbered).find(|name| !taken.contains(name))?;
        let bytes = bytes.filter(|bytes| (1..=1 << 60).contains(bytes));
        let storage = bytes.map_or_else(|| json!(UNKNOWN_SIZE), |bytes| size(bytes.div_ceil(1 << 20) << 20));
        let claim =
            json!({ "metadata": { "name": name }, "spec": { "resources": { "requests": { "storage": storage } } } });
        self.disks.push(json!({ "volumeClaimTemplate": claim }));
        if let Content::From(from) = content {
            self.fills.push(Fill { disk: name.clone(), from, is_size_known: bytes.is_some() });
        }
        Some(name)
    }

    /// Notes what the source calls a disk, for VMs that have the same.
    pub fn origin(&mut self, name: impl Into<String>, disk: &str, item: &Item) {
        self.origins.push(Origin { name: name.into(), disk: disk.to_owned(), at: (item.line, item.label.clone()) });
    }

    /// Lets the template set import-disk fill a disk.
    pub fn import(&mut self, disk: &str, mut source: Value) {
        self.spec.insert("templates".into(), json!({ "set": "import-disk" }));
        let values = self.spec.entry("templateValues").or_insert_with(|| json!({}));
        match values.get_mut("import") {
            Some(first) => first["disks"][disk] = source,
            None => {
                // The set's default.
                if disk != "system" {
                    source["disk"] = json!(disk);
                }
                values["import"] = source;
            }
        }
    }

    /// Adds a CD drive. False: the VM has too many, or this is no name of a CD.
    pub fn cd(&mut self, image: &str) -> bool {
        let is_valid = !self.is_full() && image.len() <= 4096 && !image.contains(char::is_control);
        if is_valid {
            self.disks.push(json!({ "cdrom": { "image": image } }));
        }
        is_valid
    }

    /// Why there is no room for another interface.
    pub fn no_network(&self) -> &'static str {
        if self.has_bridge && self.networks.len() < NETWORKS {
            "a VM with a bridge of its node has no other kinds of networks, which would lead its guest into the node: connect it to a bridge, too"
        } else {
            "a VM has at most 32 networks"
        }
    }

    /// Adds an interface, and says of which network it is. None: the VM can't have it ([`Draft::no_network`]).
    pub fn network(&mut self, link: Link<'_>, device: Option<&str>, mac: Option<&str>) -> Option<String> {
        if self.networks.len() >= NETWORKS || self.has_bridge && !matches!(link, Link::Bridge(_)) {
            return None;
        }
        let has_pod = self.networks.iter().any(|network| network.get("pod").is_some());
        let mut fields = json!({});
        if let Some(device) = device {
            fields["device"] = json!(device);
        }
        if let Some(mac) = mac.filter(|_| !matches!(link, Link::User)) {
            fields["mac"] = json!(mac);
        }
        let (kind, words) = match link {
            Link::Bridge(bridge) => {
                fields["bridge"] = json!(bridge);
                ("tap", format!("the bridge {bridge} of the node"))
            }
            Link::Pod if !has_pod => ("pod", "the Pod's network".to_owned()),
            Link::Pod | Link::User => {
                if let Some(fields) = fields.as_object_mut() {
                    fields.remove("mac");
                }
                ("user", "user networking".to_owned())
            }
        };
        self.networks.push(json!({ kind: fields }));
        Some(words)
    }

    /// The manifest.
    pub fn manifest(&self, name: &str, namespace: Option<&str>) -> Value {
        let mut metadata = json!({ "name": name });
        if let Some(namespace) = namespace.or(self.namespace.as_deref()) {
            metadata["namespace"] = json!(namespace);
        }
        for (field, map) in [("labels", &self.labels), ("annotations", &self.annotations)] {
            if !map.is_empty() {
                metadata[field] = json!(map);
            }
        }
        let mut vm = self.vm.clone();
        if !vm.contains_key("maximumCpus") && !vm.contains_key("cpuTopology") {
            vm.insert("maximumCpus".into(), json!(1));
        }
        vm.insert("networks".into(), json!(self.networks));
        vm.insert("disks".into(), json!(self.disks));
        let mut spec = self.spec.clone();
        spec.insert("vm".into(), vm.into());
        json!({ "apiVersion": format!("{GROUP}/v1"), "kind": "VirtualMachine", "metadata": metadata, "spec": spec })
    }
}

/// The name of a disk of the manifest.
pub fn disk_name(disk: &Value) -> Option<&str> {
    disk.pointer("/volumeClaimTemplate/metadata/name")?.as_str()
}

/// A number of bytes as Kubernetes writes it.
pub fn size(bytes: u64) -> Value {
    json!(Quantity::with_unit(bytes).to_string())
}

/// The text as a name of Kubernetes, if it has letters or digits: lower case, and everything else is a hyphen.
pub fn word(text: &str, longest: usize) -> Option<String> {
    let mut word = String::new();
    for letter in text.chars().flat_map(char::to_lowercase) {
        match letter {
            'a'..='z' | '0'..='9' => word.push(letter),
            _ if word.is_empty() || word.ends_with('-') => {}
            _ => word.push('-'),
        }
        if word.len() >= longest {
            break;
        }
    }
    let word = word.trim_end_matches('-');
    (!word.is_empty()).then(|| word.to_owned())
}

/// Whether an interface can have this MAC address.
pub fn is_mac(text: &str) -> bool {
    let parts: Vec<&str> = text.split(':').collect();
    parts.len() == 6
        && parts.iter().all(|part| part.len() == 2 && u8::from_str_radix(part, 16).is_ok())
        && u8::from_str_radix(parts[0], 16).is_ok_and(|first| first % 2 == 0)
        && text.bytes().all(|byte| byte == b':' || byte.is_ascii_hexdigit())
}

/// A UUID with its hyphens, from one with or without them.
pub fn uuid(text: &str) -> Option<String> {
    let digits: String = text.chars().filter(|letter| *letter != '-').collect();
    let is_uuid = digits.len() == 32 && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_uuid.then(|| [&digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..]].join("-"))
}

/// The network cards of QEMU that a VM can have as they are (`-device help`).
pub fn card(model: &str) -> Option<&'static str> {
    const CARDS: [&str; 9] =
        ["e1000", "e1000e", "rtl8139", "vmxnet3", "ne2k_pci", "pcnet", "igb", "i82551", "virtio-net-pci"];
    CARDS.iter().find(|card| **card == model).copied()
}

/// Whether a time zone is one that `spec.vm.rtcTimezone` takes.
pub fn is_zone(text: &str) -> bool {
    text.len() <= 64
        && text.starts_with(|letter: char| letter.is_ascii_alphabetic())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_+/-".contains(&byte))
}
