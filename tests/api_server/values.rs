//! Bad values: what the schema refuses, and what happens to a VM that is stored with one.

use std::time::Duration;

use crate::support::{
    cluster::{OwnCluster, eventually},
    managed_namespace::ManagedNamespace,
    manager::install_crds,
};
use kube::{
    Api, Client, ResourceExt,
    api::{DynamicObject, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use vm_operator::api::{VirtualMachine, crd};

const LIMIT: Duration = Duration::from_secs(180);

/// VMs without a Rust type, which would not allow bad values.
fn vms(client: &Client, namespace: &str) -> Api<DynamicObject> {
    Api::namespaced_with(client.clone(), namespace, &kube::api::ApiResource::erase::<VirtualMachine>(&()))
}

fn manifest(name: &str, machine: &Value) -> DynamicObject {
    let mut vm = json!({
        "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine", "metadata": { "name": name },
        "spec": { "vm": { "maximumCpus": 2, "maximumRam": "1Gi" } },
    });
    json_patch::merge(&mut vm["spec"]["vm"], machine);
    serde_json::from_value(vm).unwrap()
}

/// Removes rules and bounds from a schema, as if it were that of an earlier definition.
fn loosen(schema: &mut Value) {
    const RULES: [&str; 9] = [
        "x-kubernetes-validations",
        "pattern",
        "minimum",
        "maximum",
        "minLength",
        "maxLength",
        "maxItems",
        "maxProperties",
        "not",
    ];
    match schema {
        Value::Object(map) => {
            map.retain(|key, value| !RULES.contains(&key.as_str()) || value.is_object() && value.get("type").is_some());
            map.values_mut().for_each(loosen);
        }
        Value::Array(list) => list.iter_mut().for_each(loosen),
        _ => {}
    }
}

#[tokio::test]
async fn a_stored_vm_that_breaks_a_newer_rule_can_be_stopped_started_and_mended() {
    // An API server of its own: it first has another definition.
    let cluster = OwnCluster::api_server();
    let namespace = cluster.namespace("ratchet").await;
    let (_, mut definition) = crd::crds().remove(0);
    loosen(&mut definition["spec"]["versions"][0]["schema"]);
    definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]
        .as_object_mut()
        .unwrap()
        .remove("default");
    namespace.apply(&definition.to_string());
    let vms = vms(&cluster.client().await, namespace.name());
    let disk = |name: &str| json!({ "volumeClaimTemplate": { "metadata": { "name": name } } });
    let cases = [
        (
            "cpus",
            json!({ "currentCpus": 4 }),
            json!({ "currentCpus": 1 }),
            "currentCpus must not be more than maximumCpus",
        ),
        (
            "ram",
            json!({ "currentRam": "2 GiB" }),
            json!({ "currentRam": "1 GiB" }),
            "currentRam must not be more than maximumRam",
        ),
        ("size", json!({ "maximumRam": "16Ei" }), json!({ "maximumRam": "2Gi" }), "spec.vm.maximumRam"),
        ("negative", json!({ "maximumRam": -1 }), json!({ "maximumRam": 1 << 30 }), "spec.vm.maximumRam"),
        (
            "boot",
            json!({ "disks": [{ "cdrom": { "image": "" }, "bootindex": 1_u64 << 32 }] }),
            json!({ "disks": [] }),
            "bootindex",
        ),
        (
            "twice",
            json!({ "disks": [disk("a"), disk("a")] }),
            json!({ "disks": [disk("a")] }),
            "the names of the disks must be different",
        ),
        ("clock", json!({ "rtcBase": "noon" }), json!({ "rtcBase": "utc" }), "spec.vm.rtcBase"),
    ];
    let parameters = PostParams::default();
    eventually("the definition", LIMIT, async || vms.list(&Default::default()).await.ok().map(drop)).await;
    for (name, bad, ..) in &cases {
        vms.create(&parameters, &manifest(name, bad)).await.unwrap_or_else(|error| panic!("{name}: {error}"));
        let status = json!({ "status": { "ram": "0", "assignment": {}, "conditions": [] } });
        vms.patch_status(name, &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
    }

    install_crds(*cluster).await;
    let dry_run = PostParams { dry_run: true, ..PostParams::default() };
    eventually("the new definition", LIMIT, async || {
        vms.create(&dry_run, &manifest("new", &cases[0].1)).await.is_err().then_some(())
    })
    .await;
    for (name, bad, good, message) in &cases {
        let error = vms.create(&dry_run, &manifest("new", bad)).await.expect_err(name).to_string();
        assert!(error.contains(message), "{name}: {error}");
        let patch = async |machine: &Value| {
            let patch = Patch::Merge(json!({ "spec": { "vm": machine } }));
            vms.patch(name, &PatchParams::default(), &patch).await.map(drop).map_err(|error| format!("{name}: {error}"))
        };
        for state in ["Running", "Stopped", "Running"] {
            patch(&json!({ "state": state })).await.unwrap();
        }
        let status = Patch::Merge(json!({ "status": { "observedGeneration": 2 } }));
        vms.patch_status(name, &PatchParams::default(), &status)
            .await
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        patch(good).await.unwrap();
        // What is mended stays so.
        let error = patch(bad).await.unwrap_err();
        assert!(error.contains(message), "{error}");
    }
}

#[tokio::test]
async fn amounts_of_resources_are_numbers_or_texts() {
    let ns = ManagedNamespace::new("amounts").await;
    let vms = vms(&ns.client, ns.namespace.name());
    let create = async |amount: Value| {
        let mut vm = manifest("apple", &json!({ "state": "Running" }));
        vm.data["spec"]["resources"] = json!({ "requests": { "cpu": amount } });
        let dry_run = PostParams { dry_run: true, ..PostParams::default() };
        vms.create(&dry_run, &vm).await.map(|_| vm).map_err(|error| error.to_string())
    };
    for bad in [json!(true), json!({}), json!({ "a": 1 }), json!([]), json!([1]), json!("much"), json!(-1.5)] {
        assert!(create(bad.clone()).await.is_err(), "{bad}");
    }
    for good in [json!(1), json!("1500m"), json!("1.5")] {
        create(good.clone()).await.unwrap();
    }
    let vm = create(json!(1.5)).await.unwrap();
    vms.create(&PostParams::default(), &vm).await.unwrap();
    let pod = ns.pod_when("apple", "the request", |_| true).await;
    assert_eq!(json!(pod)["spec"]["containers"][0]["resources"]["requests"]["cpu"], "1500m");
}

/// The runner of the Java VM-Operator replaces the whole status. It keeps the time of a condition whose status it does not change, which
/// then still belongs to the manager.
#[tokio::test]
async fn the_status_is_written_after_a_runner_has_replaced_it() {
    let ns = ManagedNamespace::new("replaced").await;
    ns.create_vm("apple", |_| ()).await;
    let vm = ns.vm_with_reason("apple", "Starting").await;
    let mut conditions = json!(vm.status.unwrap().conditions);
    conditions
        .as_array_mut()
        .unwrap()
        .retain(|condition| ["Running", "Booted"].contains(&condition["type"].as_str().unwrap()));
    for condition in conditions.as_array_mut().unwrap() {
        condition["reason"] = json!("VmStarting");
        condition["message"] = json!("The VM is starting.");
        if condition["type"] == "Running" {
            condition["status"] = json!("True");
        }
    }
    let status =
        json!({ "conditions": conditions, "assignment": {}, "cpus": 2, "ram": "1Gi", "runnerVersion": "4.0.3" });
    let patch: json_patch::Patch =
        serde_json::from_value(json!([{ "op": "replace", "path": "/status", "value": status }])).unwrap();
    let vms = ns.api::<VirtualMachine>();
    vms.patch_status("apple", &PatchParams::default(), &Patch::<()>::Json(patch)).await.unwrap();
    let vm = ns.vm_with_reason("apple", "Running").await;
    let status = json!(vm.status.clone().unwrap());
    let booted =
        status["conditions"].as_array().unwrap().iter().find(|condition| condition["type"] == "Booted").unwrap();
    assert_eq!((&booted["reason"], &booted["message"]), (&json!("VmStarting"), &json!("The VM is starting.")));
    assert_eq!((&status["runnerVersion"], vm.name_any().as_str()), (&json!("4.0.3"), "apple"));
    ns.patch_vm("apple", json!({ "spec": { "vm": { "state": "Stopped" } } })).await;
    ns.vm_with_reason("apple", "StoppedAsRequested").await;
}
