//! Objects as they are kept: text instead of trees. A manager keeps seven and more for each machine and looks into those of
//! one machine at a time, so memory counts and unpacking does not: a tree of maps takes ten times the memory of its text.

use std::{collections::BTreeMap, sync::Arc};

use k8s_openapi::jiff::Timestamp;
use serde_json::Value;

use crate::{
    observed::{Json, Object},
    render::ObjectKey,
};

/// An object of the cluster, packed.
#[derive(Debug, PartialEq)]
pub struct Packed {
    /// What it is called.
    pub key: ObjectKey,
    /// Its namespace.
    pub namespace: Box<str>,
    /// Its UID.
    pub uid: Box<str>,
    /// Its resourceVersion.
    pub version: u64,
    owned: Option<Json>,
    patched: Option<Json>,
    /// [`Rest`] as JSON.
    rest: Box<str>,
}

/// Everything else of an [`Object`], in the order of its fields.
type Rest<T, V> = (Option<Timestamp>, Option<Timestamp>, Option<i64>, Vec<String>, T, T, V, V);

impl Packed {
    /// The object.
    pub fn unpack(&self) -> Object {
        // What was written by `from` can be read, and nothing else is ever there.
        let rest: Rest<BTreeMap<String, String>, Value> = serde_json::from_str(&self.rest).unwrap_or_default();
        let (created, deleting, grace, owners, labels, annotations, spec, status) = rest;
        Object {
            key: self.key.clone(),
            namespace: self.namespace.as_ref().into(),
            uid: self.uid.as_ref().into(),
            version: self.version,
            created,
            deleting,
            grace,
            owners,
            labels,
            annotations,
            owned: self.owned.clone(),
            patched: self.patched.clone(),
            spec,
            status,
        }
    }

    /// The same, to be shared.
    pub fn shared(&self) -> Arc<Object> {
        Arc::new(self.unpack())
    }
}

impl From<Object> for Packed {
    fn from(object: Object) -> Self {
        // A new field must be packed, too.
        let Object {
            key,
            namespace,
            uid,
            version,
            created,
            deleting,
            grace,
            owners,
            labels,
            annotations,
            owned,
            patched,
            spec,
            status,
        } = object;
        let rest: Rest<_, _> = (created, deleting, grace, owners, labels, annotations, spec, status);
        // Maps of texts and JSON can always be written.
        let rest = serde_json::to_string(&rest).unwrap_or_default().into();
        Self { key, namespace: namespace.into(), uid: uid.into(), version, owned, patched, rest }
    }
}

#[cfg(test)]
mod tests {
    use kube::core::DynamicObject;
    use serde_json::json;

    use super::*;

    #[test]
    fn what_was_packed_is_unpacked() {
        let pod: DynamicObject = serde_json::from_value(json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "name": "pear", "namespace": "orchard", "uid": "u-1", "resourceVersion": "17",
                "creationTimestamp": "2027-01-15T07:00:00Z", "deletionTimestamp": "2027-01-15T07:00:09Z",
                "deletionGracePeriodSeconds": 9,
                "labels": { "l": "\"\u{2028}\n" }, "annotations": { "a": "" },
                "ownerReferences": [{ "apiVersion": "v1", "kind": "X", "name": "x", "uid": "u-2" }],
                "managedFields": [
                    { "manager": "vm-operator", "operation": "Apply", "fieldsV1": { "f:metadata": { "f:labels": {} } } },
                    { "manager": "vm-operator", "operation": "Update", "fieldsV1": { "f:spec": {} } },
                ],
            },
            "spec": { "nodeName": "n" }, "status": { "phase": "Running", "podIPs": [{ "ip": "10.0.0.1" }] },
        }))
        .unwrap();
        let object = Object::trim(&pod.types.clone().unwrap(), pod);
        assert!(object.owned.is_some() && object.patched.is_some() && object.deleting.is_some());
        assert_eq!(Packed::from(object.clone()).unpack(), object);
    }
}
