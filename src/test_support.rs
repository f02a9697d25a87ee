//! VMs and clusters for unit tests, made with the real parsing and rendering.

use std::sync::Arc;

use k8s_openapi::jiff::Timestamp;
use kube::core::DynamicObject;
use serde_json::{Value, json};

use crate::{
    api::{VirtualMachine, stored},
    config::{Allowed, ReconcilerConfig},
    object::Rendered,
    observed::{Object, Observed},
    ownership::OBJECT_MANAGER,
    render::{RandomInput, TemplateSet, render},
};

#[path = "../tests/support/field_set.rs"]
mod field_set;

use field_set::field_set;

/// The time in all tests.
pub(crate) fn noon() -> Timestamp {
    Timestamp::from_second(1_800_000_000).unwrap()
}

/// The VM `apple` in the namespace `orchard`, with one disk `core`, changed by `edit`.
pub(crate) fn vm(edit: impl FnOnce(&mut Value)) -> VirtualMachine {
    serde_json::from_value(manifest(edit)).unwrap()
}

/// The same VM as the API server has it, perhaps with values that can't be read.
pub(crate) fn stored(edit: impl FnOnce(&mut Value)) -> VirtualMachine {
    stored::read(&manifest(edit).to_string()).unwrap()
}

fn manifest(edit: impl FnOnce(&mut Value)) -> Value {
    let mut vm = json!({
        "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine",
        "metadata": { "name": "apple", "namespace": "orchard", "uid": "apple-uid", "generation": 3 },
        "spec": { "vm": {
            "state": "Running", "maximumCpus": 2,
            "disks": [{ "volumeClaimTemplate": { "metadata": { "name": "core" }, "spec": { "resources": { "requests": { "storage": "1Gi" } } } } }],
        } },
    });
    edit(&mut vm);
    vm
}

/// The same VM with the state Stopped.
pub(crate) fn stopped() -> VirtualMachine {
    vm(|vm| {
        vm["spec"]["vm"]["state"] = json!("Stopped");
        set_by("Update", vm);
    })
}

/// Adds a field set: a client set the VM's state by `operation` (`Apply` or `Update`).
pub(crate) fn set_by(operation: &str, vm: &mut Value) {
    let fields = json!({ "f:spec": { "f:vm": { "f:state": {} } } });
    vm["metadata"]["managedFields"] = json!([{ "manager": "somebody", "operation": operation, "fieldsV1": fields }]);
}

/// The VM's objects as the built-in templates render them.
pub(crate) fn rendered(vm: &VirtualMachine, observed: &Observed) -> Vec<Rendered> {
    let random = RandomInput { display_password: "secret".into(), ..RandomInput::default() };
    render(vm, observed, &allowing(), &random, &TemplateSet::builtin().unwrap()).unwrap()
}

/// A configuration that allows VMs everything, also the images of a legacy runner.
pub(crate) fn allowing() -> ReconcilerConfig {
    let legacy_runner_images = vec!["ghcr.io/mnlipp/*".to_owned()].try_into().unwrap();
    let allowed = Allowed { legacy_runner_images, ..Allowed::everything() };
    ReconcilerConfig { allowed, ..ReconcilerConfig::default() }
}

/// The schema of the status in the CRD with this file.
pub(crate) fn status_schema(file: &str) -> Value {
    let (_, crd) = crate::api::crd::crds().into_iter().find(|(name, _)| name == file).unwrap();
    crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"].clone()
}

/// Panics unless the API server takes this as the status of a VmReport: one value that it refuses would keep all else from being known.
#[cfg(all(feature = "runner", feature = "schema"))]
pub(crate) fn assert_is_report(status: &Value) {
    static SCHEMA: std::sync::LazyLock<jsonschema::Validator> =
        std::sync::LazyLock::new(|| jsonschema::validator_for(&status_schema("vmreports-crd.yaml")).unwrap());
    let refused: Vec<_> =
        SCHEMA.iter_errors(status).map(|error| format!("{}: {error}", error.instance_path())).collect();
    assert!(refused.is_empty(), "{refused:?} of {status:#}");
}

/// An empty cluster.
pub(crate) fn nothing() -> Observed {
    Observed::nothing(noon())
}

/// A cluster with these objects as the manager applied them, each changed by `edit`, which gets its kind.
pub(crate) fn applied(objects: &[Rendered], mut edit: impl FnMut(&str, &mut Value)) -> Observed {
    let objects = objects.iter().map(|object| {
        let mut value = Value::clone(&object.value);
        value["metadata"]["uid"] = json!(format!("{}-{}", object.key.kind, object.key.name));
        value["metadata"]["creationTimestamp"] = json!("2027-01-15T07:00:00Z");
        value["metadata"]["managedFields"] =
            json!([{ "manager": OBJECT_MANAGER, "operation": "Apply", "fieldsV1": field_set(&object.value) }]);
        edit(&object.key.kind, &mut value);
        let object: DynamicObject = serde_json::from_value(value).unwrap();
        let types = object.types.clone().unwrap();
        Arc::new(Object::trim(&types, object))
    });
    Observed::of(objects.collect(), noon())
}

/// An API server that answers with `server`.
#[cfg(any(feature = "manager", feature = "web"))]
pub(crate) async fn played(server: axum::Router) -> kube::Config {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(axum::serve(listener, server).into_future());
    kube::Config::new(format!("http://{address}").parse().unwrap())
}
