//! The generation of the spec that the guest has.

use super::*;
use crate::{object::RESTARTED_ANNOTATION, runner_config::ConfigFile};

/// The digest of the rendered `config.yaml`.
fn digest(vm: &VirtualMachine) -> String {
    let objects = rendered(vm, &nothing());
    let map = objects.iter().find(|object| object.key.kind == "ConfigMap" && object.key.name == "apple").unwrap();
    ConfigFile::digest(map.value["data"]["config.yaml"].as_str().unwrap())
}

#[test]
fn running_and_booted_are_about_the_spec_that_the_guest_has() {
    let newest = digest(&vm(|_| ()));
    let up = |edit: &dyn Fn(&mut Value)| {
        reported(true, |vm| {
            let mut booted = vm["status"]["conditions"][0].clone();
            booted["type"] = json!(BOOTED);
            vm["status"]["conditions"].as_array_mut().unwrap().push(booted);
            vm["status"]["podUid"] = json!("Pod-apple");
            vm["status"]["configDigest"] = json!(newest);
            vm["status"]["guestGeneration"] = json!(2);
            edit(vm);
        })
    };
    let plain = || cluster(|_, _| ());
    let being_deleted = || {
        cluster(|kind, object| {
            if kind == "Pod" {
                object["metadata"]["deletionTimestamp"] = json!("2027-01-15T08:10:00Z");
            }
        })
    };
    let on_another_node = |vm: &mut Value| vm["spec"]["nodeSelector"] = json!({ "disk": "ssd" });
    let restarted = |vm: &mut Value| vm["metadata"]["annotations"] = json!({ RESTARTED_ANNOTATION: "monday" });
    let stopped = |vm: &mut Value| {
        vm["spec"]["vm"]["state"] = json!("Stopped");
        set_by("Update", vm);
    };
    let waits = |vm: &mut Value| {
        vm["status"]["pendingChanges"] = json!([{ "path": "config.yaml/vm.maximumCpus", "reason": "why" }]);
    };
    for (what, vm, observed, expected, taken) in [
        ("the guest has everything", up(&|_| ()), plain(), Some(3), None),
        ("the first report", up(&|vm| vm["status"]["guestGeneration"] = Value::Null), plain(), Some(3), None),
        ("config.yaml is not read yet", up(&|vm| vm["status"]["configDigest"] = json!("old")), plain(), Some(2), None),
        ("a setting waits for QEMU's start", up(&waits), plain(), Some(2), Some(3)),
        ("the Pod's spec waits for its start", up(&on_another_node), plain(), Some(2), Some(3)),
        ("a restart is requested", up(&restarted), plain(), Some(2), None),
        ("the guest of another Pod", up(&|vm| vm["status"]["podUid"] = json!("another")), plain(), Some(2), None),
        ("the Pod is being replaced", up(&|_| ()), being_deleted(), Some(2), None),
        ("the VM is being stopped", up(&stopped), plain(), Some(2), None),
        ("no Pod", up(&|_| ()), nothing(), None, None),
        ("a runner that says nothing", up(&|vm| vm["status"]["configDigest"] = Value::Null), plain(), Some(3), None),
        (
            "a status of the future",
            up(&|vm| vm["status"]["guestGeneration"] = json!(9)),
            being_deleted(),
            Some(3),
            None,
        ),
    ] {
        let status = reconcile(&vm, &observed, false).0;
        assert_eq!((status.guest_generation, status.taken_generation), (expected, taken), "{what}");
        // The manager applies it to the runner's conditions, and to its own.
        let applied = crate::ownership::status_to_apply(&vm, &status);
        let conditions = applied["conditions"].as_array().unwrap();
        for type_ in [RUNNING, BOOTED] {
            let condition = conditions.iter().find(|condition| condition["type"] == type_).unwrap();
            assert_eq!(condition["observedGeneration"], json!(expected.unwrap_or(3)), "{what}");
        }
    }
}
