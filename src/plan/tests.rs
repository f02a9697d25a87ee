use super::*;
use crate::{
    render::TemplateSet,
    test_support::{applied, noon, nothing, rendered, stopped, vm},
};

/// The plan in short: a word for each action and wait.
fn short(plan: &Plan) -> Vec<String> {
    let actions = plan.steps.iter().enumerate().flat_map(|(step, actions)| {
        actions.iter().map(move |action| match action {
            Action::Apply { object, uid } => {
                format!("{step} {} {}", if uid.is_some() { "change" } else { "make" }, object.key)
            }
            Action::Label { key, patch, .. } => format!("{step} label {key} {}", patch["metadata"]),
            Action::Delete { key, .. } => format!("{step} delete {key}"),
        })
    });
    actions.chain(plan.waits.iter().map(|wait| format!("{wait:?}"))).collect()
}

/// A cluster in which all of the machine's objects are there, each changed by `edit`.
fn cluster(vm: &VirtualMachine, edit: impl FnMut(&str, &mut Value)) -> Observed {
    applied(&rendered(vm, &nothing()), edit)
}

fn decide(vm: &VirtualMachine, observed: &Observed) -> Vec<String> {
    short(&plan(vm, observed, Some(&rendered(vm, observed))))
}

fn on_pod(mut edit: impl FnMut(&mut Value)) -> impl FnMut(&str, &mut Value) {
    move |kind, object| {
        if kind == "Pod" {
            edit(object);
        }
    }
}

const GONE: &str = r#"Gone(ObjectKey { api_version: "v1", kind: "Pod", name: "apple" })"#;

#[test]
fn a_new_machine_gets_what_its_pod_mounts_and_then_its_pod() {
    assert_eq!(
        decide(&vm(|_| ()), &nothing()),
        [
            "0 make ConfigMap apple",
            "0 make PersistentVolumeClaim apple-core-disk",
            "0 make Secret apple-display-secret",
            "0 make PersistentVolumeClaim apple-runner-data",
            "1 make Pod apple",
        ]
    );
}

#[test]
fn a_stopped_machine_gets_everything_but_a_pod() {
    assert!(
        decide(&stopped(), &nothing()).iter().all(|action| action.starts_with("0 make") && !action.contains("Pod"))
    );
}

#[test]
fn nothing_is_done_when_all_is_as_it_should_be() {
    let vm = vm(|_| ());
    assert_eq!(decide(&vm, &cluster(&vm, |_, _| ())), [""; 0]);
}

#[test]
fn the_power_table() {
    let going = |object: &mut Value| object["metadata"]["deletionTimestamp"] = json!("2027-01-15T07:59:00Z");
    let ended = |object: &mut Value| object["status"] = json!({ "phase": "Failed" });
    let theirs = |object: &mut Value| {
        object["metadata"]["ownerReferences"] = json!([{ "apiVersion": "v1", "kind": "X", "name": "x", "uid": "x" }])
    };
    let stranger = |object: &mut Value| {
        theirs(object);
        object["metadata"]["labels"]["app.kubernetes.io/managed-by"] = json!("someone");
    };
    let running = vm(|_| ());
    for (vm, edit, expected) in [
        (&running, &(|_: &mut Value| ()) as &dyn Fn(&mut Value), &[][..]),
        (&running, &ended, &["0 delete Pod apple", GONE]),
        (&running, &going, &[GONE]),
        (&running, &theirs, &[GONE]),
        (&running, &stranger, &[r#"NotOurs(ObjectKey { api_version: "v1", kind: "Pod", name: "apple" })"#]),
        (&stopped(), &|_| (), &["0 delete Pod apple", GONE]),
        (&stopped(), &ended, &["0 delete Pod apple", GONE]),
        (&stopped(), &going, &[GONE]),
        (&stopped(), &stranger, &[]),
    ] {
        assert_eq!(decide(vm, &cluster(&running, on_pod(edit))), expected);
    }
}

#[test]
fn a_pod_that_ends_at_once_is_made_again_a_little_later() {
    let vm = vm(|_| ());
    let observed = cluster(
        &vm,
        on_pod(|pod| {
            pod["status"] = json!({ "phase": "Failed" });
            pod["metadata"]["creationTimestamp"] = json!((noon() - SignedDuration::from_secs(4)).to_string());
        }),
    );
    let plan = plan(&vm, &observed, Some(&rendered(&vm, &observed)));
    assert_eq!(plan.again_after, Some(Duration::from_secs(6)));
    assert_eq!(plan.steps.concat(), []);
}

#[test]
fn a_change_of_the_configuration_is_live_and_the_pod_hears_of_it() {
    let before = vm(|_| ());
    let after = vm(|vm| vm["spec"]["vm"]["currentCpus"] = json!(1));
    let actions = decide(&after, &cluster(&before, |_, _| ()));
    assert_eq!(actions.len(), 2, "{actions:?}");
    assert_eq!(actions[0], "0 change ConfigMap apple");
    assert!(
        actions[1].starts_with(r#"1 label Pod apple {"annotations":{"vmrunner.jdrupes.org/cmVersion":"#),
        "{actions:?}"
    );
}

#[test]
fn a_change_of_the_pod_waits_for_the_next_start() {
    let before = vm(|_| ());
    let after = vm(|vm| vm["spec"]["image"] = json!({ "source": "other" }));
    let observed = cluster(&before, |_, _| ());
    let plan = plan(&after, &observed, Some(&rendered(&after, &observed)));
    assert_eq!(short(&plan), [""; 0]);
    assert_eq!(plan.outdated.len(), 1);
}

#[test]
fn a_label_of_the_machine_reaches_its_pod_and_leaves_it() {
    let (without, with) =
        (vm(|_| ()), vm(|vm| vm["metadata"]["labels"] = json!({ "tier": "web", "helm.sh/chart": "x" })));
    assert_eq!(decide(&with, &cluster(&without, |_, _| ())), [r#"1 label Pod apple {"labels":{"tier":"web"}}"#]);
    assert_eq!(decide(&without, &cluster(&with, |_, _| ())), [r#"1 label Pod apple {"labels":{"tier":null}}"#]);
    // The API server notes what was patched apart from what was applied.
    let patched = cluster(
        &with,
        on_pod(|pod| {
            let labels = pod
                .pointer_mut("/metadata/managedFields/0/fieldsV1/f:metadata/f:labels")
                .unwrap()
                .as_object_mut()
                .unwrap();
            let tier = labels.remove("f:tier").unwrap();
            let fields = json!({ "f:metadata": { "f:labels": { "f:tier": tier } } });
            let entry = json!({ "manager": crate::observed::FIELD_MANAGER, "operation": "Update", "fieldsV1": fields });
            pod["metadata"]["managedFields"].as_array_mut().unwrap().push(entry);
        }),
    );
    assert_eq!(decide(&without, &patched), [r#"1 label Pod apple {"labels":{"tier":null}}"#]);
}

#[test]
fn a_field_that_somebody_changed_is_put_back() {
    let vm = vm(|_| ());
    let observed = cluster(&vm, |kind, object| {
        if kind == "ConfigMap" {
            let fields = object.pointer_mut("/metadata/managedFields/0/fieldsV1").unwrap();
            assert!(fields.as_object_mut().unwrap().remove("f:data").is_some());
        }
    });
    assert_eq!(decide(&vm, &observed), ["0 change ConfigMap apple"]);
}

#[test]
fn a_secret_that_was_made_once_is_left_alone() {
    let vm = vm(|_| ());
    let observed = cluster(&vm, |kind, object| {
        if kind == "Secret" {
            object["metadata"]["annotations"] = json!({});
            object["metadata"]["managedFields"] = json!([]);
        }
    });
    assert_eq!(decide(&vm, &observed), [""; 0]);
}

#[test]
fn a_bound_claim_keeps_what_can_not_change_and_only_grows() {
    let small = vm(|_| ());
    let bound = |size: &'static str| {
        move |kind: &str, object: &mut Value| {
            if kind == "PersistentVolumeClaim" && object["spec"]["volumeMode"] == "Block" {
                object["spec"] = json!({
                    "accessModes": ["ReadWriteMany"], "volumeMode": "Block", "volumeName": "pv-1", "storageClassName": "fast",
                    "resources": { "requests": { "storage": size } },
                });
            }
        }
    };
    let with_size = |size: &str| {
        let size = size.to_owned();
        vm(move |vm| {
            vm["spec"]["vm"]["disks"][0]["volumeClaimTemplate"]["spec"]["resources"]["requests"]["storage"] =
                json!(size)
        })
    };
    for (wanted, actual, expected) in [("2Gi", "1Gi", "2Gi"), ("1Gi", "4Gi", "4Gi"), ("500Mi", "1Gi", "1Gi")] {
        let after = with_size(wanted);
        let observed = cluster(&small, bound(actual));
        let plan = plan(&after, &observed, Some(&rendered(&after, &observed)));
        let claims: Vec<_> = plan.steps[0]
            .iter()
            .filter_map(|action| match action {
                Action::Apply { object, .. } if object.key.name == "apple-core-disk" => Some(&object.value["spec"]),
                _ => None,
            })
            .collect();
        for spec in claims {
            assert_eq!(
                *spec,
                json!({
                    "accessModes": ["ReadWriteMany"], "volumeMode": "Block", "storageClassName": "fast",
                    "resources": { "requests": { "storage": expected } },
                }),
                "{wanted} {actual}"
            );
        }
    }
}

#[test]
fn a_claim_that_was_bound_since_is_not_applied_again() {
    let vm = vm(|vm| {
        vm["spec"]["vm"]["disks"][0]["volumeClaimTemplate"]["spec"]["selector"] =
            json!({ "matchLabels": { "a": "b" } });
    });
    let observed = cluster(&vm, |kind, object| {
        if kind == "PersistentVolumeClaim" {
            // The binder and the defaults of the class add to the spec; nobody owns that.
            object["spec"]["volumeName"] = json!("pv-1");
            object["spec"]["storageClassName"] = json!("fast");
            object["spec"].as_object_mut().unwrap().remove("selector");
            let fields = object.pointer_mut("/metadata/managedFields/0/fieldsV1/f:spec").unwrap();
            fields.as_object_mut().unwrap().remove("f:selector");
        }
    });
    assert_eq!(decide(&vm, &observed), [""; 0]);
}

#[test]
fn what_is_not_rendered_any_more_goes_but_never_a_claim() {
    let with = vm(|vm| vm["spec"]["cloudInit"] = json!({}));
    let without = vm(|vm| vm["spec"]["vm"]["disks"] = json!([]));
    let mut actions = decide(&without, &cluster(&with, |_, _| ()));
    actions.retain(|action| action.contains("delete"));
    assert_eq!(actions, ["2 delete ConfigMap apple-cloud-init", "2 delete Secret apple-cloud-init"]);
}

#[test]
fn broken_templates_prune_nothing_and_kill_no_guest_but_the_power_button_works() {
    let running = vm(|_| ());
    let observed = cluster(&running, |_, _| ());
    assert_eq!(short(&plan(&running, &observed, None)), [""; 0]);
    assert_eq!(short(&plan(&stopped(), &observed, None)), ["2 delete Pod apple"]);
}

#[test]
fn a_machine_that_is_being_deleted_is_left_to_the_garbage_collector() {
    let going = vm(|vm| vm["metadata"]["deletionTimestamp"] = json!("2027-01-15T07:59:00Z"));
    assert_eq!(decide(&going, &cluster(&vm(|_| ()), |_, _| ())), [""; 0]);
}

#[test]
fn a_machine_made_again_adopts_what_its_predecessor_left() {
    let vm = vm(|_| ());
    let observed = cluster(
        &vm,
        on_pod(|pod| {
            pod["metadata"].as_object_mut().unwrap().remove("ownerReferences");
        }),
    );
    let actions = decide(&vm, &observed);
    assert_eq!(actions.len(), 1, "{actions:?}");
    assert!(actions[0].starts_with(r#"1 label Pod apple {"ownerReferences":"#));
}

#[test]
fn old_claims_are_used_instead_of_new_ones() {
    let vm = vm(|_| ());
    let observed = cluster(&vm, |kind, object| {
        if kind == "PersistentVolumeClaim" && object["spec"]["volumeMode"] == "Block" {
            object["metadata"]["name"] = json!("core-disk-apple-0");
        }
    });
    let actions = decide(&vm, &observed);
    assert!(!actions.iter().any(|action| action.starts_with("0 make")), "{actions:?}");
    assert!(TemplateSet::builtin().is_ok());
}
