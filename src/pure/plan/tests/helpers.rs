//! Pods that help the guest: when they are made and deleted, and that two Pods never write to one disk.

use super::*;
use crate::{
    object::{CONTAINER_NAME, ROLE_ANNOTATION, Role},
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
        ("not ready beside a guest", &up, with(&objects, both, as_it_is), vec![]),
        ("changed beside a guest", &up, with(&objects, both, changed), vec![]),
        ("lost beside a guest", &up, with(&objects, guest, as_it_is), vec!["1 make Pod apple-server"]),
        ("ends beside a guest", &up, with(&objects, both, deleting(SERVER)), vec![]),
        (
            "changed",
            &up,
            with(&objects, server, changed),
            vec!["0 delete Pod apple-server Changed None", "Gone apple-server"],
        ),
        ("ends", &up, with(&objects, server, deleting(SERVER)), vec!["Gone apple-server"]),
        ("the guest ends", &up, with(&objects, both, deleting("apple")), vec!["Gone apple"]),
        ("restart", &again, with(&objects, both, server_ready), vec!["1 delete Pod apple Restart None", "Gone apple"]),
        (
            "restart, without the guest",
            &again,
            with(&objects, server, server_ready),
            vec!["1 delete Pod apple-server Restart None", "Gone apple-server"],
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
        roles(&with(&objects, &["apple"], |_, pod| {
            is_ready(pod);
            edit(pod);
        }))
    };
    let (helper, guest, stranger) = ((SERVER, "", ""), ("", SERVER, ""), ("", "", SERVER));
    let is = |(helpers, guests, strangers): (&str, &str, &str)| (helpers.into(), guests.into(), strangers.into());
    assert_eq!(by(&|_| ()), is(helper));
    // A person has made it with the VM as its owner, and with the annotation. It can write to the disk.
    assert_eq!(by(&|pod| pod["metadata"]["managedFields"][0]["manager"] = json!("kubectl-create")), is(stranger));
    assert_eq!(by(&|pod| pod["metadata"]["managedFields"] = json!([])), is(stranger), "a copy of a backup");
    let annotations = "/metadata/managedFields/0/fieldsV1/f:metadata/f:annotations";
    let by_person = |pod: &mut Value| {
        let given = pod.pointer_mut(annotations).and_then(Value::as_object_mut).unwrap();
        assert!(given.remove(&format!("f:{ROLE_ANNOTATION}")).is_some());
    };
    assert_eq!(by(&by_person), is(guest), "the manager has made the Pod, and a person writes the role");
    assert_eq!(by(&|pod| pod["metadata"]["annotations"][ROLE_ANNOTATION] = json!("active")), is(guest));
    assert_eq!(by(&|pod| pod["spec"]["containers"][0]["name"] = json!(CONTAINER_NAME)), is(guest), "it runs the guest");
    // Nobody starts a guest beside such a Pod, whatever it says.
    let pretends = with(&objects, &["apple"], |_, pod| {
        is_ready(pod);
        pod["metadata"]["managedFields"][0]["manager"] = json!("kubectl-create");
    });
    let holds = short(&plan(&up, &pretends, Some(&rendered(&up, &pretends))));
    assert!(holds.iter().any(|it| it.starts_with("ClaimInUse")) && !holds.iter().any(|it| it.contains("make Pod")));
    // A target is no second guest's Pod by chance: it waits for the guest of the active one.
    let target = with(&objects, &["apple"], |_, pod| pod["metadata"]["annotations"][ROLE_ANNOTATION] = json!("target"));
    let instances = Instances::new(&up, &target);
    assert!(instances.active().is_none() && instances.guests().count() == 1 && instances.helpers().next().is_none());
    assert_eq!(Role::parse("active"), None);
    let waits = short(&plan(&up, &target, Some(&rendered(&up, &target))));
    assert!(!waits.iter().any(|it| it.contains("make Pod")), "{waits:?}");
}
