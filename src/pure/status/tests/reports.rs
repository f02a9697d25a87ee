//! Which report counts, what of it gets into the status, and that the status comes to rest.

use std::sync::Arc;

use kube::core::DynamicObject;

use super::*;
use crate::{
    ownership::{OBJECT_MANAGER, has_fields_of_runner},
    power::is_report_of,
    status::reports::{ReportAction, carried, fold, is_of_pod, left, upkeep},
};

const POD: &str = "Pod-apple";

fn said(running: bool) -> Value {
    let condition = |type_: &str| {
        json!({
            "type": type_, "status": if running { "True" } else { "False" }, "reason": if running { "Started" } else { "PoweredDown" },
            "message": "by the runner", "lastTransitionTime": "2027-01-15T07:30:00Z",
        })
    };
    json!({
        "conditions": [condition("Running"), condition("Booted"), condition("VmopAgentConnected")], "cpus": 2, "ram": "1Gi", "runnerVersion": "1",
        "accelerator": "kvm", "identity": { "uuid": "u-1" }, "displayPasswordSerial": 3, "relayPort": 7000, "serialUsers": ["ann"],
        "loggedInUser": "bob", "osinfo": { "id": "debian" }, "configDigest": "d",
        "pendingChanges": [{ "path": "config.yaml/vm.maximumCpus", "wanted": "4", "reason": "later" }],
    })
}

/// The report that the manager has made of the Pod with that UID; null: nothing is said in it yet.
fn report(pod_uid: &str, owner: Option<&str>, created: &str, said: &Value) -> Arc<Object> {
    changed(pod_uid, owner, created, said, &|_| ())
}

/// The same, changed by `edit`.
fn changed(pod_uid: &str, owner: Option<&str>, created: &str, said: &Value, edit: &dyn Fn(&mut Value)) -> Arc<Object> {
    let owners: Vec<Value> = owner
        .map(|uid| json!({ "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine", "name": "apple", "uid": uid }))
        .into_iter()
        .collect();
    let fields =
        json!({ "f:metadata": { "f:ownerReferences": { "k:{\"uid\":\"apple-uid\"}": {} } }, "f:spec": { "f:vm": {} } });
    let mut value = json!({
        "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VmReport",
        "metadata": {
            "name": pod_uid, "uid": format!("report-{pod_uid}"), "creationTimestamp": created, "ownerReferences": owners,
            "managedFields": [{ "manager": OBJECT_MANAGER, "operation": "Apply", "fieldsV1": fields }],
        },
        "spec": { "vm": "apple" }, "status": said,
    });
    edit(&mut value);
    let object: DynamicObject = serde_json::from_value(value).unwrap();
    Arc::new(Object::trim(&crate::object::reports(), object))
}

/// Written by another program.
fn of_others(report: &mut Value) {
    report["metadata"]["managedFields"][0]["manager"] = json!("kubectl-create");
}

fn reset(report: &mut Value) {
    report["metadata"]["managedFields"] = json!([]);
}

/// Somebody has changed the name of the VM, and so owns it.
fn renamed(report: &mut Value, vm: &str) {
    report["spec"]["vm"] = json!(vm);
    report["metadata"]["managedFields"][0]["fieldsV1"]["f:spec"] = json!({ "f:endGuest": {} });
}

fn own(pod_uid: &str, said: &Value) -> Arc<Object> {
    report(pod_uid, Some("apple-uid"), "2027-01-15T07:00:00Z", said)
}

fn with_reports(mut observed: Observed, reports: Vec<Arc<Object>>) -> Observed {
    observed.reports = reports;
    observed
}

/// The status as the manager has written it, which then owns all of it.
fn written(vm: &VirtualMachine, wanted: &VirtualMachineStatus) -> VirtualMachine {
    let mut vm = vm.clone();
    let status = json!(wanted);
    let mut fields = json!({});
    for (name, value) in status.as_object().unwrap() {
        fields[format!("f:{name}")] = match (name.as_str(), value) {
            ("conditions" | "pendingChanges" | "claims", Value::Array(items)) => {
                let key = match name.as_str() {
                    "conditions" => "type",
                    "pendingChanges" => "path",
                    _ => "name",
                };
                let mut keys = json!({});
                for item in items {
                    let below: Value =
                        item.as_object().unwrap().keys().map(|key| (format!("f:{key}"), json!({}))).collect();
                    keys[format!("k:{}", json!({ key: item[key] }))] = below;
                }
                keys
            }
            _ => json!({}),
        };
    }
    vm.status = serde_json::from_value(status).unwrap();
    let entry = json!({ "manager": STATUS_MANAGER, "operation": "Apply", "subresource": "status", "fieldsV1": { "f:status": fields } });
    vm.metadata.managed_fields = Some(vec![serde_json::from_value(entry).unwrap()]);
    vm
}

/// What the manager writes of a VM with these objects.
fn wanted(vm: &VirtualMachine, observed: &Observed) -> VirtualMachineStatus {
    let folded = fold(vm, observed);
    reconcile(folded.as_ref().unwrap_or(vm), observed, true).0
}

#[test]
fn the_report_that_counts() {
    let (running, down, silent) = (said(true), said(false), Value::Null);
    let in_status = |uid: Option<&str>| {
        reported(true, |vm| {
            if let Some(uid) = uid {
                vm["status"]["podUid"] = json!(uid);
            }
        })
    };
    let of = |uid: &str, said: &Value| own(uid, said);
    let later = |uid: &str, said: &Value| report(uid, Some("apple-uid"), "2027-01-15T07:59:00Z", said);
    for (what, vm, observed, expected) in [
        ("of the Pod", in_status(None), with_reports(cluster(|_, _| ()), vec![of(POD, &running)]), Some(POD)),
        ("it wins", in_status(Some(POD)), with_reports(cluster(|_, _| ()), vec![of(POD, &down)]), Some(POD)),
        ("none", in_status(Some(POD)), cluster(|_, _| ()), None),
        ("nothing said yet", in_status(Some(POD)), with_reports(cluster(|_, _| ()), vec![of(POD, &silent)]), None),
        (
            "of the former Pod",
            in_status(Some("old")),
            with_reports(cluster(|_, _| ()), vec![of("old", &down)]),
            Some("old"),
        ),
        (
            "the Pod's runner knows no reports",
            in_status(Some(POD)),
            with_reports(cluster(|_, _| ()), vec![of("old", &down), of(POD, &silent)]),
            None,
        ),
        ("no Pod", in_status(None), with_reports(nothing(), vec![of("old", &down)]), Some("old")),
        (
            "no Pod, the newest",
            in_status(None),
            with_reports(nothing(), vec![of("old", &down), later("new", &down)]),
            Some("new"),
        ),
        (
            "no Pod, the newest says nothing",
            in_status(None),
            with_reports(nothing(), vec![of("old", &down), later("new", &silent)]),
            None,
        ),
    ] {
        let folded = fold(&vm, &observed);
        let uid = folded.and_then(|vm| vm.status.unwrap().pod_uid);
        assert_eq!(uid.as_deref(), expected, "{what}");
    }
}

#[test]
fn a_time_that_can_not_be_does_not_count_and_the_status_comes_to_rest() {
    let times = |vm: &VirtualMachine| -> Vec<String> {
        let conditions = &vm.status.as_ref().unwrap().conditions;
        let reported = conditions.iter().filter(|condition| ["Running", "Booted"].contains(&condition.type_.as_str()));
        reported.map(|condition| condition.last_transition_time.0.to_string()).collect()
    };
    for (time, expected) in [
        ("2027-01-15T07:30:00Z", "2027-01-15T07:30:00Z"),
        ("-000001-01-01T00:00:00Z", "2027-01-15T08:00:00Z"),
        ("9999-01-01T00:00:00Z", "2027-01-15T08:00:00Z"),
    ] {
        let mut said = said(true);
        for condition in said["conditions"].as_array_mut().unwrap() {
            condition["lastTransitionTime"] = json!(time);
        }
        let observed = with_reports(cluster(|_, _| ()), vec![own(POD, &said)]);
        let folded = fold(&reported(true, |vm| vm["status"]["conditions"] = json!([])), &observed).unwrap();
        assert_eq!(times(&folded), [expected; 2], "{time}");
        let later = Observed { now: observed.now + k8s_openapi::jiff::SignedDuration::from_secs(60), ..observed };
        assert_eq!(times(&fold(&folded, &later).unwrap()), [expected; 2], "{time}");
    }
}

#[test]
fn a_report_is_in_the_status_and_the_second_look_writes_nothing() {
    let killed = |kind: &str, object: &mut Value| {
        if kind == "Pod" {
            let end = json!({ "terminated": { "finishedAt": "2027-01-15T07:45:00Z", "exitCode": 137 } });
            object["status"] = json!({ "containerStatuses": [{ "name": "vm-runner", "state": end, "lastState": {} }] });
        }
    };
    let lost = |kind: &str, object: &mut Value| {
        if kind == "Pod" {
            let condition = |type_: &str, status: &str| json!({ "type": type_, "status": status });
            object["status"] =
                json!({ "conditions": [condition("ContainersReady", "True"), condition("Ready", "False")] });
        }
    };
    let reports = || vec![own(POD, &said(true))];
    for (what, observed, running, cpus) in [
        ("runs", with_reports(cluster(|_, _| ()), reports()), "True", 2),
        ("was killed", with_reports(cluster(killed), reports()), "False", 0),
        ("its node does not answer", with_reports(cluster(lost), reports()), "Unknown", 2),
        ("has no Pod any more", with_reports(nothing(), reports()), "False", 0),
        ("has another Pod", with_reports(cluster(|_, _| ()), vec![own("old", &said(true))]), "False", 0),
    ] {
        let new = vm(|_| ());
        let first = wanted(&new, &observed);
        assert_eq!(conditions::find(&first.conditions, RUNNING).unwrap().status, running, "{what}");
        assert_eq!(first.runner.cpus, Some(cpus), "{what}");
        assert_eq!(first.runner.identity.as_ref().unwrap().uuid.as_deref(), Some("u-1"), "{what}");
        let after = written(&new, &first);
        let second = wanted(&after, &observed);
        assert!(!status_differs(&after, &second), "{what}:\n{:#}\n{:#}", json!(first), json!(second));
        // The report is gone, and what must stay known does.
        let gone = Observed { reports: Vec::new(), ..observed.clone() };
        let third = wanted(&after, &gone);
        assert_eq!((&third.runner.identity, &third.pod_uid), (&first.runner.identity, &first.pod_uid), "{what}");
        assert_eq!(third.runner.display_password_serial, Some(3), "{what}");
        let after = written(&after, &third);
        assert!(!status_differs(&after, &wanted(&after, &gone)), "{what}, without its report");
    }
}

#[test]
fn all_of_a_report_gets_into_the_status_and_goes_with_the_guest() {
    let observed = with_reports(cluster(|_, _| ()), vec![own(POD, &said(true))]);
    let mut first = json!(wanted(&vm(|_| ()), &observed));
    let mut of_report = said(true);
    of_report["podUid"] = json!(POD);
    of_report["pendingChanges"][0]["wanted"] = json!(4);
    let conditions = of_report.as_object_mut().unwrap().remove("conditions").unwrap();
    for (field, value) in of_report.as_object().unwrap() {
        assert_eq!(first[field], *value, "{field}");
    }
    for condition in conditions.as_array().unwrap() {
        let found =
            first["conditions"].as_array_mut().unwrap().iter_mut().find(|it| it["type"] == condition["type"]).unwrap();
        found.as_object_mut().unwrap().remove("observedGeneration");
        assert_eq!(found, condition);
    }
    let after = written(&vm(|_| ()), &wanted(&vm(|_| ()), &observed));
    let stopped = json!(wanted(&after, &with_reports(nothing(), vec![own(POD, &said(false))])));
    for field in ["serialUsers", "pendingChanges"] {
        assert!(stopped.get(field).is_none(), "{field}");
    }
    assert_eq!((&stopped["cpus"], &stopped["relayPort"], &stopped["loggedInUser"]), (&json!(0), &json!(0), &json!("")));
}

#[test]
fn a_condition_keeps_its_time_over_the_pods_but_running_does_not() {
    let since = "2027-01-15T06:00:00Z";
    let before = |type_: &str| json!({ "type": type_, "status": "False", "reason": "Stopped", "message": "", "lastTransitionTime": since });
    let stored = vm(|vm| vm["status"] = json!({ "conditions": [before("Running"), before("Booted")] }));
    let folded = fold(&stored, &with_reports(cluster(|_, _| ()), vec![own(POD, &said(false))])).unwrap();
    let time = |type_: &str| json!(conditions::find(current_conditions(&folded), type_).unwrap().last_transition_time);
    assert_eq!(time("Booted"), since);
    assert_eq!(time("Running"), "2027-01-15T07:30:00Z");
    assert!(is_report_of(&folded, cluster(|_, _| ()).objects.iter().find(|object| object.key.is_pod()).unwrap()));
}

#[test]
fn what_a_runner_writes_into_the_status_is_not_applied_by_the_manager() {
    let vm = reported(true, |vm| {
        vm["status"]["podUid"] = json!(POD);
        vm["status"]["identity"] = json!({ "uuid": "u-1" });
        vm["metadata"]["managedFields"] = json!([{
            "manager": "vm-runner", "operation": "Apply", "subresource": "status",
            "fieldsV1": { "f:status": { "f:podUid": {}, "f:identity": {} } },
        }]);
    });
    assert_eq!(carried(&vm), RunnerStatus::default());
    let observed = with_reports(cluster(|_, _| ()), vec![own(POD, &Value::Null)]);
    let wanted = wanted(&vm, &observed);
    assert_eq!((wanted.runner.identity, wanted.pod_uid, wanted.runner.cpus), (None, None, None));
    assert!(conditions::find(&wanted.conditions, RUNNING).is_none());
    assert!(has_fields_of_runner(&vm) && !is_of_pod(&vm, &observed));
    assert!(is_of_pod(&vm, &with_reports(cluster(|_, _| ()), vec![own(POD, &said(true))])));
}

#[test]
fn each_pod_of_the_vm_has_a_report_which_says_when_the_guest_must_end() {
    let vm = vm(|vm| vm["status"] = json!({ "displayPasswordSerial": 4 }));
    let planned = |observed: &Observed| plan(&vm, observed, Some(&rendered(&vm, observed)));
    let here = cluster(|_, _| ());
    let actions = upkeep(&vm, &here, &planned(&here));
    let [ReportAction::Create { key, value }] = actions.as_slice() else { panic!("{actions:?}") };
    assert_eq!((key.name.as_str(), &value["spec"]), (POD, &json!({ "vm": "apple", "displayPasswordSerial": 4 })));
    assert_eq!(value["metadata"]["ownerReferences"][0]["uid"], "apple-uid");
    let known = with_reports(here.clone(), vec![own(POD, &Value::Null)]);
    assert_eq!(upkeep(&vm, &known, &planned(&known)), []);
    assert_eq!(upkeep(&vm, &nothing(), &planned(&nothing())), []);
    let mut ends = planned(&known);
    ends.force_stop.pod_uid = Some(POD.into());
    let actions = upkeep(&vm, &known, &ends);
    assert!(
        matches!(actions.as_slice(), [ReportAction::Change { patch, .. }] if *patch == json!({ "spec": { "endGuest": true } }))
    );
    // The foreground deletion of a VM deletes its reports, and they are not made again.
    let mut leaving = vm.clone();
    leaving.metadata.deletion_timestamp = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(here.now));
    assert_eq!(upkeep(&leaving, &here, &planned(&here)), []);
    // The Pod of a legacy runner has none.
    let legacy = cluster(|kind, object| {
        if kind == "Pod" {
            object["spec"]["containers"][0]["name"] = json!("apple");
        }
    });
    assert_eq!(upkeep(&vm, &legacy, &planned(&legacy)), []);

    let many = with_reports(
        here,
        vec![
            own(POD, &said(true)),
            own("old", &said(true)),
            report("x", Some("pear-uid"), "2027-01-15T07:00:00Z", &said(true)),
        ],
    );
    let gone = left(&vm, &many);
    assert!(matches!(gone.as_slice(), [ReportAction::Delete { key, .. }] if key.name == "old"), "{gone:?}");
}

/// The report that is in the status, what becomes of its owner, and whether it is deleted.
#[derive(Debug, PartialEq)]
struct Fate {
    folded: bool,
    given_back: bool,
    deleted: bool,
}

/// What owner, spec and `managedFields` of a report say, while its Pod exists, after it is gone if the status names it, and else.
#[test]
fn whose_a_report_is_follows_from_its_name_and_from_what_managed_fields_prove() {
    type Edit = fn(&mut Value);
    let owned = |it: &mut Value, kind: &str, name: &str, uid: &str| {
        let version = if kind == "VirtualMachine" { "vmoperator.jdrupes.org/v1" } else { "v1" };
        it["metadata"]["ownerReferences"] = json!([{ "apiVersion": version, "kind": kind, "name": name, "uid": uid }]);
        it["metadata"]["managedFields"][0]["fieldsV1"]["f:metadata"] = json!({});
    };
    let nothing_owns: Edit = |it| it["metadata"]["ownerReferences"] = json!([]);
    let (all, folded, none) = ((true, true), (true, false), (false, false));
    // Whether it is folded and deleted: after its Pod is gone if the status names it, and if it does not.
    type Row<'a> = (&'a str, &'a dyn Fn(&mut Value), bool, (bool, bool), (bool, bool));
    let rows: [Row<'_>; 12] = [
        ("as it was made", &|_| (), false, all, all),
        ("orphaned", &nothing_owns, true, all, all),
        ("given to another VM", &|it| owned(it, "VirtualMachine", "pear", "pear-uid"), true, all, none),
        ("given to something else", &|it| owned(it, "ConfigMap", "x", "x-uid"), true, all, none),
        ("of a former VM of the name", &|it| owned(it, "VirtualMachine", "apple", "former"), true, all, none),
        ("renamed", &|it| renamed(it, "pear"), false, all, none),
        ("of another VM, which somebody has changed", &|it| renamed(it, "apple"), false, all, none),
        ("of another VM, given to this one", &|it| it["spec"]["vm"] = json!("pear"), false, all, none),
        ("reset", &reset, false, folded, none),
        (
            "reset and given to another VM",
            &|it| {
                owned(it, "VirtualMachine", "pear", "pear-uid");
                reset(it);
            },
            true,
            folded,
            none,
        ),
        ("a person's", &of_others, false, none, none),
        (
            "a person's without owner",
            &|it| {
                nothing_owns(it);
                of_others(it);
            },
            true,
            none,
            none,
        ),
    ];
    for (what, edit, given_back, named, unnamed) in rows {
        let fate = |uid: Option<&str>, observed: Observed| {
            let vm = vm(|vm| vm["status"] = json!({ "podUid": uid }));
            let report = changed(POD, Some("apple-uid"), "2027-01-15T07:00:00Z", &said(true), edit);
            let observed = with_reports(observed, vec![report]);
            let actions = upkeep(&vm, &observed, &plan(&vm, &observed, Some(&rendered(&vm, &observed))));
            let is_owner = |action: &ReportAction| matches!(action, ReportAction::Change { patch, .. } if patch["metadata"]["ownerReferences"][0]["uid"] == "apple-uid");
            assert!(actions.iter().all(is_owner), "{what}: {actions:?}");
            Fate {
                folded: fold(&vm, &observed).is_some(),
                given_back: !actions.is_empty(),
                deleted: !left(&vm, &observed).is_empty(),
            }
        };
        let living = Fate { folded: true, given_back, deleted: false };
        assert_eq!(fate(None, cluster(|_, _| ())), living, "{what}, and its Pod exists");
        assert_eq!(fate(Some(POD), cluster(|_, _| ())), living, "{what}, its Pod exists and is in the status");
        let without_pod = |(folded, deleted)| Fate { folded, given_back: false, deleted };
        assert_eq!(fate(Some(POD), nothing()), without_pod(named), "{what}, and its Pod was in the status");
        assert_eq!(fate(None, nothing()), without_pod(unnamed), "{what}, and its Pod is gone");
        assert_eq!(fate(Some("another"), nothing()), without_pod(unnamed), "{what}, and the status has another Pod");
    }
}

#[test]
fn the_owner_of_a_report_is_not_given_back_while_the_vm_is_deleted() {
    let observed = cluster(|_, _| ());
    let mut leaving = vm(|_| ());
    leaving.metadata.deletion_timestamp = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(observed.now));
    let orphan = report(POD, None, "2027-01-15T07:00:00Z", &said(true));
    let observed = with_reports(observed, vec![orphan]);
    let planned = plan(&leaving, &observed, Some(&rendered(&leaving, &observed)));
    assert_eq!(upkeep(&leaving, &observed, &planned), []);
}

/// Each Pod of another VM is that VM's, also if its report says otherwise.
#[test]
fn a_report_of_a_pod_that_is_not_the_vms_is_no_matter_of_the_vm() {
    let vm = vm(|_| ());
    let of_pear = cluster(|kind, object| {
        if kind == "Pod" {
            *object = serde_json::from_str(&object.to_string().replace("apple-uid", "pear-uid")).unwrap();
        }
    });
    let observed = with_reports(of_pear, vec![own(POD, &said(true))]);
    assert!(fold(&vm, &observed).is_none());
    assert_eq!(left(&vm, &observed), []);
    assert_eq!(upkeep(&vm, &observed, &plan(&vm, &observed, Some(&rendered(&vm, &observed)))), []);
}
