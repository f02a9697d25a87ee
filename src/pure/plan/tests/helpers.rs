//! Pods that help the guest: when they are made and deleted, and that two Pods never write to one disk.

use super::*;
use crate::{
    object::{CONTAINER_NAME, ROLE_ANNOTATION, labels},
    observed::Observed,
    plan::instances::Instances,
};

const SERVER: &str = "apple-server";

/// What is rendered for the VM with a helper that serves its disk: the guest's Pod does not mount it.
fn served(vm: &VirtualMachine, observed: &Observed) -> Vec<Rendered> {
    let mut objects = rendered(vm, observed);
    let guest = objects.iter_mut().find(|object| object.key.is_pod()).unwrap();
    let volumes = guest.value["spec"]["volumes"].as_array().unwrap().clone();
    let (disk, others): (Vec<_>, Vec<_>) = volumes.into_iter().partition(|volume| volume["name"] == "core-disk");
    let mut helper = guest.clone();
    Arc::make_mut(&mut guest.value)["spec"]["volumes"] = json!(others);
    helper.key.name = SERVER.into();
    helper.is_helper = true;
    helper.hash = "served".into();
    let value = Arc::make_mut(&mut helper.value);
    value["metadata"]["name"] = json!(SERVER);
    value["metadata"]["labels"] = json!(labels("apple"));
    value["metadata"]["annotations"] = json!({ ROLE_ANNOTATION: "helper", HASH_ANNOTATION: "served" });
    value["spec"] = json!({ "containers": [{ "name": "server", "image": "x" }], "volumes": disk });
    objects.push(helper);
    objects
}

fn is_ready(pod: &mut Value) {
    pod["status"] = json!({ "phase": "Running", "conditions": [{ "type": "Ready", "status": "True" }] });
}

/// A cluster with all objects of `objects` but those Pods, each changed by `edit`, which gets its name.
fn with(objects: &[Rendered], absent: &[&str], edit: impl Fn(&str, &mut Value)) -> Observed {
    let present: Vec<_> = objects
        .iter()
        .filter(|object| !object.key.is_pod() || !absent.contains(&object.key.name.as_str()))
        .cloned()
        .collect();
    applied(&present, |kind, object| {
        let name = object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        if kind == "Pod" {
            edit(&name, object);
        }
    })
}

/// The actions on Pods, and the waits, of a plan.
fn pods(vm: &VirtualMachine, observed: &Observed) -> Vec<String> {
    let of_pods = short(&plan(vm, observed, Some(&served(vm, observed))));
    let of_pods =
        of_pods.into_iter().map(|it| it.replace(r#"(ObjectKey { api_version: "v1", kind: "Pod", name: ""#, " "));
    of_pods.filter(|it| it.contains("Pod") || it.contains(" apple")).map(|it| it.replace("\" })", "")).collect()
}

#[test]
fn a_helper_is_there_before_the_guest_and_after_it() {
    let up = vm(|_| ());
    let again = vm(|vm| vm["metadata"]["annotations"] = json!({ RESTARTED_ANNOTATION: "monday" }));
    let objects = served(&up, &nothing());
    let server_ready = |name: &str, pod: &mut Value| {
        if name == SERVER {
            is_ready(pod);
        }
    };
    let ended = |phase: &'static str| {
        move |name: &str, pod: &mut Value| {
            if name == SERVER {
                pod["status"] = json!({ "phase": phase });
            }
        }
    };
    let deleting = |which: &'static str| {
        move |name: &str, pod: &mut Value| {
            if name == which {
                pod["metadata"]["deletionTimestamp"] = json!("2027-01-15T12:00:00Z");
            }
            server_ready(name, pod);
        }
    };
    let changed = |name: &str, pod: &mut Value| {
        if name == SERVER {
            pod["metadata"]["annotations"][HASH_ANNOTATION] = json!("before");
        }
        server_ready(name, pod);
    };
    let (none, guest, both): (&[&str], &[&str], &[&str]) = (&["apple", SERVER], &[SERVER], &[]);
    let server = &["apple"];
    let as_it_is = |_: &str, _: &mut Value| ();
    for (what, vm, observed, expected) in [
        ("first", &up, with(&objects, none, as_it_is), vec!["1 make Pod apple-server", "HelperNotReady apple-server"]),
        ("not ready", &up, with(&objects, server, as_it_is), vec!["HelperNotReady apple-server"]),
        ("ready", &up, with(&objects, server, server_ready), vec!["1 make Pod apple"]),
        ("done", &up, with(&objects, server, ended("Succeeded")), vec!["1 make Pod apple"]),
        ("both", &up, with(&objects, both, server_ready), vec![]),
        ("not ready beside a guest", &up, with(&objects, both, as_it_is), vec!["HelperNotReady apple-server"]),
        ("changed beside a guest", &up, with(&objects, both, changed), vec![]),
        (
            "lost beside a guest",
            &up,
            with(&objects, guest, as_it_is),
            vec!["1 make Pod apple-server", "HelperNotReady apple-server"],
        ),
        ("ends beside a guest", &up, with(&objects, both, deleting(SERVER)), vec!["Gone apple-server"]),
        (
            "changed",
            &up,
            with(&objects, server, changed),
            vec!["0 delete Pod apple-server Renewed None", "Gone apple-server"],
        ),
        ("ends", &up, with(&objects, server, deleting(SERVER)), vec!["Gone apple-server"]),
        ("the guest ends", &up, with(&objects, both, deleting("apple")), vec!["Gone apple"]),
        ("restart", &again, with(&objects, both, server_ready), vec!["1 delete Pod apple Restart None", "Gone apple"]),
        (
            "restart, without the guest",
            &again,
            with(&objects, server, server_ready),
            vec!["0 delete Pod apple-server Renewed None", "Gone apple-server"],
        ),
        ("stop", &stopped(), with(&objects, both, server_ready), vec!["0 delete Pod apple", "Gone apple"]),
        ("the guest stops", &stopped(), with(&objects, both, deleting("apple")), vec!["Gone apple"]),
        (
            "stopped",
            &stopped(),
            with(&objects, server, server_ready),
            vec!["0 delete Pod apple-server", "Gone apple-server"],
        ),
        ("the helper stops", &stopped(), with(&objects, server, deleting(SERVER)), vec!["Gone apple-server"]),
        ("down", &stopped(), with(&objects, none, as_it_is), vec![]),
    ] {
        assert_eq!(pods(vm, &observed), expected, "{what}");
    }
    // One that has failed is made again, as a guest's Pod is.
    let failed = plan(&up, &with(&objects, both, ended("Failed")), Some(&objects));
    assert_eq!(failed.retry.map(|retry| retry.pod_uid).as_deref(), Some("Pod-apple-server"));
}

#[test]
fn two_pods_never_write_to_one_disk() {
    let up = vm(|_| ());
    let (objects, plain) = (served(&up, &nothing()), rendered(&up, &nothing()));
    let ready = |_: &str, pod: &mut Value| is_ready(pod);
    // The guest runs with its disk, and new templates have a helper that serves it: not beside that guest.
    let observed = with(&plain, &[], ready);
    assert_eq!(pods(&up, &observed), [""; 0]);
    let pending = plan(&up, &observed, Some(&objects)).pending;
    assert!(pending.iter().any(|change| change.path == "objects/Pod/apple-server"), "{pending:?}");
    let again = vm(|vm| vm["metadata"]["annotations"] = json!({ RESTARTED_ANNOTATION: "monday" }));
    assert_eq!(pods(&again, &observed), ["1 delete Pod apple Restart None", "Gone apple"]);
    // And back: the helper goes before the guest gets the disk.
    let observed = with(&objects, &["apple"], ready);
    let back = short(&plan(&up, &observed, Some(&rendered(&up, &observed))));
    assert_eq!(back, ["0 delete Pod apple-server", &GONE.replace("apple", SERVER)]);
    let ends =
        with(&objects, &["apple"], |_, pod| pod["metadata"]["deletionTimestamp"] = json!("2027-01-15T12:00:00Z"));
    assert_eq!(short(&plan(&up, &ends, Some(&rendered(&up, &ends)))), [GONE.replace("apple", SERVER)]);
    // Beside its guest it stays, because the guest has its disk from there.
    let both = with(&objects, &[], ready);
    assert!(!short(&plan(&up, &both, Some(&rendered(&up, &both)))).iter().any(|it| it.contains("delete")));
    assert_eq!(short(&plan(&stopped(), &both, None)), ["0 delete Pod apple", GONE]);
}

#[test]
fn a_helper_waits_for_the_guest_of_a_deleted_vm_of_the_same_name() {
    let up = vm(|_| ());
    let observed = with(&served(&up, &nothing()), &[SERVER], |_, pod| {
        pod["metadata"]["ownerReferences"][0]["uid"] = json!("former");
        pod["spec"]["volumes"] = json!([{ "name": "d", "persistentVolumeClaim": { "claimName": "apple-core-disk" } }]);
        pod["metadata"]["deletionTimestamp"] = json!("2027-01-15T12:00:00Z");
        is_ready(pod);
    });
    let steps = pods(&up, &observed);
    assert!(
        steps.iter().any(|step| step == "Gone apple") && !steps.iter().any(|step| step.contains("make")),
        "{steps:?}"
    );
}

#[test]
fn a_disk_that_was_taken_out_of_the_spec_is_still_the_guests() {
    let up = vm(|vm| vm["status"] = json!({ "claims": [{ "name": "apple-old-disk", "uid": "u" }] }));
    let old = json!([{ "name": "d", "persistentVolumeClaim": { "claimName": "apple-old-disk" } }]);
    let mut objects = served(&up, &nothing());
    Arc::make_mut(&mut objects.last_mut().unwrap().value)["spec"]["volumes"] = old.clone();
    let observed = with(&objects, &[SERVER], |_, pod| {
        pod["spec"]["volumes"] = old.clone();
        is_ready(pod);
    });
    let steps = short(&plan(&up, &observed, Some(&objects)));
    assert!(!steps.iter().any(|step| step.contains("make Pod")), "{steps:?}");
}

#[test]
fn only_the_manager_gives_a_role() {
    let up = vm(|_| ());
    let objects = served(&up, &nothing());
    let roles = |observed: &Observed| {
        let instances = Instances::new(&up, observed);
        let helpers: Vec<_> = instances.helpers().map(|pod| pod.key.name.clone()).collect();
        let guests: Vec<_> = instances.guests().map(|pod| pod.key.name.clone()).collect();
        let strangers: Vec<_> = instances.strangers().map(|pod| pod.key.name.clone()).collect();
        (helpers.join(" "), guests.join(" "), strangers.join(" "))
    };
    let by = |edit: &dyn Fn(&mut Value)| {
        let mut observed = with(&objects, &["apple"], |_, pod| {
            is_ready(pod);
            edit(pod);
        });
        observed.pod_names = Some(vec!["apple".into(), SERVER.into()]);
        roles(&observed)
    };
    let (helper, guest, stranger) = ((SERVER, "", ""), ("", SERVER, ""), ("", "", "pretender"));
    let is = |(helpers, guests, strangers): (&str, &str, &str)| (helpers.into(), guests.into(), strangers.into());
    assert_eq!(by(&|_| ()), is(helper));
    // A person has made it with the VM as its owner, and with the annotation. It can write to the disk.
    let by_person = |pod: &mut Value| pod["metadata"]["managedFields"][0]["manager"] = json!("kubectl-create");
    assert_eq!(by(&by_person), is(guest));
    assert_eq!(by(&|pod| pod["metadata"]["managedFields"] = json!([])), is(guest), "a backup has brought it back");
    let pretends = |pod: &mut Value| {
        by_person(pod);
        pod["metadata"]["name"] = json!("pretender");
    };
    assert_eq!(by(&pretends), is(stranger));
    let annotations = "/metadata/managedFields/0/fieldsV1/f:metadata/f:annotations";
    let says_person = |pod: &mut Value| {
        let given = pod.pointer_mut(annotations).and_then(Value::as_object_mut).unwrap();
        assert!(given.remove(&format!("f:{ROLE_ANNOTATION}")).is_some());
    };
    assert_eq!(by(&says_person), is(guest), "the manager has made the Pod, and a person writes the role");
    assert_eq!(by(&|pod| pod["metadata"]["annotations"][ROLE_ANNOTATION] = json!("active")), is(guest));
    assert_eq!(by(&|pod| pod["spec"]["containers"][0]["name"] = json!(CONTAINER_NAME)), is(guest), "it runs the guest");
    // Nobody starts a guest beside such a Pod, whatever it says, and what is the VM's stops with it.
    for (edit, waits) in [(&pretends as &dyn Fn(&mut Value), "ClaimInUse"), (&by_person, "Gone")] {
        let mut observed = with(&objects, &["apple"], |_, pod| {
            is_ready(pod);
            edit(pod);
        });
        observed.pod_names = Some(vec!["apple".into(), SERVER.into()]);
        let steps = short(&plan(&up, &observed, Some(&served(&up, &observed))));
        assert!(steps.iter().any(|step| step.starts_with(waits)), "{steps:?}");
        assert!(!steps.iter().any(|step| step.contains("make Pod")), "{steps:?}");
        let stops = pods(&stopped(), &observed);
        assert_eq!(stops.iter().any(|step| step == "0 delete Pod apple-server"), waits == "Gone", "{stops:?}");
    }
}

/// The objects with a second helper, which mounts nothing.
fn with_second(mut objects: Vec<Rendered>) -> Vec<Rendered> {
    let mut second = objects.iter().find(|object| object.is_helper).unwrap().clone();
    second.key.name = "apple-second".into();
    let value = Arc::make_mut(&mut second.value);
    value["metadata"]["name"] = json!("apple-second");
    value["spec"]["volumes"] = json!([]);
    objects.push(second);
    objects
}

#[test]
fn helpers_do_not_wait_for_each_other() {
    let up = vm(|_| ());
    let objects = with_second(served(&up, &nothing()));
    let made = short(&plan(&up, &nothing(), Some(&objects)));
    for helper in ["1 make Pod apple-server", "1 make Pod apple-second"] {
        assert!(made.iter().any(|step| step == helper), "{made:?}");
    }
    assert!(!made.iter().any(|step| step == "1 make Pod apple"));
}

#[test]
fn what_makes_the_guests_pod_counts_as_its_guest() {
    let up = vm(|_| ());
    let by_set = |mut objects: Vec<Rendered>| {
        let pod = objects.iter_mut().find(|object| object.key.is_pod() && !object.is_helper).unwrap();
        (pod.key.api_version, pod.key.kind) = ("apps/v1".into(), "StatefulSet".into());
        let value = Arc::make_mut(&mut pod.value);
        let spec = value["spec"].take();
        (value["apiVersion"], value["kind"]) = (json!("apps/v1"), json!("StatefulSet"));
        value["metadata"]["annotations"][LIFETIME_ANNOTATION] = json!("running");
        value["spec"] = json!({ "template": { "spec": spec } });
        objects
    };
    let (before, after) = (by_set(rendered(&up, &nothing())), by_set(served(&up, &nothing())));
    let hash = |hash: &'static str| {
        move |kind: &str, object: &mut Value| {
            if kind == "StatefulSet" {
                object["metadata"]["annotations"][HASH_ANNOTATION] = json!(hash);
            }
        }
    };
    // Its Pod has gone, and the StatefulSet makes it again as it was: with the disk.
    let observed = applied(&before, hash("before"));
    let steps = short(&plan(&up, &observed, Some(&after)));
    assert!(!steps.iter().any(|step| step.contains("make Pod")), "{steps:?}");
    // One that is as rendered does not mount the disk, so a helper that was lost is made again.
    let rendered_hash = after.iter().find(|object| object.key.kind == "StatefulSet").unwrap().hash.clone();
    let observed = applied(&after[..after.len() - 1], move |kind, object| {
        if kind == "StatefulSet" {
            object["metadata"]["annotations"][HASH_ANNOTATION] = json!(rendered_hash);
        }
    });
    let steps = short(&plan(&up, &observed, Some(&after)));
    assert!(steps.iter().any(|step| step == "1 make Pod apple-server"), "{steps:?}");
    // A stopped VM's helper goes after what makes the guest.
    let observed = applied(&after, |_, _| ());
    let steps = short(&plan(&stopped(), &observed, Some(&by_set(served(&stopped(), &observed)))));
    assert!(steps.iter().any(|step| step == "0 delete StatefulSet apple"), "{steps:?}");
    assert!(!steps.iter().any(|step| step == "0 delete Pod apple-server"), "{steps:?}");
}

#[test]
fn a_key_that_changes_its_role_is_made_anew_without_a_guest() {
    let up = vm(|_| ());
    let ready = |_: &str, pod: &mut Value| is_ready(pod);
    let objects = served(&up, &nothing());
    // The same Pod is no helper any more.
    let mut plain = objects.clone();
    let other = plain.last_mut().unwrap();
    other.is_helper = false;
    Arc::make_mut(&mut other.value)["metadata"]["annotations"] = json!({ HASH_ANNOTATION: "served" });
    let both = short(&plan(&up, &with(&objects, &[], ready), Some(&plain)));
    assert!(!both.iter().any(|step| step.contains(SERVER)), "{both:?}");
    let alone = short(&plan(&up, &with(&objects, &["apple"], ready), Some(&plain)));
    assert_eq!(alone, ["0 delete Pod apple-server", &GONE.replace("apple", SERVER)]);
    // And it becomes one. It mounts nothing, so no guest may be in it.
    let mut objects = with_second(objects);
    objects.retain(|object| object.key.name != SERVER);
    let mut plain = objects.clone();
    let other = plain.last_mut().unwrap();
    other.is_helper = false;
    Arc::make_mut(&mut other.value)["metadata"]["annotations"] = json!({ HASH_ANNOTATION: "served" });
    let alone = short(&plan(&up, &with(&plain, &["apple"], ready), Some(&objects)));
    assert_eq!(alone, ["0 delete Pod apple-second Renewed None", &GONE.replace("apple", "apple-second")]);
}

#[test]
fn a_helper_is_kept_for_a_claim_that_goes_with_it_and_stops_without_templates() {
    let up = vm(|_| ());
    let objects = served(&up, &nothing());
    let observed = applied(&objects, |kind, object| {
        if kind == "PersistentVolumeClaim" && object["metadata"]["name"] == "apple-core-disk" {
            object["metadata"]["deletionTimestamp"] = json!("2027-01-15T12:00:00Z");
        }
    });
    let mut observed = observed;
    observed.objects.retain(|object| object.key.name != "apple" || !object.key.is_pod());
    let kept = short(&plan(&up, &observed, Some(&rendered(&up, &observed))));
    assert!(!kept.iter().any(|step| step.contains("delete Pod")), "{kept:?}");
    assert_eq!(
        short(&plan(&stopped(), &observed, None)),
        ["0 delete Pod apple-server", &GONE.replace("apple", SERVER)]
    );
}
