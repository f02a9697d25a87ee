use super::*;
use crate::{
    runner_config::{RunnerConfig, at_start::at_start},
    test_support,
};

/// A VM as the API server has it, with two disks, one CD drive, and a field that this program does not know.
fn stored(edit: impl FnOnce(&mut Value)) -> FoundVm {
    let claim = |name: &str, size: Value| json!({ "volumeClaimTemplate": { "metadata": { "name": name }, "spec": { "resources": { "requests": { "storage": size } } } } });
    let mut value = json!(test_support::vm(|_| ()));
    value["metadata"]["resourceVersion"] = json!("7");
    value["spec"]["vm"] = json!({ "state": "Running", "maximumCpus": 4, "currentCpus": 2, "maximumRam": "4Gi", "disks": [
        claim("core", json!("1Gi")), { "cdrom": { "image": "a.iso", "later": 1 } },
        { "volumeClaimTemplate": { "spec": { "resources": { "requests": { "storage": 2_147_483_648_u64 } } } } },
    ] });
    edit(&mut value);
    FoundVm { object: serde_json::from_value(value.clone()).unwrap(), vm: serde_json::from_value(value).unwrap() }
}

fn decided(vm: &FoundVm, edit: &Edit) -> String {
    match decide(vm, edit, false) {
        Ok(Decision::Unchanged(why)) => format!("unchanged: {why}"),
        Ok(Decision::Write { change: Change::Merge(patch) | Change::Apply(patch), expected, applier: _ }) => {
            let Expected { what, effect, about: _, note } = expected;
            assert_eq!(patch["metadata"]["uid"], "apple-uid");
            let version = if patch["metadata"]["resourceVersion"] == "7" { " (version 7)" } else { "" };
            let note = note.map(|note| format!("\n  note: {note}")).unwrap_or_default();
            format!("{what}, {effect:?}\n  {}{version}{note}", patch["spec"]["vm"])
        }
        Err(refusal) => format!("refused: {refusal}"),
    }
}

fn size(text: &str) -> Quantity {
    Quantity::parse(text).unwrap()
}

fn add(name: Option<&str>, class: Option<&str>) -> Edit {
    Edit::AddDisk { size: size("20 GiB"), name: name.map(str::to_owned), class: class.map(str::to_owned) }
}

fn cd(image: &str, drive: Option<&str>) -> Edit {
    Edit::Cd { image: image.to_owned(), drive: drive.map(str::to_owned) }
}

fn grow(disk: &str, to: &str) -> Edit {
    Edit::GrowDisk { disk: disk.to_owned(), size: size(to) }
}

/// The decisions about a VM, each after the words that it is for.
fn all(vm: &FoundVm, edits: &[(&str, Edit)]) -> String {
    edits.iter().map(|(words, edit)| format!("{words}: {}\n", decided(vm, edit))).collect()
}

#[test]
fn cpus_and_memory_have_a_maximum() {
    let vm = stored(|_| ());
    let cpus = |number, raise| Edit::Cpus { number, raise };
    let ram = |text, raise| Edit::Ram { size: size(text), raise };
    insta::assert_snapshot!(all(&vm, &[
        ("cpus 2", cpus(2, false)), ("cpus 1", cpus(1, false)), ("cpus 4", cpus(4, true)), ("cpus 5", cpus(5, false)),
        ("cpus 5 --raise-maximum", cpus(5, true)),
        ("ram 4Gi", ram("4Gi", false)), ("ram 4096Mi", ram("4096Mi", false)), ("ram 1 GiB", ram("1 GiB", false)),
        ("ram 5Gi", ram("5Gi", false)), ("ram 5Gi --raise-maximum", ram("5Gi", true)), ("ram 4", ram("4", false)),
    ]), @r#"
    cpus 2: unchanged: has 2 CPUs already
    cpus 1: 1 CPU (before: 2), AtOnce
      {"currentCpus":1}
    cpus 4: 4 CPUs (before: 2), AtOnce
      {"currentCpus":4}
    cpus 5: refused: its guest can have 4 CPUs at most (spec.vm.maximumCpus)
    cpus 5 --raise-maximum: 5 CPUs (before: 2), which is also the new maximum, NextStart
      {"currentCpus":5,"maximumCpus":5}
    ram 4Gi: unchanged: has 4Gi of memory already
    ram 4096Mi: unchanged: has 4Gi of memory already
    ram 1 GiB: 1 GiB of memory (before: 4Gi), AtOnce
      {"currentRam":"1 GiB"}
    ram 5Gi: refused: its guest can have 4Gi at most (spec.vm.maximumRam)
    ram 5Gi --raise-maximum: 5Gi of memory (before: 4Gi), which is also the new maximum, NextStart
      {"maximumRam":"5Gi"}
    ram 4: refused: 4 is too little: a number without a unit is in bytes; write for example 2Gi
    "#);
    let topology = stored(|vm| {
        let topology = json!({ "disks": [], "cpuTopology": { "sockets": 2, "coresPerDie": 2 } });
        vm["spec"]["vm"] = topology;
    });
    assert_eq!(decided(&topology, &cpus(3, true)), "3 CPUs (before: 4), AtOnce\n  {\"currentCpus\":3}");
    let refused = "refused: its CPUs are given by spec.vm.cpuTopology (4 of them): change that";
    assert_eq!(decided(&topology, &cpus(8, true)), refused);
}

#[test]
fn a_list_keeps_what_else_is_in_it() {
    let vm = stored(|_| ());
    insta::assert_snapshot!(all(&vm, &[
        ("cd b.iso", cd("b.iso", None)), ("cd a.iso --drive 0", cd("a.iso", Some("0"))), ("cd --eject", cd("", None)), ("cd --drive 1", cd("b.iso", Some("1"))),
        ("add disk", add(None, None)), ("add disk --name logs --storage-class fast", add(Some("logs"), Some("fast"))),
        ("add disk --name core", add(Some("core"), None)),
        ("grow disk core 2Gi", grow("core", "2Gi")), ("grow disk core-disk 1024Mi", grow("core-disk", "1024Mi")),
        ("grow disk apple-core-disk 512Mi", grow("apple-core-disk", "512Mi")), ("grow disk disk-1 3 GiB", grow("disk-1", "3 GiB")),
        ("grow disk 1", grow("1", "3Gi")),
    ]), @r#"
    cd b.iso: CD drive has b.iso (before: a.iso), AtOnce
      {"disks":[{"volumeClaimTemplate":{"metadata":{"name":"core"},"spec":{"resources":{"requests":{"storage":"1Gi"}}}}},{"cdrom":{"image":"b.iso","later":1}},{"volumeClaimTemplate":{"spec":{"resources":{"requests":{"storage":2147483648}}}}}]} (version 7)
    cd a.iso --drive 0: unchanged: CD drive has a.iso already
    cd --eject: CD drive is empty (before: a.iso), AtOnce
      {"disks":[{"volumeClaimTemplate":{"metadata":{"name":"core"},"spec":{"resources":{"requests":{"storage":"1Gi"}}}}},{"cdrom":{"image":"","later":1}},{"volumeClaimTemplate":{"spec":{"resources":{"requests":{"storage":2147483648}}}}}]} (version 7)
    cd --drive 1: refused: it has no CD drive 1; it has 0
    add disk: a new disk data of 20 GiB (claim apple-data-disk), NextStart
      {"disks":[{"volumeClaimTemplate":{"metadata":{"name":"core"},"spec":{"resources":{"requests":{"storage":"1Gi"}}}}},{"cdrom":{"image":"a.iso","later":1}},{"volumeClaimTemplate":{"spec":{"resources":{"requests":{"storage":2147483648}}}}},{"volumeClaimTemplate":{"metadata":{"name":"data"},"spec":{"resources":{"requests":{"storage":"20Gi"}}}}}]} (version 7)
    add disk --name logs --storage-class fast: a new disk logs of 20 GiB (claim apple-logs-disk), NextStart
      {"disks":[{"volumeClaimTemplate":{"metadata":{"name":"core"},"spec":{"resources":{"requests":{"storage":"1Gi"}}}}},{"cdrom":{"image":"a.iso","later":1}},{"volumeClaimTemplate":{"spec":{"resources":{"requests":{"storage":2147483648}}}}},{"volumeClaimTemplate":{"metadata":{"name":"logs"},"spec":{"resources":{"requests":{"storage":"20Gi"}},"storageClassName":"fast"}}}]} (version 7)
    add disk --name core: refused: it has a disk core already
    grow disk core 2Gi: disk core of 2Gi (before: 1Gi), NextStart
      {"disks":[{"volumeClaimTemplate":{"metadata":{"name":"core"},"spec":{"resources":{"requests":{"storage":"2Gi"}}}}},{"cdrom":{"image":"a.iso","later":1}},{"volumeClaimTemplate":{"spec":{"resources":{"requests":{"storage":2147483648}}}}}]} (version 7)
    grow disk core-disk 1024Mi: unchanged: disk core-disk has 1Gi already
    grow disk apple-core-disk 512Mi: refused: the disk apple-core-disk has 1Gi already, and a claim can't become smaller
    grow disk disk-1 3 GiB: disk disk-1 of 3 GiB (before: 2147483648), NextStart
      {"disks":[{"volumeClaimTemplate":{"metadata":{"name":"core"},"spec":{"resources":{"requests":{"storage":"1Gi"}}}}},{"cdrom":{"image":"a.iso","later":1}},{"volumeClaimTemplate":{"spec":{"resources":{"requests":{"storage":"3Gi"}}}}}]} (version 7)
    grow disk 1: refused: it has no disk 1; it has core, disk-1
    "#);
    let of_our_runner = stored(|vm| {
        vm["status"] =
            json!({ "created": true, "devices": [{ "kind": "Disk", "name": "core-disk", "phase": "Attached" }] })
    });
    let live = decided(&of_our_runner, &grow("core", "2Gi"));
    assert!(live.starts_with("disk core of 2Gi (before: 1Gi), AtOnce"), "{live}");
    let other = decided(&of_our_runner, &grow("disk-1", "3Gi"));
    assert!(other.starts_with("disk disk-1 of 3Gi (before: 2147483648), NextStart"), "the guest has it not: {other}");
}

#[test]
fn several_drives_are_told_apart() {
    let vm =
        stored(|vm| vm["spec"]["vm"]["disks"] = json!([{ "cdrom": { "image": "" } }, { "cdrom": { "image": "" } }]));
    assert_eq!(decided(&vm, &cd("b.iso", None)), "refused: it has 2 CD drives");
    let second = r#"{"disks":[{"cdrom":{"image":""}},{"cdrom":{"image":"b.iso"}}]}"#;
    assert_eq!(decided(&vm, &cd("b.iso", Some("1"))), format!("CD drive 1 has b.iso, AtOnce\n  {second} (version 7)"));
    let named = stored(|vm| {
        vm["spec"]["vm"]["disks"] = json!([{ "cdrom": { "image": "", "name": "1" } }, { "cdrom": { "image": "", "name": "drivers" } }, { "cdrom": { "image": "" } }]);
    });
    for (drive, expected) in [
        ("drivers", "CD drive 1 has b.iso"),
        ("1", "CD drive 0 has b.iso"),
        ("2", "CD drive 2 has b.iso"),
        ("tools", "refused: it has no CD drive tools; it has 1, drivers, 2"),
        ("3", "refused: it has no CD drive 3; it has 1, drivers, 2"),
    ] {
        let said = decided(&named, &cd("b.iso", Some(drive)));
        assert!(said.starts_with(expected), "{drive}: {said}");
    }
    let none = stored(|vm| vm["spec"]["vm"]["disks"] = json!([]));
    assert!(decided(&none, &cd("b.iso", None)).starts_with("refused: it has no CD drive: add one"));
}

#[test]
fn a_new_disk_never_gets_old_data_by_chance() {
    let vm = stored(|vm| {
        let kept = |name: &str| json!({ "name": name, "uid": "u", "unused": true });
        vm["status"] = json!({ "claims": [kept("apple-data-disk"), kept("apple-data-2-disk")] });
    });
    assert!(decided(&vm, &add(None, None)).starts_with("a new disk data-3 of"));
    let asked = decided(&vm, &add(Some("data"), None));
    assert!(asked.contains("note: the VM had a disk data before"), "{asked}");
    let bytes = Edit::AddDisk { size: size("20"), name: None, class: None };
    assert!(decided(&vm, &bytes).starts_with("refused: 20 is too little: a number without a unit is in bytes"));
}

#[test]
fn what_git_applies_is_not_written_without_insisting() {
    let owned = |manager: &str, fields: Value| {
        stored(|vm| {
            vm["metadata"]["managedFields"] = json!([{
                "manager": manager, "operation": "Apply", "time": "2026-11-20T10:00:00Z",
                "apiVersion": "vmoperator.jdrupes.org/v1", "fieldsType": "FieldsV1", "fieldsV1": { "f:spec": { "f:vm": fields } },
            }]);
        })
    };
    let git = owned("kustomize-controller", json!({ "f:disks": {}, "f:maximumCpus": {} }));
    let cpus = |number| Edit::Cpus { number, raise: true };
    // Git says nothing about the current CPUs, so it does not take them back.
    for (edit, field) in [(cpus(1), None), (cpus(8), Some("maximumCpus")), (grow("core", "2Gi"), Some("disks"))] {
        let expected = field.map(|field| format!(
            "kustomize-controller applies spec.vm.{field} from Git (its last change: 2026-11-20T10:00:00Z), and takes back what others \
             write; change it in Git"
        ));
        let refusal = decide(&git, &edit, false).err().map(|refusal| refusal.to_string());
        assert_eq!(refusal, expected, "{edit:?}");
        let Ok(Decision::Write { applier, .. }) = decide(&git, &edit, true) else { panic!("{edit:?}") };
        assert_eq!(applier.map(|(_, field)| field), field);
    }
    let person = owned("kubectl", json!({ "f:disks": {} }));
    let Ok(Decision::Write { applier, .. }) = decide(&person, &grow("core", "2Gi"), false) else { panic!() };
    assert_eq!(applier.map(|(applier, field)| (applier.manager, field)), Some(("kubectl".into(), "disks")));
}

#[test]
fn a_vm_that_goes_or_cant_be_read_is_left_alone() {
    let going = stored(|vm| vm["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z"));
    assert_eq!(decided(&going, &cd("", None)), "refused: it is being deleted");
    let mut odd = stored(|_| ());
    odd.vm = test_support::stored(|vm| vm["spec"]["vm"]["maximumCpus"] = json!("many"));
    let refused = decided(&odd, &cd("", None));
    assert!(refused.starts_with("refused: its spec has values that can't be read: "), "{refused}");
}

#[test]
fn what_became_of_a_change_is_in_the_status() {
    use Effect::{AtOnce, NextStart};

    let pending = json!([
        { "path": "config.yaml/vm.maximumCpus", "subject": { "kind": "MaximumCpus" }, "reason": "r" },
        { "path": "config.yaml/vm.maximumRam", "subject": { "kind": "MaximumRam" }, "reason": "r" },
        // The guest has this drive, which will boot at another place.
        { "path": "config.yaml/vm.drives[0]", "subject": { "kind": "CdDrive", "name": "0" }, "current": {}, "wanted": {}, "reason": "r" },
        { "path": "config.yaml/vm.drives[tools]", "subject": { "kind": "CdDrive", "name": "tools" }, "wanted": {}, "reason": "r" },
        { "path": "config.yaml/vm.drives[data-disk]", "subject": { "kind": "Disk", "name": "data-disk" }, "wanted": {}, "reason": "r" },
        { "path": "objects/Pod/spec.volumes[data-disk]", "subject": { "kind": "Volume", "name": "data-disk" }, "reason": "r" },
    ]);
    let condition = json!({ "type": "ChangesApplied", "status": "False", "reason": "ChangeFailed", "message": "no such file", "lastTransitionTime": "2026-01-01T00:00:00Z" });
    let growth = json!([
        { "name": "apple-core-disk", "findings": [{ "reason": "GrowthRefused", "current": "1Gi", "wanted": "2Gi", "answer": "no", "generation": 3 }] },
        { "name": "apple-other-disk", "findings": [{ "reason": "ClaimLost" }] },
    ]);
    let drive = |name: &str| About::Drive(name.into());
    let disk = |volume: &str, grows: bool| About::Disk { volume: volume.into(), grows };
    let section = |drives: &str| {
        RunnerConfig::parse(&format!("/Runner: {{ namespace: n, vm: {{ name: apple, drives: {drives} }} }}"))
            .unwrap()
            .vm
    };
    let drives =
        |now: &str, then: &str| json!({ "created": true, "pendingChanges": at_start(&section(now), &section(then)) });
    let waiting = || json!({ "created": true, "cpus": 1, "ram": "4Gi", "pendingChanges": pending });
    let refused = || json!({ "created": true, "cpus": 2, "ram": "3Gi", "conditions": [condition] });
    let restart = "waits for a restart";
    for (status, about, effect, words, is_well) in [
        (json!({ "created": true, "ram": "4Gi" }), About::Ram, AtOnce, "the running guest has it", true),
        (
            json!({ "created": true, "cpus": 1 }),
            About::Cpus,
            AtOnce,
            "the running guest is asked for it, and has 1 now",
            true,
        ),
        (json!({ "created": true }), About::Ram, AtOnce, "the running guest is asked for it", true),
        (refused(), About::Ram, AtOnce, "the running guest is asked for it, and has 3Gi now", true),
        (refused(), About::Cpus, AtOnce, "the running guest has it", true),
        (refused(), drive("0"), AtOnce, "not all is as it should be: no such file", false),
        (refused(), disk("core-disk", true), NextStart, restart, true),
        (json!({ "created": false }), disk("core-disk", true), NextStart, "the guest gets it when it starts", true),
        (
            json!({ "created": true }),
            disk("core-disk", true),
            AtOnce,
            "the running guest has it as soon as the claim has grown",
            true,
        ),
        (waiting(), About::Cpus, NextStart, "waits for a restart: config.yaml/vm.maximumCpus", true),
        (waiting(), About::Cpus, AtOnce, "the running guest is asked for it, and has 1 now", true),
        (waiting(), About::Ram, AtOnce, "the running guest has it", true),
        (waiting(), About::Ram, NextStart, "waits for a restart: config.yaml/vm.maximumRam", true),
        // The runner of the VM-Operator does not say what waits.
        (json!({ "created": true }), About::Ram, NextStart, restart, true),
        (
            json!({ "created": true, "cpus": 2, "pendingChanges": [{ "path": "config.yaml/vm.currentCpus", "subject": { "kind": "Cpus" }, "reason": "r" }] }),
            About::Cpus,
            AtOnce,
            "waits for a restart: config.yaml/vm.currentCpus",
            true,
        ),
        (waiting(), drive("0"), AtOnce, "the running guest has it", true),
        (waiting(), drive("tools"), AtOnce, "waits for a restart: config.yaml/vm.drives[tools]", true),
        (
            waiting(),
            disk("data-disk", false),
            NextStart,
            "waits for a restart: config.yaml/vm.drives[data-disk], objects/Pod/spec.volumes[data-disk]",
            true,
        ),
        (waiting(), disk("core-disk", true), NextStart, restart, true),
        // The first of two CD drives was taken out, and the drive that is left is where it was.
        (
            drives("[{ type: ide-cd, file: '' }, { type: ide-cd, file: '' }]", "[{ type: ide-cd, file: '', slot: 1 }]"),
            drive("0"),
            AtOnce,
            "the running guest has it",
            true,
        ),
        (
            drives("[{ type: ide-cd, file: '', slot: 1 }]", "[{ type: ide-cd, file: '' }, { type: ide-cd, file: '' }]"),
            drive("0"),
            AtOnce,
            "waits for a restart: config.yaml/vm.drives[0]",
            true,
        ),
        (
            json!({ "created": false, "claims": growth }),
            disk("core-disk", true),
            NextStart,
            "the guest gets it when it starts; claim apple-core-disk can't grow from 1Gi to 2Gi: no (tried again when the VM's spec changes)",
            false,
        ),
    ] {
        let FoundVm { vm, .. } = stored(|vm| vm["status"] = status.clone());
        assert_eq!(outcome(&vm, &about, effect), (words.to_owned(), is_well), "{status} {about:?}");
    }
}
