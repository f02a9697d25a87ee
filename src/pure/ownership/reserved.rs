//! Which Secrets and ConfigMaps are the operator's own, so that no VM gets them as its data, whatever labels they have.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::Resource;

use super::{COMMAND_MANAGER, OBJECT_MANAGER};
use crate::{
    api::VirtualMachine,
    object::{COMPONENT_LABEL, DISPLAY_SECRET, MANAGED_BY, SET_LABEL},
};

/// Whether an object of that name is the operator's: the manager, the web interface and the template sets have such names, where they share the
/// namespace of the VMs.
pub fn is_operators_name(name: &str) -> bool {
    name.strip_prefix(MANAGED_BY).is_some_and(|rest| rest.is_empty() || rest.starts_with(['-', '.']))
}

/// Why an object is the operator's own and no data for a guest. None of the facts can be taken away by who may only set labels; those that anybody
/// can set only refuse more.
pub fn reserved(metadata: &ObjectMeta) -> Option<&'static str> {
    let name = metadata.name.as_deref().unwrap_or_default();
    let group = VirtualMachine::group(&());
    let is_owned = |reference: &OwnerReference| reference.api_version.split('/').next() == Some(&*group);
    let is_written = metadata.managed_fields.iter().flatten().any(|entry| {
        let manager = entry.manager.as_deref().unwrap_or_default();
        // With its commands a person writes what is theirs.
        manager != COMMAND_MANAGER && (manager == OBJECT_MANAGER || manager.starts_with("vm-operator-"))
    });
    let label = |label: &str| metadata.labels.as_ref().and_then(|labels| labels.get(label));
    if is_operators_name(name) {
        Some("its name is one of the manager's and the web interface's own objects")
    } else if metadata.owner_references.iter().flatten().any(is_owned) {
        Some("it belongs to a VM or a pool")
    } else if is_written {
        Some("the manager or the web interface has made it")
    } else if label(SET_LABEL).is_some() {
        Some("it is a template set")
    } else if label(COMPONENT_LABEL).is_some_and(|component| component == DISPLAY_SECRET) {
        Some("it is the password of a display")
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn the_operators_own_objects_are_known_by_what_nobody_can_take_from_them() {
        let written =
            |manager: &str| json!({ "name": "a", "managedFields": [{ "manager": "kubectl" }, { "manager": manager }] });
        let owned = |version: &str| json!({ "name": "a", "ownerReferences": [{ "apiVersion": version, "kind": "VmPool", "name": "x", "uid": "u" }] });
        let own = |metadata: Value| reserved(&serde_json::from_value(metadata).unwrap()).is_some();
        for metadata in [
            json!({ "name": "vm-operator" }),
            json!({ "name": "vm-operator-web-sessions" }),
            json!({ "name": "vm-operator-templates-gpu", "labels": { "vmoperator.jdrupes.org/cloud-init": "" } }),
            written("vm-operator"),
            written("vm-operator-web"),
            owned("vmoperator.jdrupes.org/v1"),
            json!({ "name": "a", "labels": { "vmoperator.jdrupes.org/template-set": "gpu" } }),
            json!({ "name": "a", "labels": { "app.kubernetes.io/component": "display-secret" } }),
        ] {
            assert!(own(metadata.clone()), "{metadata}");
        }
        for metadata in [
            json!({ "name": "user-data", "labels": { "vmoperator.jdrupes.org/cloud-init": "" } }),
            json!({ "name": "vm-operators" }),
            written("vm-operator-cli"),
            written("vm-runner"),
            owned("v1"),
        ] {
            assert!(!own(metadata.clone()), "{metadata}");
        }
    }
}
