use std::collections::BTreeSet;

use super::*;
use crate::{
    api::{VmReportStatus, status::DeviceKind},
    render::command_line::Medium,
    runner::{
        cloud_init::CloudInitFiles,
        state::{BlockDevice, Phase},
    },
    runner_config::RunnerConfig,
};

/// Slots, given from the lowest to the highest by the names of their CPUs: `-` is a CPU without a name, an empty text an empty slot.
fn slots(occupants: &[&str]) -> Vec<CpuSlot> {
    let slot = |(number, occupant): (usize, &&str)| CpuSlot {
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

fn cpus(desired: usize, occupants: &[&str]) -> Vec<String> {
    cpu_changes(desired, &slots(occupants))
        .into_iter()
        .map(|change| match change {
            Operation::Plug { id, slot } => format!("+{id}@{}", slot.properties["core-id"]),
            Operation::Unplug { id } => format!("-{id}"),
            other => panic!("{other:?}"),
        })
        .collect()
}

#[test]
fn cpus_are_plugged_and_unplugged_at_the_high_end() {
    let fixed = Actual { slots: slots(&["-", ""]), cpu_rule: CpuRule::Fixed, ..settled() };
    let desired = Desired { cpus: 2, ..desired() };
    assert_eq!(changes(&desired, &fixed), []);
    let more = Actual { cpu_rule: CpuRule::OnlyMore, ..fixed };
    assert!(matches!(changes(&desired, &more)[..], [Operation::Plug { .. }]));
    let fewer = Actual { slots: slots(&["-", "vmop-cpu-1"]), ..more };
    let one = Desired { cpus: 1, ..desired };
    assert_eq!(changes(&one, &fewer), []);
    assert!(matches!(changes(&one, &Actual { cpu_rule: CpuRule::Any, ..fewer })[..], [Operation::Unplug { .. }]));
    assert_eq!(cpus(2, &["-", "-", "", ""]), [""; 0]);
    assert_eq!(cpus(4, &["-", "-", "", ""]), ["+vmop-cpu-2@2", "+vmop-cpu-3@3"]);
    assert_eq!(cpus(3, &["-", "-", "", "vmop-cpu-3"]), [""; 0]);
    assert_eq!(cpus(2, &["-", "-", "vmop-cpu-2", "vmop-cpu-3"]), ["-vmop-cpu-3", "-vmop-cpu-2"]);
    assert_eq!(cpus(1, &["-", "-", "vmop-cpu-2", ""]), ["-vmop-cpu-2"], "CPUs of QEMU's start cannot be unplugged");
    assert_eq!(cpus(9, &["-", ""]), ["+vmop-cpu-1@1"], "no more than there are slots");
}

fn password(expiry: &str) -> DisplayPassword {
    DisplayPassword { protocol: "spice", password: Password { secret: "s".into(), expiry: expiry.into() } }
}

fn desired() -> Desired {
    let password = Some(password("now"));
    Desired {
        cpus: 1,
        ram: 1 << 30,
        password,
        cds: vec![],
        disks: vec![],
        reset_counter: 3,
        reboot_counter: 5,
        paused: false,
    }
}

fn orders() -> Orders {
    Orders { start: "s-1".into(), counter: 3, reboots: 5, paused: false, is_in_doubt: false }
}

/// A guest that executes and has everything but what a test wants.
fn settled() -> Actual {
    Actual {
        ram: Some(1 << 30),
        password: Some(password("now").password),
        orders: orders(),
        guest: Some(GuestState::Executes),
        ..Actual::default()
    }
}

#[test]
fn a_guest_is_paused_once_and_goes_on_only_if_an_agent_has_paused_it() {
    use GuestState::{Executes, Hung, NotStarted, Panicked, Stopped, StoppedByDisk};
    let with = |wanted: bool, paused: bool, guest: GuestState, powers_down: bool| {
        let desired = Desired { cpus: 0, paused: wanted, ..desired() };
        let orders = Orders { paused, ..orders() };
        changes(&desired, &Actual { orders, guest: Some(guest), powers_down, ..settled() })
    };
    for guest in [Executes, Panicked, Hung, Stopped] {
        assert_eq!(with(true, false, guest, false), [Operation::Pause], "{guest:?}");
        assert_eq!(with(true, false, guest, true), [], "{guest:?}");
    }
    for guest in [NotStarted, StoppedByDisk] {
        assert_eq!(with(true, false, guest, false), [], "{guest:?}");
    }
    assert_eq!(with(true, true, Executes, false), [], "somebody has let it go on with vm-runner ctl");
    assert_eq!(with(false, true, Stopped, false), [Operation::GoOn(Who::Spec)]);
    assert_eq!(with(false, false, Stopped, false), [], "somebody has paused it with vm-runner ctl");
    let paused = Orders { paused: true, ..orders() };
    assert_eq!(carried_out(&Operation::Pause, &desired(), &orders()), Some(paused.clone()));
    assert_eq!(carried_out(&Operation::GoOn(Who::Spec), &desired(), &paused), Some(orders()));
    assert_eq!(carried_out(&Operation::GoOn(Who::Agent), &desired(), &paused), None);
}

#[test]
fn a_guest_begins_to_run_when_it_has_its_memory_and_its_password_unless_it_is_paused() {
    let guest = Some(GuestState::NotStarted);
    let new = Actual { may_start: true, guest, orders: orders(), ..Actual::default() };
    let desired = Desired { cpus: 0, ..desired() };
    let expected = [Operation::Balloon(1 << 30), Operation::Password(password("now")), Operation::GoOn(Who::Agent)];
    assert_eq!(changes(&desired, &new), expected);
    let start = |may_start: bool, paused: bool| {
        changes(&desired, &Actual { may_start, guest, orders: Orders { paused, ..orders() }, ..settled() })
    };
    assert_eq!(start(true, false), [Operation::GoOn(Who::Agent)]);
    assert_eq!(start(false, false), [], "somebody has paused and reset it");
    assert_eq!(start(true, true), [Operation::GoOn(Who::Spec)], "it was reset while the spec paused it");
}

#[test]
fn a_guest_is_asked_to_reboot_when_its_agent_answers_and_a_reset_comes_first() {
    let actual = |guest: GuestState, answers: bool| Actual { guest: Some(guest), answers, ..settled() };
    let wanted = Desired { cpus: 0, reboot_counter: 6, ..desired() };
    let ready = actual(GuestState::Executes, true);
    assert_eq!(changes(&wanted, &ready), [Operation::Reboot]);
    assert_eq!(refused_reboot(&wanted, &ready), None);
    for (guest, cause) in [
        (actual(GuestState::Executes, false), "guest agent does not answer"),
        (actual(GuestState::Stopped, true), "is paused"),
        (actual(GuestState::StoppedByDisk, true), "a disk has stopped"),
    ] {
        assert_eq!(changes(&wanted, &guest), []);
        let refusal = refused_reboot(&wanted, &guest).unwrap();
        assert!(refusal.contains("(rebootCount 6)") && refusal.contains(cause), "{refusal}");
    }
    let reset = Desired { reset_counter: 4, ..wanted };
    assert_eq!(changes(&reset, &ready), [Operation::Reset]);
    assert_eq!(refused_reboot(&desired(), &actual(GuestState::Stopped, false)), None);
}

#[test]
fn a_count_that_was_taken_back_is_a_new_order_when_it_comes_again() {
    let count = |resets: u64, reboots: u64| Desired { reset_counter: resets, reboot_counter: reboots, ..desired() };
    assert_eq!(taken_back(&count(3, 5), &orders()), None);
    assert_eq!(taken_back(&count(4, 6), &orders()), None, "an order is not carried out by this");
    let removed = taken_back(&count(0, 0), &orders()).unwrap();
    assert_eq!(removed, Orders { counter: 0, reboots: 0, ..orders() });
    assert_eq!(taken_back(&count(3, 1), &orders()), Some(Orders { reboots: 1, ..orders() }));
    let actual = Actual { orders: removed, answers: true, ..settled() };
    let again = Desired { cpus: 0, password: None, ..count(3, 0) };
    assert_eq!(changes(&again, &actual), [Operation::Reset]);
}

#[test]
fn a_new_agent_sets_everything_once_and_then_only_what_differs() {
    let mut actual = Actual { slots: slots(&["-", ""]), ram: None, password: None, ..settled() };
    assert_eq!(changes(&desired(), &Actual { guest: None, ..actual.clone() }), [], "QEMU was not asked yet");
    assert_eq!(changes(&desired(), &actual), [Operation::Balloon(1 << 30), Operation::Password(password("now"))]);
    let set = password("now").password;
    actual = Actual { ram: Some(1 << 30), password: Some(set), ..actual };
    assert_eq!(changes(&desired(), &actual), []);
    let mut desired = desired();
    desired.reset_counter = 4;
    desired.ram = 1 << 29;
    assert_eq!(changes(&desired, &actual), [Operation::Balloon(1 << 29), Operation::Reset]);
    desired.password = Some(password("+10"));
    let all = [Operation::Balloon(1 << 29), Operation::Password(password("+10")), Operation::Reset];
    assert_eq!(changes(&desired, &actual), all);
}

/// CDs in the drives from slot 0 on. `-`: no drive has the slot.
fn cds(texts: &[&str]) -> Vec<WantedCd> {
    let all = (0..).zip(texts).filter(|(_, text)| **text != "-");
    all.map(|(slot, text)| WantedCd { slot, drive: format!("drive{slot}"), text: (*text).to_owned() }).collect()
}

#[test]
fn a_cd_is_changed_only_in_a_drive_that_qemu_has_and_when_it_is_known_what_it_is() {
    let blocks = json!([
        { "device": "", "qdev": "cd0", "tray_open": false, "inserted": { "file": "/a.iso", "node-name": "cd0-image" } },
        { "device": "", "qdev": "/machine/peripheral/cd1", "tray_open": false },
        { "device": "", "qdev": "/machine/peripheral/disk0/virtio-backend", "inserted": { "file": "/dev/x" } },
    ]);
    let actual = |texts: &[&str]| {
        let answer = |WantedCd { text, .. }: &WantedCd| {
            if text.starts_with('/') { Ok(Medium::File(text.clone())) } else { Err("it is strange".to_owned()) }
        };
        let media = Media { answers: cds(texts).iter().map(answer).collect(), cds: cds(texts) };
        Actual { cds: cd_drives(&blocks), media, ..settled() }
    };
    let desired = |texts: &[&str]| Desired { cpus: 0, password: None, cds: cds(texts), reset_counter: 4, ..desired() };
    let with = |cds: &[&str]| changes(&desired(cds), &actual(cds));
    let insert = |slot, file: &str, former: Option<&str>| Operation::Insert {
        slot,
        drive: format!("drive{slot}"),
        medium: Medium::File(file.into()),
        former: former.map(str::to_owned),
    };
    let (eject, reset) =
        (Operation::Eject { slot: 0, drive: "drive0".into(), former: "cd0-image".into() }, Operation::Reset);
    assert_eq!(with(&["/a.iso", "", "/third.iso"]), std::slice::from_ref(&reset));
    assert_eq!(with(&["/b.iso", ""]), [insert(0, "/b.iso", Some("cd0-image")), reset.clone()]);
    assert_eq!(with(&["", "/a.iso"]), [eject, insert(1, "/a.iso", None), reset.clone()]);
    // A drive that the configuration does not have any more stays as it is until the next start.
    assert_eq!(with(&["-", "/b.iso"]), [insert(1, "/b.iso", None), reset.clone()]);
    // What is refused stays out, and the drive as it is.
    assert_eq!(with(&["fat:x", "/b.iso"]), [insert(1, "/b.iso", None), reset]);
    let refused = ["fat:x can't be inserted into the CD drive drive0: it is strange"];
    assert_eq!(refused_media(&actual(&["fat:x", "/b.iso", "fat:third"])), refused);
    // As long as the machine role has not answered about these CDs, nothing happens to them, nor a reset.
    assert!(must_ask(&desired(&["/c.iso", ""]), &actual(&["/b.iso", ""])));
    assert_eq!(changes(&desired(&["/c.iso", ""]), &actual(&["/b.iso", ""])), []);
}

#[test]
fn a_disk_grows_to_what_its_file_should_have_or_its_device_has() {
    let configuration = |drives: &str| {
        let text = format!("/Runner: {{ namespace: n, vm: {{ name: v, drives: [{drives}] }} }}");
        let config = RunnerConfig::parse(&text).unwrap();
        Configuration { config, digest: String::new(), password: None, cloud_init: None, qemu: None }
    };
    let file =
        |name: &str, size: u64| format!("{{ type: raw, resource: /var/local/vm-disks/{name}/disk.img, size: {size} }}");
    let device = "{ type: raw, resource: /dev/b-disk, slot: 3 }";
    let started = format!("{}, {device}", file("a", 1 << 20));
    let machine = MachineState {
        devices: vec![BlockDevice { slot: 3, at_start: 1 << 20, bytes: (2 << 20) + 512 }],
        ..MachineState::failed_before_start(String::new(), Some(StartedWith::from(&configuration(&started))))
    };
    let wanted = |drives: &str| {
        let disks = Desired::of(&configuration(drives), Some(&machine)).disks;
        disks.into_iter().map(|it| (it.slot, it.disk, it.bytes)).collect::<Vec<_>>()
    };
    let b = (3, "b-disk".to_owned(), 2 << 20);
    let a = |bytes| (0, "a".to_owned(), bytes);
    assert_eq!(wanted(&started), std::slice::from_ref(&b), "the file has not grown");
    assert_eq!(wanted(&format!("{device}, {}", file("a", (4 << 20) + 4095))), [a(4 << 20), b.clone()]);
    // Another disk takes its place at the next start, and none does.
    assert_eq!(wanted(&format!("{}, {device}", file("other", 8 << 20))), std::slice::from_ref(&b));
    assert_eq!(wanted(""), [b]);
    let actual = |bytes: u64| Actual { disks: vec![Disk { slot: 3, node: "n".into(), bytes }], ..settled() };
    let desired = Desired { disks: Desired::of(&configuration(&started), Some(&machine)).disks, ..desired() };
    let grow = Operation::Grow { disk: "b-disk".into(), node: "n".into(), bytes: 2 << 20 };
    assert_eq!(changes(&desired, &actual(1 << 20)), [grow]);
    assert_eq!(changes(&desired, &actual(2 << 20)), []);
    assert_eq!(changes(&desired, &actual(3 << 20)), [], "it is never made smaller");
}

#[test]
fn changes_that_qemu_takes_only_at_its_start_are_pending() {
    let config = |edit: &dyn Fn(&mut Value)| {
        let mut config = json!({
            "namespace": "orchard",
            "template": "standard",
            "qemuTemplates": "a-digest",
            "cloudInit": { "userData": { "packages": ["vim"] } },
            "vm": {
                "name": "apple", "maximumCpus": 2, "currentCpus": 1, "maximumRam": "1 GiB",
                "network": [{ "type": "user", "device": "virtio-net" }],
                "drives": [{ "type": "raw", "resource": "/dev/a" }, { "type": "ide-cd", "file": "/a.iso" }],
            },
        });
        edit(&mut config);
        let config: RunnerConfig = serde_json::from_value(config).unwrap();
        let cloud_init = CloudInitFiles::choose(CloudInitFiles::default(), config.cloud_init.as_ref(), &config.vm.name);
        Configuration { config, digest: String::new(), password: None, cloud_init, qemu: None }
    };
    let machine = MachineState {
        start: "s-1".into(),
        pid: 1,
        machine_type: "pc-q35-9.2".into(),
        hardware: "root-ports".into(),
        accelerator: "tcg".into(),
        accelerator_reason: String::new(),
        uuid: "c0ffee00-0000-4000-8000-000000000001".into(),
        macs: vec!["52:54:00:00:00:01".into()],
        started_with: Some(StartedWith::from(&config(&|_| ()))),
        devices: Vec::new(),
        lost: Vec::new(),
        phase: Phase::Running,
    };
    let paths = |edit: fn(&mut Value)| {
        let configuration = config(&edit);
        let pending = pending(&machine, 1, &configuration);
        let of_device = |change: &PendingChange| match change.subject.clone()? {
            Subject::Disk(name) => Some((DeviceKind::Disk, name)),
            Subject::CdDrive(name) => Some((DeviceKind::CdDrive, name)),
            Subject::Network(name) => Some((DeviceKind::Network, name)),
            _ => None,
        };
        let changed = attachments(&machine, &configuration).into_iter().filter(|it| it.at_next_start.is_some());
        // Two fields say of the watchdog what it does.
        let changed = changed.filter(|it| it.kind != DeviceKind::Watchdog);
        let changed: BTreeSet<_> = changed.map(|it| (it.kind, it.name)).collect();
        assert_eq!(changed, pending.iter().filter_map(of_device).collect(), "what waits is said alike of devices");
        #[cfg(feature = "schema")]
        {
            let pending_changes = pending.iter().cloned().map(Into::into).collect();
            crate::test_support::assert_is_report(&json!(VmReportStatus {
                pending_changes,
                ..VmReportStatus::default()
            }));
        }
        pending.into_iter().map(|change| change.path.replace("config.yaml/", "")).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(paths(|config| config["vm"]["maximumCpus"] = json!(4)), "vm.maximumCpus");
    assert_eq!(paths(|config| config["vm"]["firmware"] = json!("bios")), "vm.firmware");
    assert_eq!(paths(|config| config["vm"]["drives"] = json!([])), "vm.drives[a] vm.drives[0]");
    assert_eq!(paths(|config| config["vm"]["network"][0]["device"] = json!("e1000")), "vm.network[0]");
    assert_eq!(paths(|config| config["vm"]["network"][0]["mac"] = json!("52:54:00:00:00:02")), "vm.network[0]");
    assert_eq!(paths(|config| config["vm"]["uuid"] = json!("another")), "vm.uuid");
    assert_eq!(paths(|config| config["vm"]["watchdog"] = json!({ "action": "reset" })), "vm.watchdog");
    assert_eq!(paths(|config| config["vm"]["onPanic"] = json!("stop")), "vm.onPanic");
    assert_eq!(paths(|config| config["template"] = json!("mine")), "template");
    assert_eq!(paths(|config| config["qemuTemplates"] = json!("another")), "qemuTemplates");
    let keeps = |config: &mut Value| {
        config["qemuTemplates"] = json!("another");
        config["updateTemplate"] = json!(false);
    };
    assert_eq!(paths(keeps), "");
    assert_eq!(paths(|config| config["cloudInit"]["userData"] = json!("#!/bin/sh")), "cloud-init");
    let live = |config: &mut Value| {
        let vm = &mut config["vm"];
        vm["currentCpus"] = json!(2);
        vm["currentRam"] = json!("512 MiB");
        vm["drives"][1]["file"] = json!("/b.iso");
        // These are the running VM's own values.
        vm["uuid"] = json!("C0FFEE00-0000-4000-8000-000000000001");
        vm["machineType"] = json!("pc-q35-9.2");
        vm["network"][0]["mac"] = json!("52:54:00:00:00:01");
    };
    assert_eq!(paths(live), "");
    // Where QEMU or the guest would not stand another number of CPUs.
    let cpus = |accelerator: &str, firmware: &str, present: u32| {
        let with = |cpus: u32| {
            config(&|config| {
                config["vm"]["firmware"] = json!(firmware);
                config["vm"]["currentCpus"] = json!(cpus);
            })
        };
        let started_with = Some(StartedWith::from(&with(1)));
        let machine = MachineState { accelerator: accelerator.into(), started_with, ..machine.clone() };
        let pending = pending(&machine, present, &with(2)).into_iter();
        pending
            .map(|change| format!("{} {:?} {:?}", change.path, change.current.unwrap(), change.wanted.unwrap()))
            .collect::<Vec<_>>()
    };
    let waits = |present: u32| vec![format!("config.yaml/vm.currentCpus Number({present}) Number(2)")];
    for (firmware, present, expected) in [
        ("secure", 1, waits(1)),
        ("secure", 2, vec![]),
        ("secure", 3, waits(3)),
        ("uefi", 1, vec![]),
        ("uefi", 2, vec![]),
        ("uefi", 3, waits(3)),
        ("uefi", 0, vec![]),
    ] {
        assert_eq!(cpus("tcg", firmware, present), expected, "{firmware} {present}");
        assert_eq!(cpus("kvm", firmware, present), [""; 0], "{firmware} {present}");
    }
    assert_eq!(paths(|config| config["vm"]["powerdownTimeout"] = json!(60)), "", "it is shorter");
    assert_eq!(paths(|config| config["vm"]["powerdownTimeout"] = json!(901)), "vm.powerdownTimeout");
}
