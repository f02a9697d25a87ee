//! What two configurations of a VM differ in: what QEMU takes only at its start, and what the running VM takes.
//!
//! The agent changes CPUs, memory, CDs and the user who is logged in in the running VM, and the machine role reads the powerdown timeout when it
//! needs it. All else waits. It is said device by device: a device is the same in both if it has the same slot, whatever place in the list it has.

use serde_json::{Map, Value, json};

use super::{Drive, NetworkSection, VmSection};
use crate::api::{
    PendingChange, Subject, WatchdogAction, pending,
    status::{DeviceChange, DeviceKind},
};

/// What people call the watchdog: the name that its drivers have in common.
const WATCHDOG: &str = "itco";

/// A difference that the running VM takes.
#[derive(Clone, Debug, PartialEq)]
pub struct AtOnce {
    /// The path in `config.yaml`, such as `vm.currentCpus`.
    pub path: String,
    /// The value in the former configuration.
    pub current: Option<Value>,
    /// The value in the new one.
    pub wanted: Option<Value>,
}

/// The fields of the section `vm` that a running VM takes, but for those of devices and the display.
const LIVE: [&str; 4] = ["name", "currentCpus", "currentRam", "powerdownTimeout"];

/// What `wanted` has otherwise than `current` while the VM runs.
pub fn at_once(current: &VmSection, wanted: &VmSection) -> Vec<AtOnce> {
    let section = |vm: &VmSection| json!(VmSection { drives: Vec::new(), network: Vec::new(), ..vm.clone() });
    let (one, other) = (section(current), section(wanted));
    let user = |vm: &VmSection| json!(vm.display.logged_in_user);
    let (drives, networks) = ((drives(current), drives(wanted)), (networks(current), networks(wanted)));
    let live = |devices: &[Device], key| devices.iter().find(|it| it.key == key).map(|it| it.live.clone());
    let of_devices = |list: &'static str, (current, wanted): (Vec<Device>, Vec<Device>)| {
        wanted.into_iter().filter_map(move |device| {
            Some((format!("vm.{list}[{}]", device.name), live(&current, device.key)?, device.live))
        })
    };
    let of_fields = LIVE.map(|name| (format!("vm.{name}"), one[name].clone(), other[name].clone()));
    let of_display = ("vm.display.loggedInUser".to_owned(), user(current), user(wanted));
    let all = of_fields.into_iter().chain([of_display]);
    let all = all.chain(of_devices("drives", drives)).chain(of_devices("network", networks));
    let value = |value: Value| Some(value).filter(|value| !value.is_null());
    let differing = all.filter(|(_, current, wanted)| current != wanted);
    differing.map(|(path, now, then)| AtOnce { path, current: value(now), wanted: value(then) }).collect()
}

/// What `wanted` has otherwise than `current` at QEMU's start.
pub fn at_start(current: &VmSection, wanted: &VmSection) -> Vec<PendingChange> {
    let of_fields = differences(&fields(current), &fields(wanted)).into_iter().map(|(name, current, wanted)| {
        let path = format!("vm.{name}");
        let subject = match name.as_str() {
            "maximumCpus" => Subject::MaximumCpus,
            "maximumRam" => Subject::MaximumRam,
            _ => Subject::Setting(name),
        };
        of_qemu(subject, &path, current, wanted)
    });
    let of_drives = devices("drives", &drives(current), &drives(wanted));
    let of_networks = devices("network", &networks(current), &networks(wanted));
    let mut changes = Vec::new();
    // A disk and a CD drive can have the same name, and a device that goes the number of one that comes.
    pending::add(&mut changes, of_fields.chain(of_drives).chain(of_networks));
    changes
}

/// Another QEMU template.
pub fn template(current: Option<Value>, wanted: Option<Value>) -> PendingChange {
    of_qemu(Subject::QemuTemplate, "template", current, wanted)
}

/// Other QEMU templates in the VM's set, or other values of them. The texts are too long to be said.
pub fn qemu_file() -> PendingChange {
    of_qemu(Subject::QemuTemplate, "qemuTemplates", None, None)
}

/// A change of `config.yaml` that waits for QEMU's start.
fn of_qemu(subject: Subject, path: &str, current: Option<Value>, wanted: Option<Value>) -> PendingChange {
    let reason = "QEMU reads it at its start".into();
    PendingChange { path: format!("config.yaml/{path}"), subject: Some(subject), current, wanted, reason }
}

/// Other data for cloud-init. They may contain secrets, and a hash would help to guess them.
pub fn cloud_init() -> PendingChange {
    PendingChange {
        path: "cloud-init".into(),
        subject: Some(Subject::CloudInit),
        current: None,
        wanted: None,
        reason: "the guest reads it when it boots".into(),
    }
}

/// A field's name, and its values now and afterwards.
pub type NamedField = (String, Option<Value>, Option<Value>);

/// The fields in which two maps differ.
pub fn differences(current: &Map<String, Value>, wanted: &Map<String, Value>) -> Vec<NamedField> {
    let names = current.keys().chain(wanted.keys().filter(|name| !current.contains_key(*name)));
    let differing = names.filter(|name| current.get(*name) != wanted.get(*name));
    differing.map(|name| (name.clone(), current.get(name).cloned(), wanted.get(name).cloned())).collect()
}

/// A device that QEMU has, or gets at its next start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attachment {
    /// Its kind.
    pub kind: DeviceKind,
    /// Its slot.
    pub slot: u32,
    /// What people call it.
    pub name: String,
    /// Whether QEMU has it.
    pub is_attached: bool,
    /// What the next start changes of it.
    pub at_next_start: Option<DeviceChange>,
}

/// All devices that have a name, of QEMU as it was started with `current` and of its next start with `wanted`: those of `wanted` in their order, then
/// those that go.
pub fn attachments(current: &VmSection, wanted: &VmSection) -> Vec<Attachment> {
    let all = |vm: &VmSection| drives(vm).into_iter().chain(networks(vm)).chain(watchdog(vm)).collect::<Vec<_>>();
    let (current, wanted) = (all(current), all(wanted));
    let attachment = |Pair { device, now, then }: Pair<'_>| {
        let at_next_start = match (now, then) {
            (None, _) => Some(DeviceChange::Attach),
            (Some(_), None) => Some(DeviceChange::Detach),
            (Some(now), Some(then)) => (now != then).then_some(DeviceChange::Change),
        };
        let (kind, slot) = device.key;
        Attachment { kind, slot, name: device.name.clone(), is_attached: now.is_some(), at_next_start }
    };
    pairs(&current, &wanted).map(attachment).collect()
}

/// A device as QEMU gets it at its start.
struct Device {
    /// Its kind and slot. A slot is taken once in each kind.
    key: (DeviceKind, u32),
    /// What people call it.
    name: String,
    value: Value,
    /// What of it changes while the VM runs.
    live: Value,
}

impl Device {
    /// What a pending change of it is about.
    fn subject(&self) -> Subject {
        let name = self.name.clone();
        match self.key.0 {
            DeviceKind::Disk => Subject::Disk(name),
            DeviceKind::CdDrive => Subject::CdDrive(name),
            DeviceKind::Network => Subject::Network(name),
            DeviceKind::Watchdog => Subject::Setting(name),
        }
    }
}

/// The drives in the order of the configuration, which is the order in which they boot if none has a place in it.
fn drives(vm: &VmSection) -> Vec<Device> {
    let (mut disks, mut cds) = (0.., 0..);
    let drives = vm.drives.iter().map(|drive| {
        let is_cd = drive.cd().is_some();
        let number = if is_cd { cds.next() } else { disks.next() }.unwrap_or_default();
        let name = drive.label(number);
        let key = (if is_cd { DeviceKind::CdDrive } else { DeviceKind::Disk }, drive.slot(number));
        let mut drive = drive.clone();
        let live = match &mut drive {
            Drive::IdeCd { file, name, .. } => json!({ "file": std::mem::take(file), "name": name.take() }),
            // A disk grows, and is never made smaller.
            Drive::Raw { size, .. } => size.take().map_or(Value::Null, |size| json!({ "size": size })),
            Drive::Qcow2 { .. } => Value::Null,
        };
        drive.place(usize::MAX, key.1);
        Device { key, name, value: json!(drive), live }
    });
    drives.collect()
}

fn networks(vm: &VmSection) -> Vec<Device> {
    let networks = vm.network.iter().enumerate().map(|(index, network)| {
        let name = network.name().map_or_else(|| index.to_string(), str::to_owned);
        let slot = network.slot(index);
        let live = json!({ "name": network.name() });
        let mut network = network.clone();
        NetworkSection::forget_name(&mut network);
        network.place(usize::MAX, slot);
        Device { key: (DeviceKind::Network, slot), name, value: json!(network), live }
    });
    networks.collect()
}

/// The watchdog of the chipset, by what happens when it is not fed. Of the fields that say it `status.pendingChanges` speaks ([`fields`]).
fn watchdog(vm: &VmSection) -> Option<Device> {
    let action = vm.watchdog.map(|watchdog| watchdog.action).or_else(|| vm.on_panic.map(WatchdogAction::from))?;
    Some(Device { key: (DeviceKind::Watchdog, 0), name: WATCHDOG.into(), value: json!(action), live: Value::Null })
}

/// A device in two configurations.
struct Pair<'a> {
    /// As the new one has it, or else the former one.
    device: &'a Device,
    /// What QEMU has.
    now: Option<&'a Value>,
    /// What it gets at its start.
    then: Option<&'a Value>,
}

/// The devices of both lists: those of `wanted` in their order, then those that go.
fn pairs<'a>(current: &'a [Device], wanted: &'a [Device]) -> impl Iterator<Item = Pair<'a>> {
    let find = |devices: &'a [Device], key| devices.iter().find(|it| it.key == key);
    let of_wanted = wanted.iter().map(move |device| {
        let now = find(current, device.key).map(|it| &it.value);
        Pair { device, now, then: Some(&device.value) }
    });
    let gone = current.iter().filter(move |device| find(wanted, device.key).is_none());
    of_wanted.chain(gone.map(|device| Pair { device, now: Some(&device.value), then: None }))
}

/// The devices of a list that differ, and, if those that stay are in another order, that.
fn devices(list: &str, current: &[Device], wanted: &[Device]) -> Vec<PendingChange> {
    let differing = pairs(current, wanted).filter(|pair| pair.now != pair.then);
    let change = |Pair { device, now, then }: Pair<'_>| {
        let path = format!("vm.{list}[{}]", device.name);
        of_qemu(device.subject(), &path, now.cloned(), then.cloned())
    };
    let mut found: Vec<PendingChange> = differing.map(change).collect();
    let order = |devices: &[Device], others: &[Device]| -> Vec<_> {
        devices.iter().map(|device| device.key).filter(|key| others.iter().any(|other| other.key == *key)).collect()
    };
    if order(current, wanted) != order(wanted, current) {
        let names = |devices: &[Device]| Some(devices.iter().map(|device| json!(device.name)).collect());
        found.push(of_qemu(Subject::Setting(list.into()), &format!("vm.{list}"), names(current), names(wanted)));
    }
    found
}

/// The fields that QEMU reads at its start, but for the devices in lists.
fn fields(vm: &VmSection) -> Map<String, Value> {
    let mut vm = VmSection { drives: Vec::new(), network: Vec::new(), ..vm.clone() };
    vm.display.logged_in_user = None;
    let Value::Object(mut fields) = json!(vm) else { return Map::new() };
    for other in LIVE.into_iter().chain(["drives", "network"]) {
        fields.remove(other);
    }
    fields
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runner_config::RunnerConfig;

    fn vm(more: &str) -> VmSection {
        RunnerConfig::parse(&format!("/Runner: {{ namespace: orchard, vm: {{ name: apple, {more} }} }}")).unwrap().vm
    }

    fn found(current: &str, wanted: &str) -> Vec<(String, Subject)> {
        let named = |it: PendingChange| (it.path.replace("config.yaml/", ""), it.subject.unwrap());
        at_start(&vm(current), &vm(wanted)).into_iter().map(named).collect()
    }

    #[test]
    fn what_the_agent_changes_is_no_difference() {
        for (current, wanted) in [
            ("currentCpus: 1, maximumCpus: 4", "currentCpus: 4, maximumCpus: 4"),
            ("currentRam: 1Gi, maximumRam: 2Gi", "currentRam: 2Gi, maximumRam: 2Gi"),
            ("powerdownTimeout: 5", "powerdownTimeout: 6"),
            ("display: { loggedInUser: ann }", "display: { loggedInUser: bob }"),
            ("drives: [{ type: ide-cd, file: a }]", "drives: [{ type: ide-cd, file: b, name: tools }]"),
            ("drives: [{ type: raw, resource: a, size: 512 }]", "drives: [{ type: raw, resource: a, size: 1024 }]"),
            // The first has the slot of its place although it is not written.
            ("drives: [{ type: ide-cd, file: a }]", "drives: [{ type: ide-cd, file: a, slot: 0 }]"),
            ("network: [{ type: pod, device: d }]", "network: [{ type: pod, device: d, name: lan, slot: 0 }]"),
        ] {
            assert_eq!(found(current, wanted), [], "{current} -> {wanted}");
            let is_written = !current.contains(", slot: 0") && !wanted.contains("a, slot: 0");
            assert_eq!(at_once(&vm(current), &vm(wanted)).len(), usize::from(is_written), "{current} -> {wanted}");
        }
    }

    #[test]
    fn a_difference_is_said_of_its_device_and_of_no_other() {
        let setting = |path: &str| (format!("vm.{path}"), Subject::Setting(path.into()));
        let disk = |name: &str| (format!("vm.drives[{name}]"), Subject::Disk(name.into()));
        let cd = |name: &str| (format!("vm.drives[{name}]"), Subject::CdDrive(name.into()));
        let net = |name: &str| (format!("vm.network[{name}]"), Subject::Network(name.into()));
        let (a, b) = ("{ type: raw, resource: /dev/a-disk }", "{ type: raw, resource: /dev/b-disk, slot: 1 }");
        let boots = "{ type: raw, resource: /dev/b-disk, slot: 1, bootindex: 0 }";
        let (tools, nameless) = ("{ type: ide-cd, file: x, name: tools, slot: 1 }", "{ type: ide-cd, file: x }");
        let drives = |drives: &[&str]| format!("drives: [{}]", drives.join(", "));
        let networks = |networks: &[&str]| format!("network: [{}]", networks.join(", "));
        for (current, wanted, expected) in [
            ("maximumCpus: 2".into(), "maximumCpus: 4".into(), vec![("vm.maximumCpus".into(), Subject::MaximumCpus)]),
            ("maximumRam: 2Gi".into(), "maximumRam: 4Gi".into(), vec![("vm.maximumRam".into(), Subject::MaximumRam)]),
            ("useTpm: true".into(), String::new(), vec![setting("useTpm")]),
            (String::new(), "onPanic: keep".into(), vec![setting("onPanic")]),
            (drives(&[a]), drives(&[a, b]), vec![disk("b-disk")]),
            (drives(&[a, b]), drives(&[b]), vec![disk("a-disk")]),
            (drives(&[a, b]), drives(&[a, boots]), vec![disk("b-disk")]),
            // One comes, and one goes.
            (drives(&[a]), drives(&[b, tools]), vec![disk("b-disk"), cd("tools"), disk("a-disk")]),
            (drives(&[nameless]), drives(&[nameless, tools]), vec![cd("tools")]),
            // Only the order in which they boot.
            (drives(&[a, b]), drives(&[b, "{ type: raw, resource: /dev/a-disk, slot: 0 }"]), vec![setting("drives")]),
            // Another disk in the same slot.
            (drives(&[a]), drives(&["{ type: raw, resource: /dev/c-disk }"]), vec![disk("c-disk")]),
            (
                networks(&["{ type: pod, device: d }"]),
                networks(&["{ type: pod, device: e }", "{ type: pod, device: d, name: lan }"]),
                vec![net("0"), net("lan")],
            ),
        ] {
            assert_eq!(found(&current, &wanted), expected, "{current} -> {wanted}");
        }
    }

    #[test]
    fn each_device_says_whether_qemu_has_it_and_what_the_next_start_changes() {
        let said = |current: &str, wanted: &str| {
            let words = |it: Attachment| {
                let change = it.at_next_start.map(|change| format!(" {change:?}")).unwrap_or_default();
                format!("{:?} {}{}{change}", it.kind, it.name, if it.is_attached { " attached" } else { "" })
            };
            attachments(&vm(current), &vm(wanted)).into_iter().map(words).collect::<Vec<_>>().join(", ")
        };
        let (a, b) = ("{ type: raw, resource: /dev/a-disk }", "{ type: raw, resource: /dev/b-disk, slot: 1 }");
        for (current, wanted, expected) in [
            (format!("drives: [{a}]"), format!("drives: [{a}]"), "Disk a-disk attached"),
            // Another CD is in the drive at once.
            (
                "drives: [{ type: ide-cd, file: x }]".into(),
                "drives: [{ type: ide-cd, file: y }]".into(),
                "CdDrive 0 attached",
            ),
            (format!("drives: [{a}]"), format!("drives: [{a}, {b}]"), "Disk a-disk attached, Disk b-disk Attach"),
            (
                format!("drives: [{a}, {b}]"),
                format!("drives: [{b}]"),
                "Disk b-disk attached, Disk a-disk attached Detach",
            ),
            (
                "network: [{ type: pod, device: d }]".into(),
                "network: [{ type: pod, device: e, name: lan, slot: 0 }]".into(),
                "Network lan attached Change",
            ),
            (String::new(), "watchdog: { action: reset }".into(), "Watchdog itco Attach"),
            ("watchdog: { action: reset }".into(), String::new(), "Watchdog itco attached Detach"),
            (
                "watchdog: { action: reset }".into(),
                "watchdog: { action: pause }".into(),
                "Watchdog itco attached Change",
            ),
            // The fields differ, and it does the same.
            ("onPanic: restart".into(), "watchdog: { action: reset }".into(), "Watchdog itco attached"),
            ("onPanic: keep, watchdog: {}".into(), "onPanic: stop, watchdog: {}".into(), "Watchdog itco attached"),
        ] {
            assert_eq!(said(&current, &wanted), expected, "{current} -> {wanted}");
        }
    }

    /// The API server refuses a report that has one twice.
    #[test]
    fn no_path_is_twice_whatever_devices_are_called() {
        for (current, wanted, paths) in [
            (
                "drives: []",
                "drives: [{ type: raw, resource: /dev/data-disk }, { type: ide-cd, file: x, name: data-disk }]",
                ["vm.drives[data-disk]", "vm.drives[data-disk]#2"],
            ),
            // The drive that goes and the one that comes are both the first of those without names.
            (
                "drives: [{ type: ide-cd, file: x }]",
                "drives: [{ type: ide-cd, file: x, slot: 1 }]",
                ["vm.drives[0]", "vm.drives[0]#2"],
            ),
            (
                "network: []",
                "network: [{ type: pod, device: d, name: \"1\" }, { type: pod, device: d }]",
                ["vm.network[1]", "vm.network[1]#2"],
            ),
        ] {
            let found = found(current, wanted);
            assert_eq!(found.iter().map(|(path, _)| path).collect::<Vec<_>>(), paths, "{current} -> {wanted}");
        }
    }
}
