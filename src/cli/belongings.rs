//! The objects of a VM, as a person finds them.
//!
//! The manager knows an object by its owner, its annotation or its labels, and a claim also by its name. No selector of a list finds all of
//! these, and a tool may have overwritten a label. So the metadata of all objects of a kind are listed, and then those of the VM, each by its
//! name. That needs the right to `list`, and no other.

use std::fmt::Debug;

use futures::future::try_join_all;
use kube::{
    Api, ResourceExt,
    api::{DynamicObject, ListParams},
    core::TypeMeta,
};
use serde::de::DeserializeOwned;

use super::vms::CHUNK;
use crate::{
    api::VirtualMachine,
    claims,
    object::{APP_NAME, belongs_to, named_vm},
};

/// The objects of that name: one or none. Unlike `get`, it needs the right to `list`.
///
/// # Errors
/// The error of the request.
pub(super) async fn named<K: Clone + DeserializeOwned + Debug>(api: &Api<K>, name: &str) -> kube::Result<Vec<K>> {
    Ok(api.list(&ListParams::default().fields(&format!("metadata.name={name}"))).await?.items)
}

/// The VM's objects of a kind.
///
/// # Errors
/// The error of a request.
pub(super) async fn of_kind(
    api: &Api<DynamicObject>,
    kind: &TypeMeta,
    vm: &VirtualMachine,
) -> kube::Result<Vec<DynamicObject>> {
    let mut parameters = ListParams::default().limit(CHUNK);
    let mut names = Vec::new();
    loop {
        let page = api.list_metadata(&parameters).await?;
        names.extend(page.items.iter().filter(|object| is_of(vm, kind, *object)).map(ResourceExt::name_any));
        parameters.continue_token = page.metadata.continue_.filter(|token| !token.is_empty());
        if parameters.continue_token.is_none() {
            break;
        }
    }
    Ok(try_join_all(names.iter().map(|name| named(api, name))).await?.concat())
}

/// Whether an object is the VM's.
fn is_of(vm: &VirtualMachine, kind: &TypeMeta, object: &impl ResourceExt) -> bool {
    let name = vm.name_any();
    let owners = object.owner_references();
    if owners.iter().any(|owner| Some(&owner.uid) == vm.metadata.uid.as_ref()) {
        return true;
    }
    // A former VM of this name may have left objects, and they matter as much.
    if owners.iter().any(|owner| owner.kind == "VirtualMachine" && owner.name != name) {
        return false;
    }
    if kind.kind == "PersistentVolumeClaim" && claims::possible_names(vm).any(|claim| claim == object.name_any()) {
        return claims::is_of(vm, object);
    }
    if let Some((noted, uid)) = belongs_to(object.annotations()).filter(|_| kind.kind == "PersistentVolumeClaim") {
        return noted == name || Some(uid) == vm.metadata.uid.as_deref();
    }
    let is_labelled = object.labels().get("app.kubernetes.io/name").is_some_and(|label| label == APP_NAME);
    is_labelled && named_vm(object.annotations(), object.labels()) == Some(&name)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::test_support::vm;

    #[test]
    fn an_object_is_known_by_its_owner_its_annotation_its_labels_or_a_claims_name() {
        let vm = vm(|vm| vm["status"] = json!({ "claims": [{ "name": "apple-core-disk", "uid": "used" }] }));
        let ours = "app.kubernetes.io/name";
        let instance = "app.kubernetes.io/instance";
        let note = "vmoperator.jdrupes.org/vm";
        let owner = |kind: &str, name: &str, uid: &str| json!([{ "apiVersion": "x/v1", "kind": kind, "name": name, "uid": uid }]);
        let cases: &[(&str, Value, bool)] = &[
            (
                "Secret",
                json!({ "ownerReferences": owner("VirtualMachine", "apple", "apple-uid"), "labels": { instance: "a-tool" } }),
                true,
            ),
            (
                "Secret",
                json!({ "labels": { ours: "vm-runner", instance: "a-tool" }, "annotations": { note: "apple" } }),
                true,
            ),
            ("Secret", json!({ "labels": { ours: "vm-runner", instance: "apple" } }), true),
            (
                "Secret",
                json!({ "labels": { ours: "vm-runner", instance: "apple" }, "annotations": { note: "pear" } }),
                false,
            ),
            // A release of another program that is called as the VM.
            ("Secret", json!({ "labels": { ours: "postgresql", instance: "apple" } }), false),
            (
                "Pod",
                json!({ "ownerReferences": owner("VirtualMachine", "pear", "x"), "labels": { ours: "vm-runner", instance: "apple" } }),
                false,
            ),
            (
                "Pod",
                json!({ "ownerReferences": owner("StatefulSet", "apple", "x"), "labels": { ours: "vm-runner", instance: "apple" } }),
                true,
            ),
            ("PersistentVolumeClaim", json!({ "name": "apple-core-disk" }), true),
            (
                "PersistentVolumeClaim",
                json!({ "name": "apple-core-disk", "uid": "used", "labels": { instance: "a-tool" } }),
                true,
            ),
            (
                "PersistentVolumeClaim",
                json!({ "name": "apple-core-disk", "uid": "new", "labels": { instance: "a-tool" } }),
                false,
            ),
            ("PersistentVolumeClaim", json!({ "name": "else" }), false),
        ];
        for (kind, metadata, expected) in cases {
            let object: DynamicObject = serde_json::from_value(json!({ "metadata": metadata })).unwrap();
            let kind = TypeMeta { api_version: "v1".into(), kind: (*kind).into() };
            assert_eq!(is_of(&vm, &kind, &object), *expected, "{metadata}");
        }
    }
}
