//! The input of all decisions about a VM: its objects as they are in the cluster, and the time.

use std::{borrow::Cow, collections::BTreeMap, sync::Arc};

use k8s_openapi::{
    apimachinery::pkg::apis::meta::v1::{ManagedFieldsEntry, OwnerReference},
    jiff::Timestamp,
};
use kube::{
    ResourceExt,
    core::{DynamicObject, TypeMeta},
};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    api::GROUP,
    object::{
        APP_NAME, COMPONENT_LABEL, CONTAINER_NAME, DISPLAY_SECRET, HASH_ANNOTATION, MANAGED_BY, ObjectKey, Rendered,
        ephemeral_claim, named_vm,
    },
    ownership::{
        self, OBJECT_MANAGER, Writer,
        origin::{Entry, Origin, origin},
    },
};

pub mod vms_pod;
pub mod whose;

/// The objects of one VM at one moment.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Observed {
    /// The objects that name the VM, as their owner or in their labels.
    pub objects: Vec<Arc<Object>>,
    /// Pods that name another VM or none, and mount a claim of this VM so that they can write to it.
    #[serde(default)]
    pub others: Vec<Arc<Object>>,
    /// The objects that made Pods in `objects`, and the makers of these, if they are not in `objects` themselves.
    #[serde(default)]
    pub makers: Vec<Arc<Object>>,
    /// By the UIDs of claims: the other VM to which each belongs. Those of this VM are not among them.
    #[serde(default)]
    pub claimants: BTreeMap<String, Claimant>,
    /// What runners report: the objects of the kind VmReport that may be about the VM. Those of other VMs' Pods that exist are not among them.
    #[serde(default)]
    pub reports: Vec<Arc<Object>>,
    /// The names of the Pods that templates render; `None` if that is not known.
    #[serde(default)]
    pub pod_names: Option<Vec<String>>,
    /// The time.
    pub now: Timestamp,
}

/// Another VM of the namespace that exists and to which a claim belongs, as the claim's note or that VM's status says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claimant {
    /// Its name.
    pub vm: String,
    /// Whether it uses the claim. Otherwise it did once.
    pub uses: bool,
}

impl Observed {
    /// A VM without objects.
    pub fn nothing(now: Timestamp) -> Self {
        Self::of(Vec::new(), now)
    }

    /// A VM with these objects, the reports of its runners among them.
    pub fn of(objects: Vec<Arc<Object>>, now: Timestamp) -> Self {
        let (reports, objects) = objects.into_iter().partition(|object| object.key.is_report());
        Self {
            objects,
            others: Vec::new(),
            makers: Vec::new(),
            claimants: BTreeMap::new(),
            reports,
            pod_names: None,
            now,
        }
    }

    /// The object with that key.
    pub fn get(&self, key: &ObjectKey) -> Option<&Arc<Object>> {
        self.objects.iter().find(|object| object.key == *key)
    }

    /// The claim with that name.
    pub fn claim(&self, name: &str) -> Option<&Arc<Object>> {
        self.objects.iter().find(|object| object.key.is_claim() && object.key.name == name)
    }

    /// The object that made a Pod or another maker, if it exists.
    pub fn maker_of(&self, object: &Object) -> Option<&Arc<Object>> {
        let maker = object.maker.as_ref()?;
        self.objects.iter().chain(&self.makers).find(|object| object.uid == maker.uid)
    }

    /// The makers of an object, from the nearest to the top: for a Pod of a Deployment its ReplicaSet and the Deployment.
    pub fn makers_of<'a>(&'a self, object: &'a Object) -> impl Iterator<Item = &'a Arc<Object>> {
        // Owner references could form a circle.
        std::iter::successors(self.maker_of(object), |maker| self.maker_of(maker)).take(MAXIMUM_DEPTH)
    }

    /// The VM's display secrets, whoever made them.
    pub fn display_secrets(&self) -> impl Iterator<Item = &Arc<Object>> {
        self.objects.iter().filter(|object| {
            object.key.kind == "Secret"
                && object.labels.get(COMPONENT_LABEL).is_some_and(|value| value == DISPLAY_SECRET)
        })
    }
}

/// How many makers an object has at most: a CronJob makes a Job, which makes a Pod.
pub const MAXIMUM_DEPTH: usize = 4;

/// The object that made another one, by its owner reference.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Maker {
    /// API version, kind and name.
    pub key: ObjectKey,
    /// Its UID.
    pub uid: String,
}

/// An object of the cluster, reduced to the fields that decisions need.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Object {
    /// API version, kind and name.
    pub key: ObjectKey,
    /// Its UID.
    pub uid: String,
    /// Its resourceVersion. These can be compared as numbers
    /// (<https://kubernetes.io/docs/reference/using-api/api-concepts/#resource-versions>).
    pub version: u64,
    /// When it was created.
    pub created: Option<Timestamp>,
    /// Set while the object is being deleted: when its grace period ends.
    pub deleting: Option<Timestamp>,
    /// Set while the object is being deleted: its grace period in seconds.
    pub grace: Option<i64>,
    /// UIDs of its owners.
    pub owners: Vec<String>,
    /// The name of the VM that is an owner.
    #[serde(default)]
    pub owner_vm: Option<String>,
    /// Which program made it.
    #[serde(default)]
    pub origin: Origin,
    /// What made it, if it is owned by something else than a VM: for the Pod of a StatefulSet the StatefulSet.
    #[serde(default)]
    pub maker: Option<Maker>,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Its annotations.
    pub annotations: BTreeMap<String, String>,
    /// The fields that [`OBJECT_MANAGER`] applied and still owns, as a field set of `managedFields`.
    pub owned: Option<Json>,
    /// The fields that [`OBJECT_MANAGER`] patched and still owns: labels and annotations of objects that change at start.
    pub patched: Option<Json>,
    /// The field manager of a tool that syncs the size of this claim with Git ([`ownership::size_applier`]).
    #[serde(default)]
    pub size_applier: Option<String>,
    /// `spec` of a Pod, a claim or a report; null for other kinds.
    pub spec: Value,
    /// `status` of a Pod, a claim or a report; null for other kinds.
    pub status: Value,
}

impl Object {
    /// Reduces an object of the API server to the fields that decisions need.
    pub fn trim(kind: &TypeMeta, object: DynamicObject) -> Self {
        let key = ObjectKey { api_version: kind.api_version.clone(), kind: kind.kind.clone(), name: object.name_any() };
        let fields = |operation: &str| {
            let ours = object.managed_fields().iter().find(|entry| {
                entry.manager.as_deref() == Some(OBJECT_MANAGER)
                    && entry.operation.as_deref() == Some(operation)
                    && entry.subresource.as_deref().unwrap_or_default().is_empty()
            });
            let mut ours = ours.and_then(|entry| entry.fields_v1.clone())?.0;
            let others =
                object.managed_fields().iter().filter(|entry| entry.manager.as_deref() != Some(OBJECT_MANAGER));
            for theirs in others.filter_map(|entry| entry.fields_v1.as_ref()) {
                ownership::mark_parts(&mut ours, &theirs.0);
            }
            Some(Json::from(&ours))
        };
        let (owned, patched) = (fields("Apply"), fields("Update"));
        let origin = origin_of(object.metadata.creation_timestamp.as_ref().map(|time| time.0), object.managed_fields());
        let writers = object.managed_fields().iter().filter(|_| key.is_claim()).map(Writer::from);
        let size_applier = ownership::size_applier(writers, object.annotations());
        let mut data = if key.needs_content() { object.data } else { Value::Null };
        let mut take = |field: &str| data.get_mut(field).map(Value::take).unwrap_or_default();
        let metadata = object.metadata;
        Self {
            key,
            uid: metadata.uid.unwrap_or_default(),
            version: metadata.resource_version.and_then(|version| version.parse().ok()).unwrap_or_default(),
            created: metadata.creation_timestamp.map(|time| time.0),
            deleting: metadata.deletion_timestamp.map(|time| time.0),
            grace: metadata.deletion_grace_period_seconds,
            maker: maker(metadata.owner_references.as_deref().unwrap_or_default()),
            owner_vm: owning_vm(metadata.owner_references.as_deref().unwrap_or_default()).map(str::to_owned),
            origin,
            owners: metadata.owner_references.unwrap_or_default().into_iter().map(|owner| owner.uid).collect(),
            labels: metadata.labels.unwrap_or_default(),
            annotations: metadata.annotations.unwrap_or_default(),
            owned,
            patched,
            size_applier,
            spec: take("spec"),
            status: take("status"),
        }
    }

    /// Whether the object with that UID is an owner.
    pub fn is_owned_by(&self, uid: &str) -> bool {
        self.owners.iter().any(|owner| owner == uid)
    }

    /// The name of the VM in the object's annotation or, without it, in its labels.
    pub fn vm(&self) -> Option<&str> {
        named_vm(&self.annotations, &self.labels).map(String::as_str)
    }

    /// Whether the object's labels say that the manager created it. Anybody may give it these: [`Self::whose`] says whose it is.
    pub fn is_ours(&self) -> bool {
        let label = |name: &str| self.labels.get(name).map(String::as_str);
        label("app.kubernetes.io/managed-by") == Some(MANAGED_BY) && label("app.kubernetes.io/name") == Some(APP_NAME)
    }

    /// Whether a claim is bound to a volume.
    pub fn is_bound(&self) -> bool {
        self.spec_str("/volumeName").is_some_and(|name| !name.is_empty())
    }

    /// Whether it is a Pod whose containers have ended for good
    /// (<https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/#pod-phase>).
    pub fn has_ended(&self) -> bool {
        self.key.is_pod() && matches!(self.phase(), Some("Succeeded" | "Failed"))
    }

    /// The phase of a Pod or a claim.
    pub fn phase(&self) -> Option<&str> {
        self.status_str("/phase")
    }

    /// The claims that a Pod mounts, with whether it can write to them.
    pub fn mounted_claims(&self) -> impl Iterator<Item = (Cow<'_, str>, bool)> {
        let volumes = self.spec["volumes"].as_array().into_iter().flatten();
        let named = volumes.filter_map(|volume| {
            let claim = volume.get("persistentVolumeClaim")?;
            Some((Cow::from(claim["claimName"].as_str()?), claim["readOnly"] != true))
        });
        named.chain(self.ephemeral_claims().map(|claim| (Cow::from(claim), true)))
    }

    /// The claims of a Pod's volumes of type `ephemeral`, which are deleted with it.
    pub fn ephemeral_claims(&self) -> impl Iterator<Item = String> {
        let volumes = self.spec["volumes"].as_array().into_iter().flatten();
        let ephemeral = volumes.filter(|volume| volume.get("ephemeral").is_some());
        ephemeral.filter_map(|volume| Some(ephemeral_claim(&self.key.name, volume["name"].as_str()?)))
    }

    /// The node to which a Pod is bound.
    pub fn node_name(&self) -> Option<&str> {
        self.spec_str("/nodeName")
    }

    /// A string in the object's spec, by its JSON pointer.
    pub fn spec_str(&self, pointer: &str) -> Option<&str> {
        self.spec.pointer(pointer).and_then(Value::as_str)
    }

    /// A string in the object's status, by its JSON pointer.
    pub fn status_str(&self, pointer: &str) -> Option<&str> {
        self.status.pointer(pointer).and_then(Value::as_str)
    }

    /// The condition with that type and that status (`True`, `False`, `Unknown`) in the object's status.
    pub fn condition(&self, type_: &str, status: &str) -> Option<&Value> {
        let mut conditions = self.status["conditions"].as_array().into_iter().flatten();
        conditions.find(|item| item["type"] == type_ && item["status"] == status)
    }

    /// The container statuses of a Pod, init containers included, as the kubelet reports them.
    pub fn container_statuses(&self) -> impl Iterator<Item = &Value> {
        let lists = ["initContainerStatuses", "containerStatuses"].into_iter();
        lists.filter_map(|list| self.status[list].as_array()).flatten()
    }

    /// A container of a Pod, or an init container.
    pub fn container(&self, name: &str) -> Option<&Value> {
        let lists = ["containers", "initContainers"].into_iter().filter_map(|list| self.spec[list].as_array());
        lists.flatten().find(|container| container["name"] == name)
    }

    /// The container of a Pod in which the runner runs: `vm-runner`, or that of a legacy runner, which has the VM's name. If the Pod has
    /// lost its labels, its own name is that of the VM, or that and the number of a StatefulSet's Pod.
    pub fn runner_container(&self) -> Option<&Value> {
        let containers = self.spec["containers"].as_array()?;
        let named = |name: &str| containers.iter().find(|container| container["name"] == name);
        let of_set = self.key.name.rsplit_once('-').map(|(name, _)| name);
        let vms = self.vm().into_iter().chain([self.key.name.as_str()]).chain(of_set);
        [CONTAINER_NAME].into_iter().chain(vms).find_map(named)
    }

    /// The name of [`Self::runner_container`].
    pub fn runner_container_name(&self) -> &str {
        self.runner_container().and_then(|container| container["name"].as_str()).unwrap_or(CONTAINER_NAME)
    }

    /// Whether a legacy runner runs in the Pod: one of the VM-Operator in Java, which reports in another way than ours.
    pub fn has_legacy_runner(&self) -> bool {
        self.runner_container_name() != CONTAINER_NAME
    }

    /// Whether it was applied from what is rendered now, so that it need not be applied again.
    pub fn is_as(&self, rendered: &Rendered) -> bool {
        self.annotations.get(HASH_ANNOTATION) == Some(&rendered.hash)
    }

    /// Whether [`OBJECT_MANAGER`] owns every field of `rendered`. When another client changes or removes a field, the API server moves
    /// the ownership to that client. So a drift is detected without comparing values, which the API server may have normalised.
    pub fn owns_all_of(&self, rendered: &Value) -> bool {
        self.owned.as_ref().is_some_and(|owned| ownership::owns_all_of(&owned.value(), rendered))
    }
}

fn origin_of(created: Option<Timestamp>, entries: &[ManagedFieldsEntry]) -> Origin {
    let fields = |entry: &ManagedFieldsEntry| entry.fields_v1.as_ref().map(|fields| fields.0.to_string());
    let texts: Vec<_> = entries.iter().map(|entry| (entry, fields(entry).unwrap_or_default())).collect();
    let entries = texts.iter().map(|(entry, fields)| Entry {
        manager: entry.manager.as_deref().unwrap_or_default(),
        operation: entry.operation.as_deref().unwrap_or_default(),
        subresource: entry.subresource.as_deref().unwrap_or_default(),
        written: entry.time.as_ref().map(|time| time.0),
        fields,
    });
    origin(created, entries)
}

/// The owner that made an object and makes it again: its controller
/// (<https://kubernetes.io/docs/concepts/overview/working-with-objects/owners-dependents/>), unless that is a VM.
pub fn maker(owners: &[OwnerReference]) -> Option<Maker> {
    let owner = owners.iter().find(|owner| owner.controller == Some(true) && !is_vm(owner))?;
    let key = ObjectKey { api_version: owner.api_version.clone(), kind: owner.kind.clone(), name: owner.name.clone() };
    Some(Maker { key, uid: owner.uid.clone() })
}

/// The name of the VM that owns an object.
pub fn owning_vm(owners: &[OwnerReference]) -> Option<&str> {
    owners.iter().find(|owner| is_vm(owner)).map(|owner| owner.name.as_str())
}

/// Whether an owner is a VM, of whatever version.
fn is_vm(owner: &OwnerReference) -> bool {
    let group = owner.api_version.split_once('/').map(|(group, _)| group);
    owner.kind == "VirtualMachine" && group == Some(GROUP)
}

/// Whether a node answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NodeState {
    /// The manager does not know it.
    #[default]
    NotKnown,
    /// The node reports, also if it reports that it is not ready.
    Answering,
    /// The node does not report any more.
    NotAnswering,
    /// The cluster has no such node.
    Removed,
}

impl NodeState {
    /// The state by the condition Ready of the Node. The node controller sets it to Unknown when the node does not report any more
    /// (<https://kubernetes.io/docs/reference/node/node-status/#condition>).
    pub fn by_ready(status: Option<&str>) -> Self {
        match status {
            Some("Unknown") => Self::NotAnswering,
            Some("True" | "False") => Self::Answering,
            Some(_) | None => Self::NotKnown,
        }
    }
}

/// JSON kept as text, for values that every object has and that are rarely read. A tree of maps needs ten times the memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String")]
pub struct Json(Arc<str>);

impl Json {
    /// The parsed JSON; null if the text is not JSON.
    pub fn value(&self) -> Value {
        serde_json::from_str(&self.0).unwrap_or_default()
    }

    /// The text.
    pub fn text(&self) -> &str {
        &self.0
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

/// Text of others (a container, a guest, an event) without control characters, which could move a terminal's cursor, hide lines or turn their
/// direction. Lines stay.
pub fn printable(text: &str) -> String {
    let is_turn =
        |letter| matches!(letter, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let is_obeyed = |letter: char| (letter.is_control() && letter != '\n') || is_turn(letter);
    text.chars().map(|letter| if is_obeyed(letter) { '\u{fffd}' } else { letter }).collect()
}

/// How a container ended, by its status: this time or the last time.
pub fn end_of(status: &Value) -> Option<&Value> {
    let states = [&status["state"]["terminated"], &status["lastState"]["terminated"]];
    states.into_iter().find(|state| state.is_object())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::object::INSTANCE_LABEL;

    #[test]
    fn the_runners_container_is_found_without_labels() {
        for (pod, labels, containers, expected) in [
            ("apple", json!({}), json!(["sidecar", "vm-runner"]), "vm-runner"),
            ("apple", json!({ INSTANCE_LABEL: "apple" }), json!(["sidecar", "apple"]), "apple"),
            ("apple", json!({}), json!(["sidecar", "apple"]), "apple"),
            ("apple-0", json!({}), json!(["apple"]), "apple"),
            ("apple-vm", json!({ INSTANCE_LABEL: "apple" }), json!(["apple-vm", "vm-runner"]), "vm-runner"),
            ("apple", json!({}), json!(["sidecar"]), "vm-runner"),
        ] {
            let containers: Vec<Value> =
                containers.as_array().unwrap().iter().map(|name| json!({ "name": name })).collect();
            let pod = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": pod, "labels": labels }, "spec": { "containers": containers } });
            let pod: DynamicObject = serde_json::from_value(pod).unwrap();
            let found = Object::trim(&crate::object::pods(), pod.clone());
            assert_eq!(found.runner_container_name(), expected, "{pod:?}");
        }
    }
}
