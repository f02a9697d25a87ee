//! The Pod that an object is, or the Pods that it makes.

use serde_json::Value;

use crate::object::{CONTAINER_NAME, INSTANCE_LABEL, ObjectKey, Rendered};

/// The specs of Pods in an object, wherever a kind has them: a StatefulSet in `spec.template.spec`, a CronJob deeper, others elsewhere.
fn specs<'a>(key: &ObjectKey, value: &'a Value) -> Vec<&'a Value> {
    let mut found = Vec::new();
    if key.is_pod() {
        found.extend(value.get("spec").filter(|spec| spec["containers"].is_array()));
    } else {
        find(value, &mut found);
    }
    found
}

fn find<'a>(value: &'a Value, found: &mut Vec<&'a Value>) {
    match value {
        Value::Object(map) => {
            if map.get("containers").is_some_and(Value::is_array) {
                found.push(value);
            }
            map.values().for_each(|value| find(value, found));
        }
        Value::Array(list) => list.iter().for_each(|value| find(value, found)),
        _ => {}
    }
}

/// The specs of the Pod that an object is, or of the Pods that it makes.
pub(crate) fn pod_specs(object: &Rendered) -> Vec<&Value> {
    specs(&object.key, &object.value)
}

/// All containers of a Pod's spec.
pub(super) fn containers(spec: &Value) -> impl Iterator<Item = &Value> {
    ["containers", "initContainers"].into_iter().filter_map(|list| spec[list].as_array()).flatten()
}

/// The containers that run at the same time: without init containers that end before.
pub(super) fn lasting_containers(spec: &Value) -> impl Iterator<Item = &Value> {
    let list = |name: &str| spec[name].as_array().into_iter().flatten();
    list("containers").chain(list("initContainers").filter(|container| container["restartPolicy"] == "Always"))
}

/// The container in which QEMU runs. That of a legacy runner has the VM's name, which may also be that of another container.
pub(super) fn runner_of<'a>(spec: &'a Value, vm: &str) -> Option<&'a Value> {
    let named = |name: &str| containers(spec).find(|container| container["name"] == name);
    named(CONTAINER_NAME).or_else(|| named(vm))
}

/// Whether an object is or makes a Pod of the VM `vm` with the container in which QEMU runs.
pub(super) fn runs_guest(key: &ObjectKey, value: &Value, vm: &str) -> bool {
    specs(key, value).into_iter().any(|spec| runner_of(spec, vm).is_some())
}

/// The name of the VM whose object it is.
pub(super) fn vm_of(object: &Rendered) -> &str {
    object.value["metadata"]["labels"][INSTANCE_LABEL].as_str().unwrap_or(CONTAINER_NAME)
}

/// Whether the object is or makes a guest: a Pod with the container in which QEMU runs.
pub(super) fn is_guest(object: &Rendered) -> bool {
    runs_guest(&object.key, &object.value, vm_of(object))
}
