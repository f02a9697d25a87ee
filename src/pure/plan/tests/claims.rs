//! Changes of claims that exist.

use super::*;

#[test]
fn a_bound_claim_keeps_its_spec_and_only_grows() {
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
    for (wanted, actual, expected) in
        [("2Gi", "1Gi", Some("2Gi")), ("1Gi", "4Gi", Some("4Gi")), ("500Mi", "1Gi", Some("1Gi"))]
    {
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
        let expected: Vec<Value> = expected
            .into_iter()
            .map(|size| {
                json!({
                    "accessModes": ["ReadWriteMany"], "volumeMode": "Block", "storageClassName": "fast",
                    "resources": { "requests": { "storage": size } },
                })
            })
            .collect();
        assert_eq!(claims, expected.iter().collect::<Vec<_>>(), "{wanted} {actual}");
    }
}

#[test]
fn a_refused_growth_is_retried_when_the_spec_changes_and_other_claims_grow() {
    let with_sizes = |core: &str, data: &str, status: Value| {
        let claim = |name: &str, size: &str| {
            let spec = json!({ "resources": { "requests": { "storage": size } } });
            json!({ "volumeClaimTemplate": { "metadata": { "name": name }, "spec": spec } })
        };
        let disks = json!([claim("core", core), claim("data", data)]);
        vm(move |vm| {
            vm["spec"]["vm"]["disks"] = disks;
            vm["status"] = status;
        })
    };
    let observed = cluster(&with_sizes("1Gi", "1Gi", Value::Null), |kind, object| {
        if kind == "PersistentVolumeClaim" {
            object["spec"]["volumeName"] = json!("pv");
        }
    });
    let grown = |generation: i64, reason: &str| {
        let finding =
            json!({ "reason": reason, "current": "1Gi", "wanted": "2Gi", "answer": "no", "generation": generation });
        let claims = json!([{ "name": "apple-core-disk", "findings": [finding] }]);
        let vm = with_sizes("2Gi", "3Gi", json!({ "claims": claims }));
        let plan = plan(&vm, &observed, Some(&rendered(&vm, &observed)));
        let sizes = plan.steps[0].iter().filter_map(|action| match action {
            Action::Apply { object, .. } if object.key.is_claim() => {
                let size = object.value["spec"]["resources"]["requests"]["storage"].as_str()?;
                Some(format!("{} {size}", object.key.name))
            }
            _ => None,
        });
        sizes.filter(|claim| !claim.ends_with("1Gi")).collect::<Vec<_>>()
    };
    assert_eq!(grown(3, "GrowthRefused"), ["apple-data-disk 3Gi"]);
    let both = ["apple-core-disk 2Gi", "apple-data-disk 3Gi"];
    assert_eq!(grown(2, "GrowthRefused"), both, "another generation of the spec");
    assert_eq!(grown(3, "GrowthPending"), both, "it was not refused");
}

#[test]
fn a_claim_that_was_bound_is_not_applied_again() {
    let vm = vm(|vm| {
        vm["spec"]["vm"]["disks"][0]["volumeClaimTemplate"]["spec"]["selector"] =
            json!({ "matchLabels": { "a": "b" } });
    });
    let observed = cluster(&vm, |kind, object| {
        if kind == "PersistentVolumeClaim" {
            // The volume controller and the storage class add fields to the spec, which no field manager owns.
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
fn claims_with_names_of_earlier_releases_are_used() {
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

#[test]
fn an_empty_claim_never_takes_the_place_of_a_lost_one() {
    let known = json!({ "claims": [{ "name": "core-disk-apple-0", "uid": "u-1" }, { "name": "apple-runner-data", "uid": "u-2" }] });
    let lost = vm(|vm| vm["status"] = known.clone());
    let plan_of = |vm: &VirtualMachine| plan(vm, &nothing(), Some(&rendered(vm, &nothing())));
    let missing = |plan: &Plan| -> Vec<String> {
        let names = plan.waits.iter().filter_map(|wait| match wait {
            Wait::ClaimMissing(key) => Some(key.name.clone()),
            _ => None,
        });
        names.collect()
    };
    let waiting = plan_of(&lost);
    assert_eq!(missing(&waiting), ["core-disk-apple-0", "apple-runner-data"]);
    assert!(short(&waiting).iter().all(|action| !action.contains("make P")), "{:?}", short(&waiting));
    assert!(waiting.requeue_after.is_some());
    let given_up = vm(|vm| {
        vm["status"] = known.clone();
        vm["metadata"]["annotations"] = json!({ crate::object::REPLACE_CLAIM_ANNOTATION: "u-1, u-2" });
    });
    let replaced = plan_of(&given_up);
    assert_eq!(missing(&replaced), [""; 0]);
    assert!(
        short(&replaced).contains(&"0 make PersistentVolumeClaim core-disk-apple-0".to_owned()),
        "{:?}",
        short(&replaced)
    );
}

/// A CronJob that copies a disk must not copy somebody else's.
#[test]
fn nothing_is_made_that_names_a_claim_which_is_not_the_vms() {
    let vm = vm(|_| ());
    let mut objects = rendered(&vm, &nothing());
    let mut job = objects.iter().find(|object| object.key.kind == "ConfigMap").unwrap().clone();
    (job.key.api_version, job.key.kind, job.key.name) = ("batch/v1".into(), "CronJob".into(), "backup".into());
    job.value = json!({ "apiVersion": "batch/v1", "kind": "CronJob", "metadata": { "name": "backup" },
        "spec": { "args": ["snapshot of apple-core-disk"] } })
    .into();
    objects.push(job);
    for (is_foreign, expected) in [(true, false), (false, true)] {
        let observed = applied(&objects, |kind, object| {
            if kind == "PersistentVolumeClaim" && object["metadata"]["name"] == "apple-core-disk" && is_foreign {
                object["metadata"]["annotations"] = json!({});
                object["metadata"]["labels"] = json!({ "app": "bank" });
            }
        });
        let without = |kinds: &[&str]| {
            let is_kept = |object: &&std::sync::Arc<Object>| !kinds.contains(&object.key.kind.as_str());
            Observed::of(observed.objects.iter().filter(is_kept).cloned().collect(), observed.now)
        };
        let made = decide_with(&vm, &without(&["CronJob", "Pod"]), &objects);
        assert_eq!(made.iter().any(|action| action.contains("make CronJob backup")), expected, "{made:?}");
    }
}

fn decide_with(vm: &VirtualMachine, observed: &Observed, rendered: &[Rendered]) -> Vec<String> {
    short(&plan(vm, observed, Some(rendered)))
}

#[test]
fn nothing_is_deleted_before_the_status_names_the_claims_that_the_pod_mounts() {
    let claims = |uid: &str| json!([{ "name": "apple-core-disk", "uid": uid }, { "name": "apple-runner-data", "uid": "PersistentVolumeClaim-apple-runner-data" }]);
    // Whether the Pod is deleted, and whether that presumes that the status can't be written.
    let decide = |status: Value, given_up: &str, is_rendered: bool, edit: &dyn Fn(&str, &mut Value)| {
        let vm = vm(|vm| {
            vm["spec"]["vm"]["state"] = json!("Stopped");
            set_by("Update", vm);
            vm["metadata"]["annotations"] = json!({ crate::object::REPLACE_CLAIM_ANNOTATION: given_up });
            vm["status"] = status;
        });
        let observed = cluster(&vm, edit);
        let rendered = rendered(&vm, &observed);
        let plan = super::super::plan(&vm, &observed, is_rendered.then_some(&rendered));
        assert!(plan.waits.iter().any(|wait| matches!(wait, Wait::Gone(_))), "it is to go");
        let is_deleted = short(&plan).iter().any(|step| step.contains("delete Pod apple"));
        (is_deleted, facts(&plan).contains(&Fact::StatusFails))
    };
    let decision = |status: Value, edit: &dyn Fn(&str, &mut Value)| decide(status, "", true, edit);
    let (certainly, if_it_fails, never) = ((true, false), (true, true), (false, true));
    let as_it_is = |_: &str, _: &mut Value| ();
    let known = || json!({ "claims": claims("PersistentVolumeClaim-apple-core-disk") });
    assert_eq!(decision(known(), &as_it_is), certainly);
    assert_eq!(decision(json!({}), &as_it_is), if_it_fails, "no status was written yet");
    assert_eq!(decision(json!({ "claims": claims("another") }), &as_it_is), if_it_fails, "the claim was made anew");
    let of_other_volumes = |kind: &str, object: &mut Value| {
        if kind == "Pod" {
            object["spec"]["volumes"] = json!([]);
        }
    };
    assert_eq!(decision(json!({}), &of_other_volumes), certainly, "a Pod that mounts none");
    let going = |kind: &str, object: &mut Value| {
        if kind == "PersistentVolumeClaim" {
            object["metadata"]["deletionTimestamp"] = json!("2027-01-15T07:59:50Z");
        }
    };
    assert_eq!(decision(json!({}), &going), never, "it goes with the Pod");
    assert_eq!(decision(known(), &going), certainly, "that is known");
    assert_eq!(decide(json!({}), "", false, &going), never, "while nothing can be rendered, too");
    let all = "PersistentVolumeClaim-apple-core-disk,PersistentVolumeClaim-apple-runner-data";
    assert_eq!(decide(json!({}), all, true, &going), certainly, "a person has given it up");
}
