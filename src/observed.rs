//! What the decisions about a machine may depend on: its objects as they are in the cluster, and the time.

use std::{collections::BTreeMap, sync::Arc};

use k8s_openapi::jiff::Timestamp;
use kube::{
    ResourceExt,
    core::{DynamicObject, TypeMeta},
};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    object::{APP_NAME, COMPONENT_LABEL, DISPLAY_SECRET, INSTANCE_LABEL, MANAGED_BY, ObjectKey},
    ownership::{self, OBJECT_MANAGER},
};

/// One machine's surroundings at one moment.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Observed {
    /// The objects that carry the machine's labels.
    pub objects: Vec<Arc<Object>>,
    /// The moment.
    pub now: Timestamp,
}

impl Observed {
    /// Of a machine that has no objects yet.
    pub fn nothing(now: Timestamp) -> Self {
        Self { objects: Vec::new(), now }
    }

    /// The object of that name.
    pub fn get(&self, key: &ObjectKey) -> Option<&Arc<Object>> {
        self.objects.iter().find(|object| object.key == *key)
    }

    /// The claim of that name.
    pub fn claim(&self, name: &str) -> Option<&Arc<Object>> {
        self.objects.iter().find(|object| object.key.is_claim() && object.key.name == name)
    }

    /// The machine's display secrets.
    pub fn display_secrets(&self) -> impl Iterator<Item = &Arc<Object>> {
        self.objects.iter().filter(|object| {
            object.key.kind == "Secret"
                && object.labels.get(COMPONENT_LABEL).is_some_and(|value| value == DISPLAY_SECRET)
        })
    }
}

/// An object of the cluster, trimmed to what decisions need.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Object {
    /// What it is called.
    pub key: ObjectKey,
    /// Its UID.
    pub uid: String,
    /// Its resourceVersion. These can be compared as numbers
    /// (<https://kubernetes.io/docs/reference/using-api/api-concepts/#resource-versions>).
    pub version: u64,
    /// When it was made.
    pub created: Option<Timestamp>,
    /// Set while it is being deleted.
    pub deleting: Option<Timestamp>,
    /// While it is being deleted: the grace period in seconds that it was given.
    pub grace: Option<i64>,
    /// UIDs of its owners.
    pub owners: Vec<String>,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Its annotations.
    pub annotations: BTreeMap<String, String>,
    /// The fields that [`OBJECT_MANAGER`] applied and still owns, in the form of `managedFields`.
    pub owned: Option<Json>,
    /// The same for fields that it patched: labels and annotations of an object that changes at start.
    pub patched: Option<Json>,
    /// `spec` of Pods and claims; of others, empty.
    pub spec: Value,
    /// `status` of Pods and claims; of others, empty.
    pub status: Value,
}

impl Object {
    /// Trims an object as the API server sends it.
    pub fn trim(kind: &TypeMeta, object: DynamicObject) -> Self {
        let key = ObjectKey { api_version: kind.api_version.clone(), kind: kind.kind.clone(), name: object.name_any() };
        let fields = |operation: &str| {
            let ours = object.managed_fields().iter().find(|entry| {
                entry.manager.as_deref() == Some(OBJECT_MANAGER)
                    && entry.operation.as_deref() == Some(operation)
                    && entry.subresource.as_deref().unwrap_or_default().is_empty()
            });
            ours.and_then(|entry| entry.fields_v1.as_ref()).map(|fields| Json::from(&fields.0))
        };
        let (owned, patched) = (fields("Apply"), fields("Update"));
        let mut data = if key.is_looked_into() { object.data } else { Value::Null };
        let mut take = |field: &str| data.get_mut(field).map(Value::take).unwrap_or_default();
        let metadata = object.metadata;
        Self {
            key,
            uid: metadata.uid.unwrap_or_default(),
            version: metadata.resource_version.and_then(|version| version.parse().ok()).unwrap_or_default(),
            created: metadata.creation_timestamp.map(|time| time.0),
            deleting: metadata.deletion_timestamp.map(|time| time.0),
            grace: metadata.deletion_grace_period_seconds,
            owners: metadata.owner_references.unwrap_or_default().into_iter().map(|owner| owner.uid).collect(),
            labels: metadata.labels.unwrap_or_default(),
            annotations: metadata.annotations.unwrap_or_default(),
            owned,
            patched,
            spec: take("spec"),
            status: take("status"),
        }
    }

    /// Whether the object belongs to the machine of that UID: it says so, or it is one of ours that nobody owns (its
    /// machine was deleted without it, and one of that name was made again).
    pub fn belongs_to(&self, vm_uid: &str) -> bool {
        if self.owners.is_empty() { self.is_ours() } else { self.owners.iter().any(|owner| owner == vm_uid) }
    }

    /// Whether the manager made the object for the machine of that UID, and it goes with the machine.
    pub fn was_made_for(&self, vm_uid: &str) -> bool {
        self.is_ours() && self.owners.iter().any(|owner| owner == vm_uid)
    }

    /// The machine that the object's labels name.
    pub fn vm(&self) -> Option<&str> {
        self.labels.get(INSTANCE_LABEL).map(String::as_str)
    }

    /// Whether the manager made it.
    pub fn is_ours(&self) -> bool {
        let label = |name: &str| self.labels.get(name).map(String::as_str);
        label("app.kubernetes.io/managed-by") == Some(MANAGED_BY) && label("app.kubernetes.io/name") == Some(APP_NAME)
    }

    /// Whether a claim has its volume.
    pub fn is_bound(&self) -> bool {
        self.text(Part::Spec, "/volumeName").is_some_and(|name| !name.is_empty())
    }

    /// A text in the object's spec or status.
    pub fn text(&self, part: Part, pointer: &str) -> Option<&str> {
        match part {
            Part::Spec => &self.spec,
            Part::Status => &self.status,
        }
        .pointer(pointer)
        .and_then(Value::as_str)
    }

    /// The condition of that type in the object's status, if it has that status.
    pub fn condition(&self, type_: &str, status: &str) -> Option<&Value> {
        let mut conditions = self.status["conditions"].as_array().into_iter().flatten();
        conditions.find(|item| item["type"] == type_ && item["status"] == status)
    }

    /// What a Pod's kubelet says of its containers, those that run before the others too.
    pub fn containers(&self) -> impl Iterator<Item = &Value> {
        let lists = ["initContainerStatuses", "containerStatuses"].into_iter();
        lists.filter_map(|list| self.status[list].as_array()).flatten()
    }

    /// Whether [`OBJECT_MANAGER`] still owns every field of what it rendered. It does not when somebody else has changed or
    /// removed one since: the API server moves a changed field to whoever changed it. So a drift is seen without comparing
    /// values, which the API server may have normalised.
    pub fn owns_all_of(&self, rendered: &Value) -> bool {
        self.owned.as_ref().is_some_and(|owned| ownership::owns_all_of(&owned.value(), rendered))
    }
}

/// JSON as text, for what is kept of every object and rarely looked into: as a tree of maps it takes ten times the memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String")]
pub struct Json(Arc<str>);

impl Json {
    /// The tree.
    pub fn value(&self) -> Value {
        serde_json::from_str(&self.0).unwrap_or_default()
    }
}

impl From<String> for Json {
    fn from(text: String) -> Self {
        Self(text.into())
    }
}

impl From<&Value> for Json {
    fn from(value: &Value) -> Self {
        Self(value.to_string().into())
    }
}

/// A part of an object.
#[derive(Clone, Copy, Debug)]
pub enum Part {
    /// `spec`.
    Spec,
    /// `status`.
    Status,
}
