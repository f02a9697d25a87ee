use serde_json::json;

use super::*;
use crate::{api::VirtualMachine, test_support};

fn pod() -> PodFacts {
    PodFacts { name: "web-0".into(), uid: "u-2".into(), namespace: "orchard".into(), node: "a".into() }
}

fn place() -> Workplace {
    Workplace { pod: pod(), prototype: "proto".into(), prototype_namespace: "orchard".into() }
}

/// A VM of a Pod; `None`: of none.
fn vm(name: &str, of: Option<(&str, &str)>, is_going: bool) -> ObjectMeta {
    let annotations = of.map(
        |(pod, uid)| json!({ POD_ANNOTATION: pod, POD_UID_ANNOTATION: uid, PROTOTYPE_ANNOTATION: "orchard/proto" }),
    );
    let time = is_going.then_some("2027-01-15T08:00:00Z");
    let applied = json!([{ "manager": FIELD_MANAGER, "operation": "Apply", "time": "2027-01-15T06:00:00Z" }]);
    serde_json::from_value(json!({
        "name": name, "uid": format!("{name}-uid"), "annotations": annotations, "deletionTimestamp": time,
        "creationTimestamp": "2027-01-15T06:00:00Z", "managedFields": applied,
    }))
    .unwrap()
}

/// A copy of the VM of a Pod that is gone.
fn by_a_person(name: &str) -> ObjectMeta {
    let mut copy = vm(name, Some(("orchard/web-2", "u-4")), false);
    for entry in copy.managed_fields.iter_mut().flatten() {
        entry.manager = Some("kubectl-create".into());
    }
    copy
}

fn of_another_prototype(name: &str) -> ObjectMeta {
    let mut other = vm(name, Some(("orchard/web-2", "u-4")), false);
    other.annotations.as_mut().unwrap().insert(PROTOTYPE_ANNOTATION.into(), "orchard/pro".into());
    other
}

#[test]
fn what_a_person_or_another_prototype_made_is_left_alone() {
    let taken = |found: &ObjectMeta| standing(Some(found), &place(), &Some(BTreeSet::new()));
    assert_eq!(taken(&by_a_person("proto-web-0")), Standing::Taken(Taken::Foreign));
    let other = Taken::OtherPrototype { prototype: "orchard/pro".into() };
    assert_eq!(taken(&of_another_prototype("proto-web-0")), Standing::Taken(other));
    // Of a backup, with what the API server had noted.
    let mut restored = vm("proto-web-2", Some(("orchard/web-2", "u-4")), false);
    restored.creation_timestamp = serde_json::from_value(json!("2027-01-15T07:00:00Z")).unwrap();
    assert_eq!(taken(&restored), Standing::Taken(Taken::Foreign));
}

#[test]
fn only_a_vm_of_the_same_uid_is_ours() {
    let living = || Some(BTreeSet::from(["u-2".to_owned(), "u-lives".to_owned()]));
    let leftover = || Standing::Leftover { uid: "x-uid".into() };
    let other = |pod: &str| Standing::Taken(Taken::OtherPod { pod: pod.into() });
    let next = |pod: &str| Standing::Taken(Taken::NextPod { pod: pod.into() });
    let unknown = |pod: &str| Standing::Taken(Taken::UnknownPod { pod: pod.into() });
    for (of, is_going, living, expected) in [
        (None, false, living(), Standing::Taken(Taken::Foreign)),
        (None, true, living(), Standing::Taken(Taken::Foreign)),
        (Some(("orchard/web-0", "u-2")), false, None, Standing::Ours),
        (Some(("orchard/web-0", "u-2")), true, None, Standing::Going),
        (Some(("orchard/web-0", "u-1")), true, living(), Standing::Going),
        // A StatefulSet's Pod before.
        (Some(("orchard/web-0", "u-1")), false, living(), leftover()),
        (Some(("orchard/web-0", "u-1")), false, None, leftover()),
        // The Pod after this one, which was deleted by force.
        (Some(("orchard/web-0", "u-lives")), false, living(), next("orchard/web-0")),
        (Some(("orchard/web-0", "u-lives")), true, living(), Standing::Going),
        // Another Pod whose names give the same.
        (Some(("orchard/0", "u-1")), false, living(), leftover()),
        (Some(("orchard/0", "u-lives")), false, living(), other("orchard/0")),
        (Some(("orchard/0", "u-lives")), true, living(), Standing::Going),
        (Some(("orchard/0", "u-1")), false, None, unknown("orchard/0")),
        (Some(("meadow/web-0", "u-1")), false, living(), unknown("meadow/web-0")),
        (Some(("meadow/web-0", "u-1")), false, None, unknown("meadow/web-0")),
    ] {
        assert_eq!(standing(Some(&vm("x", of, is_going)), &place(), &living), expected, "{of:?} {is_going} {living:?}");
    }
    assert_eq!(standing(None, &place(), &None), Standing::Absent);
}

#[test]
fn orphans_are_vms_of_pods_of_this_namespace_that_live_no_more() {
    let vms = [
        vm("proto-web-0", Some(("orchard/web-0", "u-2")), false),
        vm("proto-web-1", Some(("orchard/web-1", "u-3")), false),
        vm("proto-web-2", Some(("orchard/web-2", "u-4")), false),
        vm("proto-web-3", Some(("orchard/web-3", "u-5")), true),
        vm("proto-web-4", Some(("meadow/web-4", "u-6")), false),
        vm("nobodys", None, false),
        // A Pod of that name lives, but it is another one.
        vm("proto-web-1", Some(("orchard/web-1", "u-7")), false),
        // A person has made a copy of a VM.
        vm("copy", Some(("orchard/web-2", "u-4")), false),
        by_a_person("proto-web-2"),
        of_another_prototype("proto-web-2"),
    ];
    let living = BTreeSet::from(["u-3".to_owned()]);
    let found = orphans(&vms, &place(), &living);
    let names: Vec<&str> = found.iter().map(|orphan| orphan.name.as_str()).collect();
    assert_eq!(names, ["proto-web-2", "proto-web-1"]);
    assert_eq!((found[0].uid.as_str(), found[0].pod.as_str()), ("proto-web-2-uid", "orchard/web-2"));
    assert_eq!(orphans(&vms, &place(), &BTreeSet::new())[0].name, "proto-web-1", "this Pod's own VM is never one");
}

#[test]
fn a_claim_that_is_not_the_vms_is_fixed_in_a_template() {
    let vm = test_support::vm(|vm| {
        vm["status"] =
            json!({ "claims": [{ "name": "apple-core-disk", "uid": "u" }, { "name": "apple-runner-data" }] });
    });
    let written = |claims: &[&str]| claims.iter().map(|claim| (*claim).to_owned()).collect::<BTreeSet<_>>();
    assert_eq!(fixed_claim(&vm, &written(&["apple-core-disk", "apple-runner-data"])), None);
    assert_eq!(fixed_claim(&vm, &written(&["apple-core-disk", "shared"])), Some("shared"));
    // The names of these have the VM's in them, whoever makes them.
    assert_eq!(fixed_claim(&vm, &written(&["apple-scratch", "core-disk-apple-0"])), None);
    // A template makes the claim: it is in the status of each VM.
    let makes = test_support::vm(|vm| vm["status"] = json!({ "claims": [{ "name": "shared", "uid": "u" }] }));
    assert_eq!(fixed_claim(&makes, &written(&["shared"])), Some("shared"));
    assert!(!is_own_claim(&makes, "shared"), "so it is never deleted with one of them");
}

#[test]
fn the_vm_is_to_own_a_claim_that_was_made_for_it_until_it_does() {
    let claim = |name: &str, made_for: &str, owner: Option<&str>, time: Option<&str>| {
        let owner = owner.map(|uid| json!({ "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine", "name": "apple", "uid": uid }));
        let claim = json!({
            "name": name, "uid": "u", "ownerReferences": owner.into_iter().collect::<Vec<_>>(), "deletionTimestamp": time,
            "annotations": { "vmoperator.jdrupes.org/madeFor": made_for },
            "managedFields": [{ "manager": "vm-operator", "operation": "Apply" }],
        });
        serde_json::from_value::<ObjectMeta>(claim).unwrap()
    };
    let vm = test_support::vm(|_| ());
    let disk = "apple-core-disk";
    for (claim, expected) in [
        (claim(disk, "apple-uid", None, None), true),
        (claim(disk, "u-before", None, None), false),
        (claim(disk, "apple-uid", Some("apple-uid"), None), false),
        (claim(disk, "apple-uid", None, Some("2027-01-15T08:00:00Z")), false),
        (claim("shared", "apple-uid", None, None), false),
    ] {
        assert_eq!(is_to_own(&vm, &claim), expected, "{claim:?}");
    }
}

#[test]
fn the_guest_is_up_when_its_agent_answers_or_when_it_runs() {
    use ReadyWhen::{Booted, Running};
    let with = |phase: &str, running: bool, booted: bool| {
        let condition = |type_: &str, is: bool, reason: &str| json!({ "type": type_, "status": if is { "True" } else { "False" }, "reason": reason, "message": format!("{type_} is told"), "lastTransitionTime": "2026-01-01T00:00:00Z" });
        test_support::vm(|vm| {
            vm["status"] = json!({ "phase": phase, "conditions": [
                condition("Ready", running, "Starting"), condition("Running", running, "Starting"), condition("Booted", booted, "NoGuestAgent"),
            ] });
        })
    };
    let told = |vm: &VirtualMachine, when| match readiness(vm, when) {
        Readiness::Ready => "ready".to_owned(),
        Readiness::NotReady(why) => why,
    };
    for (vm, booted, running) in [
        (with("Running", true, true), "ready", "ready"),
        (with("Running", true, false), "NoGuestAgent: Booted is told", "ready"),
        (with("Starting", false, false), "Starting: Ready is told", "Starting: Ready is told"),
        (with("Paused", true, true), "Starting: Ready is told", "Starting: Ready is told"),
        (with("Stopping", true, true), "Starting: Ready is told", "Starting: Ready is told"),
    ] {
        assert_eq!((told(&vm, Booted).as_str(), told(&vm, Running).as_str()), (booted, running));
    }
    let new = test_support::vm(|_| ());
    assert_eq!(told(&new, Running), "no manager has seen the VM yet");
}
