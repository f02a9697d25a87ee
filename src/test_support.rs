//! Machines and clusters for unit tests: everything comes from the real parsing and rendering.

use std::sync::Arc;

use k8s_openapi::jiff::Timestamp;
use kube::core::DynamicObject;
use serde_json::{Map, Value, json};

use crate::{
    api::VirtualMachine,
    config::ReconcilerConfig,
    observed::{FIELD_MANAGER, Object, Observed},
    render::{Facts, Rendered, TemplateSet, render},
};

/// The time at which everything happens.
pub(crate) fn noon() -> Timestamp {
    Timestamp::from_second(1_800_000_000).unwrap()
}

/// A machine called `apple` of the namespace `orchard`, with one disk `core`, changed by `edit`.
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

/// The same machine, down.
pub(crate) fn stopped() -> VirtualMachine {
    vm(|vm| vm["spec"]["vm"]["state"] = json!("Stopped"))
}

/// What the built-in templates make of it.
pub(crate) fn rendered(vm: &VirtualMachine, observed: &Observed) -> Vec<Rendered> {
    let facts = Facts { display_password: "secret".into() };
    render(vm, observed, &ReconcilerConfig::default(), &facts, &TemplateSet::builtin().unwrap()).unwrap()
}

/// An empty cluster.
pub(crate) fn nothing() -> Observed {
    Observed { objects: Vec::new(), now: noon() }
}

/// A cluster in which these objects were applied, each changed by `edit`.
pub(crate) fn applied(objects: &[Rendered], mut edit: impl FnMut(&str, &mut Value)) -> Observed {
    let objects = objects.iter().map(|object| {
        let mut value = object.value.clone();
        value["metadata"]["uid"] = json!(format!("{}-{}", object.key.kind, object.key.name));
        value["metadata"]["creationTimestamp"] = json!("2027-01-15T07:00:00Z");
        value["metadata"]["managedFields"] =
            json!([{ "manager": FIELD_MANAGER, "operation": "Apply", "fieldsV1": field_set(&object.value) }]);
        edit(&object.key.kind, &mut value);
        let object: DynamicObject = serde_json::from_value(value).unwrap();
        let types = object.types.clone().unwrap();
        Arc::new(Object::trim(&types, object))
    });
    Observed { objects: objects.collect(), now: noon() }
}

/// The field set of an object; lists as if they were atomic.
fn field_set(value: &Value) -> Value {
    let Value::Object(map) = value else { return json!({}) };
    let fields = map.iter().filter(|(name, _)| !["apiVersion", "kind", "name", "namespace"].contains(&name.as_str()));
    Value::Object(fields.map(|(name, value)| (format!("f:{name}"), field_set(value))).collect::<Map<_, _>>())
}
