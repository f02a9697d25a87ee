//! VMs and clusters for unit tests, made with the real parsing and rendering.

use std::sync::Arc;

use k8s_openapi::jiff::Timestamp;
use kube::core::DynamicObject;
use serde_json::{Map, Value, json};

use crate::{
    api::VirtualMachine,
    config::ReconcilerConfig,
    object::Rendered,
    observed::{Object, Observed},
    ownership::OBJECT_MANAGER,
    render::{RandomInput, TemplateSet, render},
};

/// The time in all tests.
pub(crate) fn noon() -> Timestamp {
    Timestamp::from_second(1_800_000_000).unwrap()
}

/// The VM `apple` in the namespace `orchard`, with one disk `core`, changed by `edit`.
pub(crate) fn vm(edit: impl FnOnce(&mut Value)) -> VirtualMachine {
    let mut vm = json!({
        "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine",
        "metadata": { "name": "apple", "namespace": "orchard", "uid": "apple-uid", "generation": 3 },
        "spec": { "vm": {
            "state": "Running", "maximumCpus": 2,
            "disks": [{ "volumeClaimTemplate": { "metadata": { "name": "core" }, "spec": { "resources": { "requests": { "storage": "1Gi" } } } } }],
        } },
    });
    edit(&mut vm);
    serde_json::from_value(vm).unwrap()
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
    let random = RandomInput { display_password: "secret".into() };
    render(vm, observed, &ReconcilerConfig::default(), &random, &TemplateSet::builtin().unwrap()).unwrap()
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
    Observed { objects: objects.collect(), now: noon() }
}

/// The field set of an object; a list is a map if its items have one of the keys that the lists of Pods and metadata have.
fn field_set(value: &Value) -> Value {
    let field = |(name, value): (&String, &Value)| (format!("f:{name}"), field_set(value));
    match value {
        Value::Array(items) => {
            let keys = ["uid", "mountPath", "devicePath", "containerPort", "name"];
            let key = |item: &Value| {
                let name = keys.into_iter().find(|key| item.get(key).is_some())?;
                Some(format!("k:{}", json!({ name: item[name] })))
            };
            items.iter().filter_map(|item| Some((key(item)?, field_set(item)))).collect::<Map<_, _>>().into()
        }
        // Field sets do not contain the type, nor the name in the metadata.
        Value::Object(map) if map.contains_key("metadata") => {
            let mut map = map.clone();
            map.retain(|name, _| !["apiVersion", "kind"].contains(&name.as_str()));
            map["metadata"].as_object_mut().unwrap().retain(|name, _| !["name", "namespace"].contains(&name.as_str()));
            map.iter().map(field).collect::<Map<_, _>>().into()
        }
        Value::Object(map) => map.iter().map(field).collect::<Map<_, _>>().into(),
        _ => json!({}),
    }
}

/// An API server that answers with `server`.
#[cfg(feature = "manager")]
pub(crate) async fn played(server: axum::Router) -> kube::Config {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(axum::serve(listener, server).into_future());
    kube::Config::new(format!("http://{address}").parse().unwrap())
}
