//! What the agent changes on the running machine: the wanted state and the machine's own go in, commands come out. And what
//! it can't change, which waits for QEMU's next start. Pure.

use serde_json::{Map, Value, json};

use super::{
    config::{Configuration, Password},
    files::{MachineState, Started},
    qmp::Slot,
};
use crate::{
    api::PendingChange,
    runner_config::{Drive, VmSection},
};

/// What the configuration wants of a running machine.
#[derive(Clone, Debug, PartialEq)]
pub struct Wanted {
    /// CPUs.
    pub cpus: usize,
    /// Memory in bytes.
    pub ram: u64,
    /// The display's protocol (`spice` or `vnc`) and password.
    pub password: Option<(&'static str, Password)>,
    /// The images in the CD drives, in their order; `None`: an empty drive.
    pub cds: Vec<Option<String>>,
    /// When it grows, the machine is reset.
    pub reset_counter: u64,
}

impl From<&Configuration> for Wanted {
    fn from(Configuration { config, password, .. }: &Configuration) -> Self {
        let vm = &config.vm;
        Self {
            cpus: usize::try_from(vm.current_cpus).unwrap_or(usize::MAX),
            ram: vm.current_ram.as_ref().unwrap_or(&vm.maximum_ram).bytes(),
            password: vm.display.protocol().zip(password.clone()),
            cds: cds(&vm.drives),
            reset_counter: config.reset_counter,
        }
    }
}

fn cds(drives: &[Drive]) -> Vec<Option<String>> {
    let cds = drives.iter().filter_map(|drive| match drive {
        Drive::IdeCd { file, .. } => Some(Some(file.clone()).filter(|file| !file.is_empty())),
        Drive::Raw { .. } => None,
    });
    cds.collect()
}

/// A CD drive, as `query-block` tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cd {
    /// Its name in the QEMU template: `cd` and its place among the CD drives.
    pub id: String,
    /// The image in it.
    pub file: Option<String>,
}

/// The CD drives in what `query-block` answers.
pub fn cd_drives(blocks: &Value) -> Vec<Cd> {
    let drives = blocks.as_array().into_iter().flatten().filter_map(|block| {
        // The drive's name, or the path of a drive without one.
        let id = block["qdev"].as_str()?.rsplit('/').next()?;
        id.strip_prefix("cd")?.parse::<usize>().ok()?;
        Some(Cd { id: id.to_owned(), file: block["inserted"]["file"].as_str().map(str::to_owned) })
    });
    drives.collect()
}

/// The machine, as far as it is known.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Known {
    /// Places for CPUs.
    pub slots: Vec<Slot>,
    /// The memory that the guest was told to have; `None`: not told by this agent.
    pub ram: Option<u64>,
    /// The password that was set by this agent.
    pub password: Option<Password>,
    /// The CD drives.
    pub cds: Vec<Cd>,
    /// The counter as it was when QEMU was started, or when the machine was reset last.
    pub reset_counter: Option<u64>,
}

/// A command to QEMU.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// `device_add` of a CPU.
    Plug {
        /// The CPU's name.
        id: String,
        /// Where.
        slot: Slot,
    },
    /// `device_del` of a CPU. The guest has to agree, so this is a request.
    Unplug {
        /// The CPU's name.
        id: String,
    },
    /// `balloon`.
    Balloon(u64),
    /// `set_password` and `expire_password`.
    Password(&'static str, Password),
    /// `blockdev-change-medium`.
    Insert {
        /// The drive.
        id: String,
        /// The image.
        file: String,
    },
    /// `blockdev-remove-medium`, the tray being open.
    Eject {
        /// The drive.
        id: String,
    },
    /// `system_reset`, for this counter.
    Reset(u64),
}

/// CPUs that the agent plugged are named so, which is also how they can be unplugged: those of QEMU's start have no name. The
/// standard template starts with one.
const CPU_PREFIX: &str = "vmop-cpu-";
/// Named devices are below this in QEMU's object tree.
const NAMED: &str = "/machine/peripheral/";

/// What has to be changed, in order. Reset comes last, so that the guest starts anew with all the rest.
pub fn changes(wanted: &Wanted, known: &Known) -> Vec<Change> {
    let mut changes = cpu_changes(wanted.cpus, &known.slots);
    if known.ram != Some(wanted.ram) {
        changes.push(Change::Balloon(wanted.ram));
    }
    if let Some((protocol, password)) = &wanted.password
        && known.password.as_ref() != Some(password)
    {
        changes.push(Change::Password(protocol, password.clone()));
    }
    for (number, file) in wanted.cds.iter().enumerate() {
        let id = format!("cd{number}");
        // A drive that QEMU was not started with waits for the next start.
        match known.cds.iter().find(|cd| cd.id == id).map(|cd| &cd.file) {
            Some(inserted) if inserted != file => changes.push(match file.clone() {
                Some(file) => Change::Insert { id, file },
                None => Change::Eject { id },
            }),
            _ => {}
        }
    }
    if known.reset_counter.is_some_and(|known| wanted.reset_counter > known) {
        changes.push(Change::Reset(wanted.reset_counter));
    }
    changes
}

/// Changes of the configuration that QEMU, or the guest, takes at its start only.
pub fn pending(machine: &MachineState, wanted: &Configuration) -> Vec<PendingChange> {
    let Some(started) = &machine.started_with else { return Vec::new() };
    let wanted = Started::from(wanted);
    let started_vm = at_start(&started.vm, machine);
    let wanted_vm = at_start(&wanted.vm, machine);
    let names = started_vm.keys().chain(wanted_vm.keys().filter(|name| !started_vm.contains_key(*name)));
    let of_vm = names
        .map(|name| (format!("config.yaml/vm.{name}"), started_vm.get(name).cloned(), wanted_vm.get(name).cloned()));
    let text = |text: &Option<String>| text.clone().map(Value::String);
    let template = ("config.yaml/template".into(), text(&started.template), text(&wanted.template));
    // What it says is secret, and so is what it could be guessed from.
    let cloud_init = (started.cloud_init != wanted.cloud_init).then(|| PendingChange {
        path: "cloud-init".into(),
        current: None,
        wanted: None,
        reason: "the guest is told at its start".into(),
    });
    let changed = of_vm.chain([template]).filter(|(_, current, wanted)| current != wanted);
    let reason = || "QEMU takes it at its start".into();
    changed
        .map(|(path, current, wanted)| PendingChange { path, current, wanted, reason: reason() })
        .chain(cloud_init)
        .collect()
}

/// The part of the configuration that counts at QEMU's start.
fn at_start(vm: &VmSection, machine: &MachineState) -> Map<String, Value> {
    let mut vm = vm.clone();
    // Live: CPUs, memory, CDs; read when it is needed: the time to power down. What identifies the machine is its own where the
    // configuration does not say it, or says it only since the machine has told it.
    vm.drives.iter_mut().for_each(|drive| {
        if let Drive::IdeCd { file, .. } = drive {
            file.clear();
        }
    });
    vm.display.logged_in_user = None;
    vm.uuid = Some(vm.uuid.unwrap_or_else(|| machine.uuid.clone()).to_lowercase());
    vm.machine_type.get_or_insert_with(|| machine.machine_type.clone());
    for (network, own) in vm.network.iter_mut().zip(&machine.macs) {
        network.set_mac(network.mac().unwrap_or(own).to_lowercase());
    }
    let Value::Object(mut fields) = json!(vm) else { return Map::new() };
    for live in ["name", "currentCpus", "currentRam", "powerdownTimeout"] {
        fields.remove(live);
    }
    fields
}

/// `query-hotpluggable-cpus` lists the highest place first; CPUs come and go at the high end.
pub fn cpu_changes(wanted: usize, slots: &[Slot]) -> Vec<Change> {
    let present = slots.iter().filter(|slot| slot.occupant.is_some()).count();
    let numbered = || slots.iter().rev().enumerate();
    if wanted >= present {
        numbered()
            .filter(|(_, slot)| slot.occupant.is_none())
            .take(wanted - present)
            .map(|(number, slot)| Change::Plug { id: format!("{CPU_PREFIX}{number}"), slot: slot.clone() })
            .collect()
    } else {
        slots
            .iter()
            .filter_map(|slot| slot.occupant.as_deref()?.strip_prefix(NAMED))
            .filter(|id| id.starts_with(CPU_PREFIX))
            .take(present - wanted)
            .map(|id| Change::Unplug { id: id.to_owned() })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        runner::{cloud_init::Files, files::Phase},
        runner_config::RunnerConfig,
    };

    /// Places 0.. from the lowest; each has its occupant's name, `-` for one without a name, or nothing.
    fn slots(occupants: &[&str]) -> Vec<Slot> {
        let slot = |(number, occupant): (usize, &&str)| Slot {
            type_: "max-x86_64-cpu".into(),
            properties: json!({ "core-id": number }).as_object().unwrap().clone(),
            occupant: match *occupant {
                "" => None,
                "-" => Some(format!("/machine/unattached/device[{number}]")),
                id => Some(format!("{NAMED}{id}")),
            },
        };
        occupants.iter().enumerate().map(slot).rev().collect()
    }

    fn cpus(wanted: usize, occupants: &[&str]) -> Vec<String> {
        cpu_changes(wanted, &slots(occupants))
            .into_iter()
            .map(|change| match change {
                Change::Plug { id, slot } => format!("+{id}@{}", slot.properties["core-id"]),
                Change::Unplug { id } => format!("-{id}"),
                other => panic!("{other:?}"),
            })
            .collect()
    }

    #[test]
    fn cpus_come_and_go_at_the_high_end() {
        assert_eq!(cpus(2, &["-", "-", "", ""]), [""; 0]);
        assert_eq!(cpus(4, &["-", "-", "", ""]), ["+vmop-cpu-2@2", "+vmop-cpu-3@3"]);
        assert_eq!(cpus(3, &["-", "-", "", "vmop-cpu-3"]), [""; 0]);
        assert_eq!(cpus(2, &["-", "-", "vmop-cpu-2", "vmop-cpu-3"]), ["-vmop-cpu-3", "-vmop-cpu-2"]);
        assert_eq!(cpus(1, &["-", "-", "vmop-cpu-2", ""]), ["-vmop-cpu-2"], "those of the start stay");
        assert_eq!(cpus(9, &["-", ""]), ["+vmop-cpu-1@1"], "no more than there are places");
    }

    fn wanted() -> Wanted {
        let password = Password { secret: "s".into(), expiry: "now".into() };
        Wanted { cpus: 1, ram: 1 << 30, password: Some(("spice", password)), cds: vec![None], reset_counter: 3 }
    }

    #[test]
    fn a_new_agent_sets_everything_and_then_only_what_changes() {
        let mut known = Known { slots: slots(&["-", ""]), ..Known::default() };
        let password = wanted().password.unwrap().1;
        assert_eq!(changes(&wanted(), &known), [Change::Balloon(1 << 30), Change::Password("spice", password.clone())]);
        known = Known { ram: Some(1 << 30), password: Some(password), reset_counter: Some(3), ..known };
        assert_eq!(changes(&wanted(), &known), []);
        let mut wanted = wanted();
        wanted.reset_counter = 4;
        wanted.ram = 1 << 29;
        assert_eq!(changes(&wanted, &known), [Change::Balloon(1 << 29), Change::Reset(4)]);
        let expiry = Password { secret: "s".into(), expiry: "+10".into() };
        wanted.password = Some(("spice", expiry.clone()));
        assert!(changes(&wanted, &known).contains(&Change::Password("spice", expiry)));
    }

    #[test]
    fn cds_are_changed_where_there_is_a_drive() {
        let blocks = json!([
            { "device": "", "qdev": "cd0", "tray_open": false, "inserted": { "file": "/a.iso" } },
            { "device": "", "qdev": "/machine/peripheral/cd1", "tray_open": false },
            { "device": "", "qdev": "/machine/peripheral/disk0/virtio-backend", "inserted": { "file": "/dev/x" } },
        ]);
        let known = Known { ram: Some(1 << 30), cds: cd_drives(&blocks), reset_counter: Some(3), ..Known::default() };
        let with = |cds: &[&str]| {
            let cds = cds.iter().map(|file| Some((*file).to_owned()).filter(|file| !file.is_empty())).collect();
            changes(&Wanted { cpus: 0, password: None, cds, ..wanted() }, &known)
        };
        let (cd0, cd1) = ("cd0".to_owned(), "cd1".to_owned());
        assert_eq!(with(&["/a.iso", "", "/third.iso"]), []);
        assert_eq!(with(&["/b.iso", ""]), [Change::Insert { id: cd0.clone(), file: "/b.iso".into() }]);
        assert_eq!(
            with(&["", "/a.iso"]),
            [Change::Eject { id: cd0 }, Change::Insert { id: cd1, file: "/a.iso".into() }]
        );
    }

    #[test]
    fn what_waits_for_the_next_start() {
        let config = |edit: fn(&mut Value)| {
            let mut config = json!({
                "namespace": "orchard",
                "template": "standard",
                "cloudInit": { "userData": { "packages": ["vim"] } },
                "vm": {
                    "name": "apple", "maximumCpus": 2, "currentCpus": 1, "maximumRam": "1 GiB",
                    "network": [{ "type": "user", "device": "virtio-net" }],
                    "drives": [{ "type": "raw", "resource": "/dev/a" }, { "type": "ide-cd", "file": "/a.iso" }],
                },
            });
            edit(&mut config);
            let config: RunnerConfig = serde_json::from_value(config).unwrap();
            let cloud_init = Files::choose(Files::default(), config.cloud_init.as_ref(), &config.vm.name);
            Configuration { config, password: None, cloud_init }
        };
        let machine = MachineState {
            pid: 1,
            machine_type: "pc-q35-9.2".into(),
            accelerator: "tcg".into(),
            accelerator_reason: String::new(),
            uuid: "c0ffee00-0000-4000-8000-000000000001".into(),
            macs: vec!["52:54:00:00:00:01".into()],
            started_with: Some(Started::from(&config(|_| ()))),
            phase: Phase::Running,
        };
        let paths = |edit: fn(&mut Value)| {
            let pending = pending(&machine, &config(edit));
            pending.into_iter().map(|change| change.path.replace("config.yaml/", "")).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(paths(|config| config["vm"]["maximumCpus"] = json!(4)), "vm.maximumCpus");
        assert_eq!(paths(|config| config["vm"]["firmware"] = json!("bios")), "vm.firmware");
        assert_eq!(paths(|config| config["vm"]["drives"] = json!([])), "vm.drives");
        assert_eq!(paths(|config| config["vm"]["network"][0]["device"] = json!("e1000")), "vm.network");
        assert_eq!(paths(|config| config["vm"]["network"][0]["mac"] = json!("52:54:00:00:00:02")), "vm.network");
        assert_eq!(paths(|config| config["vm"]["uuid"] = json!("another")), "vm.uuid");
        assert_eq!(paths(|config| config["template"] = json!("mine")), "template");
        assert_eq!(paths(|config| config["cloudInit"]["userData"] = json!("#!/bin/sh")), "cloud-init");
        let live = |config: &mut Value| {
            let vm = &mut config["vm"];
            vm["currentCpus"] = json!(2);
            vm["currentRam"] = json!("512 MiB");
            vm["drives"][1]["file"] = json!("/b.iso");
            // Known by now.
            vm["uuid"] = json!("C0FFEE00-0000-4000-8000-000000000001");
            vm["machineType"] = json!("pc-q35-9.2");
            vm["network"][0]["mac"] = json!("52:54:00:00:00:01");
        };
        assert_eq!(paths(live), "");
    }
}
