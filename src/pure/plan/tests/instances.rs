//! Which Pods are the VM's, and what makes them.

use super::*;
use crate::{ownership::origin::Origin, plan::instances::Instances};

/// The owner references that the StatefulSet controller gives a Pod.
fn by_set(uid: &str) -> Value {
    json!([{ "apiVersion": "apps/v1", "kind": "StatefulSet", "name": "apple", "uid": uid, "controller": true, "blockOwnerDeletion": true }])
}

/// The VM with a restart that is asked for.
fn restarted() -> VirtualMachine {
    vm(|vm| vm["metadata"]["annotations"] = json!({ RESTARTED_ANNOTATION: "monday" }))
}

/// Of each deletion of a plan, whether it keeps what the object owns.
fn kept(plan: &Plan) -> Vec<bool> {
    let kept = plan.steps.iter().flatten().filter_map(|action| match action {
        Action::Delete { keeps_owned, .. } => Some(*keeps_owned),
        Action::Apply { .. } | Action::Label { .. } | Action::Image { .. } => None,
    });
    kept.collect()
}

/// The VM's rendered objects with a StatefulSet instead of the Pod.
fn by_stateful_set(vm: &VirtualMachine, observed: &Observed) -> Vec<Rendered> {
    let mut rendered = rendered(vm, observed);
    let pod = rendered.iter_mut().find(|object| object.key.is_pod()).unwrap();
    (pod.key.api_version, pod.key.kind) = ("apps/v1".into(), "StatefulSet".into());
    let value = Arc::make_mut(&mut pod.value);
    (value["apiVersion"], value["kind"]) = (json!("apps/v1"), json!("StatefulSet"));
    value["metadata"]["annotations"][LIFETIME_ANNOTATION] = json!("running");
    rendered
}

#[test]
fn no_deletion_takes_the_claims_of_disks_with_it() {
    let (running, restarted) = (vm(|_| ()), restarted());
    for (owner, is_owned) in [("StatefulSet-apple", true), ("Pod-apple", true), ("another", false)] {
        for is_pod in [false, true] {
            let objects = if is_pod { rendered(&running, &nothing()) } else { by_stateful_set(&running, &nothing()) };
            let observed = applied(&objects, |kind, object| {
                if kind == "PersistentVolumeClaim" {
                    object["metadata"]["ownerReferences"] = by_set(owner);
                }
            });
            let keeps = |vm: &VirtualMachine, is_rendered: bool| {
                let objects =
                    if is_pod == is_rendered { rendered(vm, &observed) } else { by_stateful_set(vm, &observed) };
                kept(&plan(vm, &observed, Some(&objects)))
            };
            let expected = vec![is_owned && owner.starts_with("Pod") == is_pod];
            for vm in [&stopped(), &restarted] {
                assert_eq!(
                    (keeps(vm, true), keeps(vm, false)),
                    (expected.clone(), expected.clone()),
                    "{owner} {is_pod}"
                );
            }
        }
    }
    // The claim of a volume of type `ephemeral` is meant to go with the Pod.
    let observed = applied(&rendered(&running, &nothing()), |kind, object| match kind {
        "PersistentVolumeClaim" => {
            object["metadata"]["name"] = json!("apple-scratch");
            object["metadata"]["ownerReferences"] = by_set("Pod-apple");
        }
        "Pod" => object["spec"]["volumes"] = json!([{ "name": "scratch", "ephemeral": {} }]),
        _ => {}
    });
    assert_eq!(kept(&plan(&stopped(), &observed, Some(&rendered(&stopped(), &observed)))), [false]);
}

#[test]
fn templates_that_change_who_creates_the_pod_wait_until_the_old_pod_is_gone() {
    let (running, restarted) = (vm(|_| ()), restarted());
    let gone = |name: &str| GONE.replace("apple", name);

    // From a Pod to a StatefulSet.
    let observed = cluster(&running, |_, _| ());
    let plan_of = |vm: &VirtualMachine, observed: &Observed| plan(vm, observed, Some(&by_stateful_set(vm, observed)));
    let waiting = plan_of(&running, &observed);
    assert_eq!(short(&waiting), [GONE]);
    assert_eq!(waiting.pending[0].path, "objects/StatefulSet/apple");
    assert_eq!(short(&plan_of(&restarted, &observed)), ["1 delete Pod apple Restart None", GONE]);
    let mut observed = observed;
    // With another runtime object.
    let map = observed.objects.iter().find(|object| object.key.kind == "ConfigMap").unwrap();
    let key = ObjectKey { name: "helper".into(), ..map.key.clone() };
    let mut with_helper = by_stateful_set(&running, &observed);
    let helper = with_helper.iter().find(|object| object.lifetime == Lifetime::Running).unwrap().clone();
    with_helper.push(Rendered { key: key.clone(), update: Update::Once, ..helper });
    observed.objects.push(Arc::new(Object { key, ..Object::clone(map) }));
    assert_eq!(short(&plan(&running, &observed, Some(&with_helper))), [GONE]);
    for object in observed.objects.iter_mut().filter(|object| object.key.is_pod()) {
        Arc::make_mut(object).deleting = Some(noon());
    }
    assert_eq!(short(&plan(&running, &observed, Some(&with_helper))), [GONE], "also while the Pod is being deleted");
    observed.objects.pop();
    observed.objects.retain(|object| !object.key.is_pod());
    assert_eq!(short(&plan_of(&running, &observed)), ["1 make StatefulSet apple"]);

    // And back.
    let mut observed = applied(&by_stateful_set(&running, &nothing()), |_, _| ());
    let made = cluster(&running, |kind, object| {
        if kind == "Pod" {
            object["metadata"]["name"] = json!("apple-0");
            object["metadata"]["ownerReferences"] = by_set("StatefulSet-apple");
        }
    });
    observed.objects.extend(made.objects.into_iter().filter(|object| object.key.is_pod()));
    assert_eq!(short(&plan_of(&running, &observed)), [""; 0], "as it should be");
    let set_gone = GONE.replace("v1", "apps/v1").replace("Pod", "StatefulSet");
    assert_eq!(decide(&running, &observed), [gone("apple-0")]);
    assert_eq!(decide(&restarted, &observed), ["1 delete StatefulSet apple Restart None", &set_gone, &gone("apple-0")]);
    assert_eq!(decide(&stopped(), &observed), ["0 delete StatefulSet apple", &set_gone, &gone("apple-0")]);
    // Without its Pod the StatefulSet may create a new one at any time, so it must be gone before the manager creates one.
    observed.objects.retain(|object| !object.key.is_pod());
    let gone = GONE.replace("v1", "apps/v1").replace("Pod", "StatefulSet");
    assert_eq!(decide(&running, &observed), ["0 delete StatefulSet apple", &gone]);
    assert_eq!(
        short(&plan(&running, &observed, None)),
        [""; 0],
        "objects that can't be rendered can't be created again"
    );
    for object in observed.objects.iter_mut().filter(|object| object.key.kind == "StatefulSet") {
        Arc::make_mut(object).deleting = Some(noon());
    }
    assert_eq!(decide(&running, &observed), [gone]);
    observed.objects.retain(|object| object.key.kind != "StatefulSet");
    assert_eq!(decide(&running, &observed), ["1 make Pod apple"]);
}

/// A VM of release 3.3: a StatefulSet that the VM owns, without lifetime, and its Pod, with the labels that they really have.
fn legacy(pod: Option<fn(&mut Value)>) -> Observed {
    let running = vm(|_| ());
    let mut objects = by_stateful_set(&running, &nothing());
    let set = objects.iter_mut().find(|object| object.key.kind == "StatefulSet").unwrap();
    let annotations = Arc::make_mut(&mut set.value)["metadata"]["annotations"].as_object_mut().unwrap();
    annotations.retain(|name, _| name == "vmoperator.jdrupes.org/version");
    let mut observed = applied(&objects, |_, _| ());
    let made = cluster(&running, |kind, object| {
        if kind == "Pod" {
            let metadata = object["metadata"].as_object_mut().unwrap();
            metadata.insert("name".into(), json!("apple-0"));
            metadata.insert("ownerReferences".into(), by_set("StatefulSet-apple"));
            metadata.remove("managedFields");
            metadata.remove("annotations");
            pod.into_iter().for_each(|edit| edit(object));
        }
    });
    let pods = made.objects.into_iter().filter(|object| object.key.is_pod() && pod.is_some());
    observed.objects.extend(pods);
    observed
}

#[test]
fn a_pod_of_a_legacy_stateful_set_runs_until_it_is_stopped_restarted_or_goes() {
    let running = vm(|_| ());
    let restarted = restarted();
    let pod_gone = GONE.replace("\"apple\"", "\"apple-0\"");
    let set_gone = GONE.replace("\"v1\"", "\"apps/v1\"").replace("Pod", "StatefulSet");
    let deleting = |pod: &mut Value| pod["metadata"]["deletionTimestamp"] = json!("2027-01-15T08:00:00Z");
    let runs = legacy(Some(|_| ()));
    assert_eq!(decide(&running, &runs), std::slice::from_ref(&pod_gone));
    assert_eq!(decide(&stopped(), &runs), ["0 delete StatefulSet apple", &set_gone, &pod_gone]);
    assert_eq!(decide(&restarted, &runs), ["1 delete StatefulSet apple Restart None", &set_gone, &pod_gone]);
    // Deleted, evicted or drained: the StatefulSet would make another one.
    assert_eq!(decide(&running, &legacy(Some(deleting))), ["0 delete StatefulSet apple", &set_gone, &pod_gone]);
    assert_eq!(decide(&running, &legacy(None)), ["0 delete StatefulSet apple", &set_gone]);
    assert_eq!(decide(&stopped(), &legacy(None)), ["0 delete StatefulSet apple", &set_gone]);
    let failed = |pod: &mut Value| pod["status"] = json!({ "phase": "Failed" });
    assert!(decide(&running, &legacy(Some(failed))).contains(&"0 delete StatefulSet apple".to_owned()));
    // While nothing can be rendered nothing ends, but the VM can be stopped.
    assert_eq!(short(&plan(&running, &runs, None)), [""; 0]);
    assert_eq!(short(&plan(&stopped(), &runs, None)), ["0 delete StatefulSet apple", &set_gone, &pod_gone]);
    // The StatefulSet is gone, and the garbage collector has not deleted the Pod yet. The status has named it before.
    let mut left = runs;
    left.objects.retain(|object| object.key.kind != "StatefulSet");
    let named = |mut vm: VirtualMachine| {
        vm.status = serde_json::from_value(json!({ "reporterUid": "Pod-apple" })).unwrap();
        vm
    };
    assert_eq!(decide(&named(stopped()), &left), ["0 delete Pod apple-0", &pod_gone]);
    assert_eq!(decide(&named(running.clone()), &left), [pod_gone]);
    // Otherwise nothing shows whose it is.
    assert_eq!(decide(&stopped(), &left), [""; 0]);
    let in_use = r#"ClaimInUse(ObjectKey { api_version: "v1", kind: "Pod", name: "apple-0" })"#;
    assert_eq!(decide(&running, &left), [in_use]);
}

#[test]
fn a_pod_counts_whatever_it_is_called_and_whatever_labels_it_lost() {
    let running = vm(|_| ());
    let gone = GONE.replace("\"apple\"", "\"apple-vm\"");
    let edits: [fn(&mut Value); 3] = [
        |_| (),
        |pod| pod["metadata"]["labels"] = json!({}),
        |pod| drop(pod["metadata"].as_object_mut().unwrap().remove("ownerReferences")),
    ];
    for edit in edits {
        let observed = cluster(&running, |kind, object| {
            if kind == "Pod" {
                object["metadata"]["name"] = json!("apple-vm");
                edit(object);
            }
        });
        assert_eq!(decide(&running, &observed), std::slice::from_ref(&gone));
        assert_eq!(decide(&stopped(), &observed), ["0 delete Pod apple-vm", &gone]);
    }
    // Neither owner nor labels nor a trace of the manager: only its claims.
    let lost = |container: &'static str| {
        let mut observed = cluster(&running, |kind, object| {
            if kind == "Pod" {
                object["metadata"] = json!({ "name": "x", "uid": "Pod-x", "namespace": "orchard" });
                object["spec"]["containers"][0]["name"] = json!(container);
            }
        });
        let (pods, objects) = observed.objects.into_iter().partition(|object| object.key.is_pod());
        (observed.others, observed.objects) = (pods, objects);
        observed
    };
    let gone = GONE.replace("\"apple\"", "\"x\"");
    let named = |mut vm: VirtualMachine, field: &str| {
        vm.status = serde_json::from_value(json!({ field: "Pod-x" })).unwrap();
        vm
    };
    for field in ["podUid", "reporterUid"] {
        assert_eq!(decide(&named(running.clone(), field), &lost("vm-runner")), std::slice::from_ref(&gone));
        assert_eq!(decide(&named(stopped(), field), &lost("vm-runner")), ["0 delete Pod x", &gone]);
    }
    // The runner's container makes no Pod the VM's: `kubectl debug --copy-to` makes such a Pod.
    assert_eq!(decide(&stopped(), &lost("vm-runner")), [""; 0]);
    let in_use = r#"ClaimInUse(ObjectKey { api_version: "v1", kind: "Pod", name: "x" })"#;
    assert_eq!(decide(&running, &lost("vm-runner")), [in_use]);
    let backup = lost("backup");
    assert_eq!(decide(&stopped(), &backup), [""; 0], "a Pod of others is left alone");
    let plan = plan(&running, &backup, Some(&rendered(&running, &backup)));
    assert_eq!(plan.waits.len(), 1);
    assert!(matches!(&plan.waits[0], Wait::ClaimInUse(key) if key.name == "x"), "{:?}", plan.waits);
    assert!(short(&plan).iter().all(|action| !action.contains("make Pod")), "{:?}", short(&plan));
}

#[test]
fn a_pod_of_a_person_that_writes_to_the_disk_is_waited_for_also_if_it_has_the_vms_labels() {
    let running = vm(|_| ());
    let with_pod = |change: fn(&mut Value)| {
        cluster(&running, |kind, object| {
            if kind == "Pod" {
                let labels = object["metadata"]["labels"].clone();
                object["metadata"] =
                    json!({ "name": "rescue", "uid": "Pod-rescue", "namespace": "orchard", "labels": labels });
                object["metadata"]["managedFields"] = json!([]);
                change(object);
            }
        })
    };
    let waits = |observed: &Observed| {
        let plan = plan(&running, observed, Some(&rendered(&running, observed)));
        assert!(short(&plan).iter().all(|action| !action.contains("delete Pod")), "{:?}", short(&plan));
        let is_made = short(&plan).iter().any(|action| action.contains("make Pod"));
        let named = plan.waits.iter().any(|wait| matches!(wait, Wait::ClaimInUse(key) if key.name == "rescue"));
        (is_made, named)
    };
    assert_eq!(waits(&with_pod(|_| ())), (false, true));
    assert_eq!(waits(&with_pod(|pod| pod["status"] = json!({ "phase": "Succeeded" }))), (true, false), "it has ended");
    assert_eq!(waits(&with_pod(|pod| pod["spec"]["volumes"] = json!([]))), (true, false), "it has no disk of the VM");
}

#[test]
fn what_makes_a_pod_and_is_not_the_vms_is_not_deleted() {
    let mut observed = legacy(Some(|_| ()));
    for set in observed.objects.iter_mut().filter(|object| object.key.kind == "StatefulSet") {
        let set = Arc::make_mut(set);
        (set.owners, set.owner_vm, set.owned, set.origin) = (vec![], None, None, Origin::Other);
    }
    // It has all labels of the VM's objects.
    assert_eq!(decide(&stopped(), &observed), [""; 0]);
    let mut vm = stopped();
    vm.status = serde_json::from_value(json!({ "reporterUid": "Pod-apple" })).unwrap();
    let actions = decide(&vm, &observed);
    assert_eq!(actions.len(), 1, "{actions:?}");
    assert!(actions[0].contains("NotOurs") && actions[0].contains("StatefulSet"), "{actions:?}");
}

/// The VM's objects and its Pod; beside them something of that kind, as the manager would have made it for the VM and then changed by `edit`, and
/// its Pod, which mounts the VM's disk. With `runtime` it would run the guest.
fn with_maker(kind: &str, runtime: bool, edit: fn(&mut Value)) -> Observed {
    let running = vm(|_| ());
    let mut objects = by_stateful_set(&running, &nothing());
    objects.retain(|object| object.key.kind == "StatefulSet");
    (objects[0].key.kind, objects[0].key.name) = (kind.into(), "nightly".into());
    let made = applied(&objects, |_, object| {
        (object["kind"], object["metadata"]["name"]) = (json!(kind), json!("nightly"));
        if !runtime {
            object["metadata"]["annotations"].as_object_mut().unwrap().remove(LIFETIME_ANNOTATION);
        }
        edit(object);
    });
    let pod = cluster(&running, |_, object| {
        let owner = json!({ "apiVersion": "apps/v1", "kind": kind, "name": "nightly", "uid": format!("{kind}-nightly"), "controller": true });
        let metadata = &mut object["metadata"];
        (metadata["name"], metadata["uid"]) = (json!("nightly-x"), json!("Pod-nightly-x"));
        metadata["ownerReferences"] = json!([owner]);
        metadata["managedFields"][0]["manager"] = json!("kube-controller-manager");
    });
    let mut observed = cluster(&running, |_, _| ());
    observed.objects.extend(made.objects);
    observed.objects.extend(pod.objects.into_iter().filter(|object| object.key.is_pod()));
    observed
}

#[test]
fn what_only_says_that_it_is_the_vms_makes_strangers_and_is_never_deleted() {
    let by_a_person: fn(&mut Value) = |it| it["metadata"]["managedFields"][0]["manager"] = json!("kubectl-create");
    let java: fn(&mut Value) = |it| it["metadata"]["managedFields"][0]["manager"] = json!("Kubernetes Java Client");
    let other_java: fn(&mut Value) =
        |it| it["metadata"]["managedFields"][0]["manager"] = json!("kubernetes-java-kubectl-apply");
    let only_owned: fn(&mut Value) = |it| {
        (it["metadata"]["labels"], it["metadata"]["annotations"]) = (json!({}), json!({}));
        it["metadata"]["managedFields"] =
            json!([{ "manager": "kubectl", "operation": "Update", "fieldsV1": { "f:spec": {} } }]);
    };
    let backed_up: fn(&mut Value) = |it| it["metadata"]["managedFields"][0]["time"] = json!("2027-01-14T07:00:00Z");
    let reset: fn(&mut Value) = |it| it["metadata"]["managedFields"] = json!([]);
    for (what, edit, runtime, strangers, makers) in [
        ("the manager's helper", (|_| ()) as fn(&mut Value), false, 0, 0),
        ("the manager's", |_| (), true, 0, 1),
        ("a person's helper", by_a_person, false, 1, 0),
        ("a person's", by_a_person, true, 1, 0),
        ("a program's", java, true, 1, 0),
        ("a program's that applies", other_java, true, 1, 0),
        ("a person's with the VM as owner", only_owned, true, 1, 0),
        ("a backup's helper", backed_up, false, 1, 0),
        ("a backup's", backed_up, true, 1, 0),
        ("a helper after a reset", reset, false, 1, 0),
        ("reset, with everything", reset, true, 0, 1),
    ] {
        for kind in ["StatefulSet", "Job"] {
            let observed = with_maker(kind, runtime, edit);
            let running = vm(|_| ());
            let instances = Instances::new(&running, &observed);
            assert_eq!(
                (instances.strangers().count(), instances.makers().count()),
                (strangers, makers),
                "{kind} {what}"
            );
            assert_eq!(instances.active().unwrap().key.name, "apple", "{kind} {what}");
            if strangers > 0 {
                assert_eq!(instances.second().unwrap().key.name, "nightly-x", "{kind} {what}");
                for vm in [running.clone(), stopped()] {
                    let deleted: Vec<_> =
                        decide(&vm, &observed).into_iter().filter(|it| it.contains("nightly")).collect();
                    assert_eq!(deleted, [""; 0], "{kind} {what}");
                }
            }
        }
    }
}

#[test]
fn the_pods_of_what_a_helper_makes_are_no_strangers() {
    let mut observed = with_maker("CronJob", false, |_| ());
    let job = with_maker("Job", false, |it| {
        it["metadata"]["managedFields"][0]["manager"] = json!("kube-controller-manager");
        it["metadata"]["ownerReferences"] = json!([{ "apiVersion": "apps/v1", "kind": "CronJob", "name": "nightly", "uid": "CronJob-nightly", "controller": true }]);
    });
    observed.objects.retain(|object| object.key.name != "nightly-x");
    observed.objects.extend(job.objects.into_iter().filter(|object| object.key.name.starts_with("nightly")));
    let running = vm(|_| ());
    assert_eq!(Instances::new(&running, &observed).strangers().count(), 0);
    // The Job of a person, who says that the CronJob made it but has not its UID.
    for object in observed.objects.iter_mut().filter(|object| object.key.kind == "CronJob") {
        Arc::make_mut(object).uid = "another".into();
    }
    assert_eq!(Instances::new(&running, &observed).strangers().count(), 1);
}

#[test]
fn a_pod_without_proof_is_the_guests_only_with_the_name_of_the_rendered_one() {
    let mut observed = cluster(&vm(|_| ()), |kind, object| {
        if kind == "Pod" {
            object["metadata"]["managedFields"] = json!([]);
        }
    });
    for (names, is_own) in [(None, true), (Some("apple"), true), (Some("apple-x"), false)] {
        observed.pod_names = names.map(|name| vec![name.to_owned()]);
        let running = vm(|_| ());
        let instances = Instances::new(&running, &observed);
        assert_eq!(
            (instances.active().is_some(), instances.strangers().count()),
            (is_own, usize::from(!is_own)),
            "{names:?}"
        );
    }
}

#[test]
fn a_pod_of_other_templates_that_should_be_gone_is_overdue_whatever_the_vm_should_do() {
    let observed = |vm: &VirtualMachine| {
        cluster(vm, |kind, object| {
            if kind == "Pod" {
                object["metadata"]["name"] = json!("apple-vm");
                object["metadata"]["deletionTimestamp"] = json!("2027-01-15T07:00:00Z");
                object["spec"]["nodeName"] = json!("node-1");
            }
        })
    };
    for vm in [vm(|_| ()), stopped()] {
        let plan = plan(&vm, &observed(&vm), Some(&rendered(&vm, &observed(&vm))));
        let is_overdue = |wait: &Wait| matches!(wait, Wait::Overdue(key) if key.name == "apple-vm");
        assert!(plan.waits.iter().any(is_overdue), "{:?}", plan.waits);
        assert!(plan.requeue_after.is_some(), "the manager does not watch Nodes");
    }
}
