//! What the Pods of a guest refer to: claims, ConfigMaps and Secrets, and keys of these. A Pod whose ConfigMap is not there, or lacks the key, does
//! not start, and a set that does not render it any more has it deleted.

use serde_json::Value;

use super::pod::{containers, is_guest, pod_specs};
use crate::{
    api::VirtualMachine,
    object::{ObjectKey, Rendered, Update},
    observed::Observed,
};

/// The ConfigMap with the API server's certificate, which Kubernetes keeps in every namespace
/// (<https://kubernetes.io/docs/concepts/storage/projected-volumes/>). In a new namespace it may come a
/// moment later than the Pod, whose kubelet waits for it.
const OF_KUBERNETES: &str = "kube-root-ca.crt";

/// A claim, a ConfigMap or a Secret to which a Pod refers.
#[derive(Debug, PartialEq)]
pub(crate) struct Reference {
    /// The object.
    pub key: ObjectKey,
    /// The Pod starts without it and its keys, too.
    pub is_optional: bool,
    /// The keys that it must have.
    pub keys: Vec<String>,
}

impl Reference {
    fn add(found: &mut Vec<Self>, kind: &str, from: &Value, field: &str) {
        let Some(name) = from[field].as_str() else { return };
        if kind == "ConfigMap" && name == OF_KUBERNETES {
            return;
        }
        let key = ObjectKey { api_version: "v1".into(), kind: kind.into(), name: name.into() };
        let items = from["items"].as_array().into_iter().flatten().filter_map(|item| item["key"].as_str());
        let keys = items.chain(from["key"].as_str()).map(str::to_owned).collect();
        found.push(Self { key, is_optional: from["optional"] == true, keys });
    }
}

/// A reference of a guest to what no template renders.
pub(crate) struct Missing {
    /// What is missing.
    pub key: ObjectKey,
    /// What refers to it.
    pub guest: ObjectKey,
    /// The file of the template of that.
    pub template: String,
    /// It exists, and the manager deletes it, because no template renders it.
    pub is_deleted: bool,
    /// It is rendered, without this key.
    pub lacks: Option<String>,
}

/// What the volumes of a Pod refer to. The kubelet waits until it is there.
pub(crate) fn of_volumes(spec: &Value) -> Vec<Reference> {
    let mut found = Vec::new();
    let mut add = |kind: &str, from: &Value, field: &str| Reference::add(&mut found, kind, from, field);
    for volume in spec["volumes"].as_array().into_iter().flatten() {
        add("PersistentVolumeClaim", &volume["persistentVolumeClaim"], "claimName");
        add("ConfigMap", &volume["configMap"], "name");
        add("Secret", &volume["secret"], "secretName");
        for source in volume["projected"]["sources"].as_array().into_iter().flatten() {
            add("ConfigMap", &source["configMap"], "name");
            add("Secret", &source["secret"], "name");
        }
    }
    found
}

/// All references in the spec of a Pod.
fn references(spec: &Value) -> Vec<Reference> {
    let mut found = of_volumes(spec);
    let mut add = |kind: &str, from: &Value, field: &str| Reference::add(&mut found, kind, from, field);
    for container in containers(spec) {
        for variable in container["env"].as_array().into_iter().flatten() {
            add("ConfigMap", &variable["valueFrom"]["configMapKeyRef"], "name");
            add("Secret", &variable["valueFrom"]["secretKeyRef"], "name");
        }
        for source in container["envFrom"].as_array().into_iter().flatten() {
            add("ConfigMap", &source["configMapRef"], "name");
            add("Secret", &source["secretRef"], "name");
        }
    }
    found
}

/// The first of the keys that a rendered ConfigMap or Secret does not have. What is made once may have got others since.
fn lacking<'k>(object: &Rendered, keys: &'k [String]) -> Option<&'k String> {
    if object.update == Update::Once {
        return None;
    }
    let has = |key: &str| ["data", "binaryData", "stringData"].iter().any(|part| object.value[part].get(key).is_some());
    keys.iter().find(|key| !has(key))
}

/// What a VM's guest refers to and no template renders: what would be deleted under the guest, and what it needs and is not there. And what is rendered
/// without a key that it needs.
pub(crate) fn missing(vm: &VirtualMachine, observed: &Observed, objects: &[Rendered]) -> Vec<Missing> {
    let rendered = |key: &ObjectKey| objects.iter().find(|object| object.key == *key);
    let mut missing = Vec::new();
    for guest in objects.iter().filter(|object| is_guest(object)) {
        for Reference { key, is_optional, keys } in pod_specs(guest).into_iter().flat_map(references) {
            if let Some(object) = rendered(&key) {
                if let Some(lacks) = lacking(object, &keys).filter(|_| !is_optional) {
                    let (guest, template, lacks) = (guest.key.clone(), object.template.clone(), Some(lacks.clone()));
                    missing.push(Missing { key, guest, template, is_deleted: false, lacks });
                }
                continue;
            }
            let found = observed.get(&key);
            // The manager deletes no claim.
            let is_deleted = !key.is_claim() && found.is_some_and(|found| found.is_made_for(vm));
            let exists = found.is_some() || key.is_claim() && observed.claim(&key.name).is_some();
            if is_deleted || !exists && !is_optional {
                let (guest, template) = (guest.key.clone(), guest.template.clone());
                missing.push(Missing { key, guest, template, is_deleted, lacks: None });
            }
        }
    }
    missing
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::json;

    use super::*;

    #[test]
    fn every_place_in_which_a_pod_names_an_object_is_known() {
        let spec = json!({
            "volumes": [
                { "name": "a", "persistentVolumeClaim": { "claimName": "a" } },
                { "name": "b", "configMap": { "name": "b" } },
                { "name": "c", "secret": { "secretName": "c", "optional": true } },
                { "name": "d", "emptyDir": {} },
                { "name": "e", "projected": { "sources": [
                    { "configMap": { "name": "e", "optional": false } }, { "secret": { "name": "f" } },
                    { "serviceAccountToken": { "path": "token" } },
                ] } },
            ],
            "containers": [{ "name": "x", "envFrom": [{ "configMapRef": { "name": "g" } }, { "secretRef": { "name": "h", "optional": true } }] }],
            "initContainers": [{ "name": "y", "env": [
                { "name": "A", "value": "a" },
                { "name": "B", "valueFrom": { "configMapKeyRef": { "name": "i", "key": "k" } } },
                { "name": "C", "valueFrom": { "secretKeyRef": { "name": "j", "key": "k" } } },
                { "name": "D", "valueFrom": { "fieldRef": { "fieldPath": "metadata.uid" } } },
            ] }],
        });
        let found: Vec<String> = references(&spec)
            .into_iter()
            .map(|it| format!("{}{}", it.key, if it.is_optional { " (optional)" } else { "" }))
            .collect();
        let expected = [
            "PersistentVolumeClaim a",
            "ConfigMap b",
            "Secret c (optional)",
            "ConfigMap e",
            "Secret f",
            "ConfigMap g",
            "Secret h (optional)",
            "ConfigMap i",
            "Secret j",
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn what_a_pod_can_not_start_without() {
        let spec = json!({ "volumes": [
            { "name": "a", "secret": { "secretName": "keys" } },
            { "name": "b", "configMap": { "name": "settings", "items": [{ "key": "x", "path": "y" }, { "key": "z", "path": "z" }] } },
            { "name": "c", "configMap": { "name": "may-be", "optional": true } },
            { "name": "d", "emptyDir": {} },
            { "name": "e", "projected": { "sources": [
                { "secret": { "name": "data", "items": [{ "key": "k", "path": "k" }] } },
                { "secret": { "name": "perhaps", "optional": true } },
                { "serviceAccountToken": { "path": "token" } },
                { "configMap": { "name": "kube-root-ca.crt", "items": [{ "key": "ca.crt", "path": "ca.crt" }] } },
                { "configMap": { "name": "more" } },
            ] } },
        ] });
        let needed = of_volumes(&spec).into_iter().filter(|it| !it.is_optional);
        let found: Vec<String> =
            needed.map(|it| format!("{} {:?}", it.key, it.keys.into_iter().collect::<BTreeSet<_>>())).collect();
        let expected =
            ["Secret keys {}", "ConfigMap settings {\"x\", \"z\"}", "Secret data {\"k\"}", "ConfigMap more {}"];
        assert_eq!(found, expected);
    }
}
