//! Objects as they are received and as they are cached: as text instead of trees.
//!
//! Each VM has seven objects or more, and those of one VM are needed at a time, so memory counts: a tree of maps takes ten times the
//! memory of its text.

use std::{
    borrow::Cow,
    collections::{BTreeMap, HashSet},
    hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher},
    sync::{Arc, Mutex},
};

use k8s_openapi::{
    NamespaceResourceScope,
    apimachinery::pkg::apis::meta::v1::{FieldsV1, OwnerReference},
    jiff::Timestamp,
};
use kube::{
    Resource,
    api::{ApiResource, DynamicObject, ObjectMeta},
    core::{DynamicResourceScope, TypeMeta},
};
use serde::{
    Deserialize, Deserializer, Serialize,
    de::{Error as _, IgnoredAny},
};
use serde_json::{Value, value::RawValue};
use tokio::time::Instant;

use crate::{
    api::{VirtualMachine, VirtualMachineStatus, full_name, stored},
    metrics::VmSummary,
    object::{APP_NAME, BELONGS_TO_ANNOTATION, INSTANCE_LABEL, ObjectKey, belongs_to, ephemeral_claim, named_vm},
    observed::{Json, Maker, Object, maker, owning_vm},
    ownership::{
        self, OBJECT_MANAGER, STATUS_MANAGER, Writer,
        origin::{Entry, Origin, has_name, has_owner, origin},
    },
    process::lock,
};

/// A cached object.
#[derive(Clone, Debug, PartialEq)]
pub struct Packed {
    /// Its key.
    pub key: ObjectKey,
    /// Its UID.
    pub uid: Box<str>,
    /// Its resourceVersion.
    pub version: u64,
    /// The claims that a Pod mounts and can write to.
    pub claims: Box<[Box<str>]>,
    owned: Option<Arc<str>>,
    patched: Option<Arc<str>>,
    /// [`Rest`] as JSON.
    rest: Box<str>,
}

/// Everything else of an [`Object`], in the order of its fields.
type Rest<T, V> = (
    Option<Timestamp>,
    Option<Timestamp>,
    Option<i64>,
    Vec<String>,
    Option<String>,
    Origin,
    Option<Maker>,
    T,
    T,
    Option<String>,
    V,
    V,
);

/// Stands for the owner's UID in a field set. In JSON this character only occurs escaped.
const OWNER: char = '\0';

impl Packed {
    /// The object as a tree.
    pub fn unpack(&self) -> Object {
        // It was written by `pack`, so it can be read.
        let rest: Rest<BTreeMap<String, String>, Value> = serde_json::from_str(&self.rest).unwrap_or_default();
        let (
            created,
            deleting,
            grace,
            owners,
            owner_vm,
            origin,
            maker,
            labels,
            annotations,
            size_applier,
            spec,
            status,
        ) = rest;
        let fields = |shape: &Option<Arc<str>>| {
            let owner = owners.first().map(String::as_str).unwrap_or_default();
            shape.as_ref().map(|shape| Json::from(shape.replace(OWNER, owner)))
        };
        Object {
            key: self.key.clone(),
            uid: self.uid.as_ref().into(),
            version: self.version,
            created,
            deleting,
            grace,
            owned: fields(&self.owned),
            patched: fields(&self.patched),
            owners,
            owner_vm,
            origin,
            maker,
            labels,
            annotations,
            size_applier,
            spec,
            status,
        }
    }

    /// Whether both are the same for every decision. Only metadata is known of objects other than Pods and claims, so any new
    /// version of those may matter.
    pub fn is_same(&self, other: &Self) -> bool {
        let Self { key, uid, version, claims: _, owned, patched, rest } = other;
        let known = key.needs_content();
        let same = self.key == *key && self.uid == *uid && self.rest == *rest;
        self.version == *version || known && same && self.owned == *owned && self.patched == *patched
    }
}

/// Field sets, each kept once: the objects of VMs differ in the values of their fields, but hardly in which fields they have.
#[derive(Default)]
pub struct Shapes(Mutex<HashSet<Arc<str>>>);

impl Shapes {
    fn keep(&self, fields: &str, owners: &[String]) -> Arc<str> {
        let shape = match owners.first().filter(|owner| !owner.is_empty()) {
            Some(owner) => Cow::Owned(fields.replace(owner.as_str(), &OWNER.to_string())),
            None => Cow::Borrowed(fields),
        };
        let mut known = lock(&self.0);
        if let Some(known) = known.get(shape.as_ref()) {
            return known.clone();
        }
        // A new one is rare, so this is a good time to drop those that no object has any more.
        known.retain(|shape| Arc::strong_count(shape) > 1);
        let shape: Arc<str> = shape.into();
        known.insert(shape.clone());
        shape
    }
}

/// An object as the API server sends it. Parts that are not needed are never parsed into a tree. With `META` only the metadata is
/// requested.
#[derive(Clone, Debug)]
pub struct Sent<const META: bool> {
    /// What kube's watcher needs.
    meta: ObjectMeta,
    wire: Wire,
}

/// A whole object.
pub type Whole = Sent<false>;
/// Only its metadata is asked for.
pub type Meta = Sent<true>;

#[derive(Clone, Debug, Deserialize)]
struct Wire {
    metadata: WireMeta,
    spec: Option<Box<RawValue>>,
    status: Option<Box<RawValue>>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct WireMeta {
    name: String,
    namespace: String,
    uid: String,
    resource_version: String,
    creation_timestamp: Option<Timestamp>,
    deletion_timestamp: Option<Timestamp>,
    deletion_grace_period_seconds: Option<i64>,
    owner_references: Vec<OwnerReference>,
    labels: BTreeMap<String, String>,
    annotations: BTreeMap<String, String>,
    managed_fields: Vec<Fields>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Fields {
    manager: String,
    operation: String,
    subresource: String,
    time: Option<Timestamp>,
    fields_v1: Option<Box<RawValue>>,
}

impl Fields {
    fn entry(&self) -> Entry<'_> {
        Entry {
            manager: &self.manager,
            operation: &self.operation,
            subresource: &self.subresource,
            written: self.time,
            fields: self.fields_v1.as_ref().map(|fields| fields.get()).unwrap_or_default(),
        }
    }
}

impl<'de, const META: bool> Deserialize<'de> for Sent<META> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let wire = Wire::deserialize(deserializer)?;
        let meta = ObjectMeta {
            name: Some(wire.metadata.name.clone()),
            resource_version: Some(wire.metadata.resource_version.clone()),
            ..ObjectMeta::default()
        };
        Ok(Self { meta, wire })
    }
}

impl<const META: bool> Resource for Sent<META> {
    type DynamicType = ApiResource;
    type Scope = DynamicResourceScope;

    fn kind(types: &ApiResource) -> Cow<'_, str> {
        DynamicObject::kind(types)
    }

    fn group(types: &ApiResource) -> Cow<'_, str> {
        DynamicObject::group(types)
    }

    fn version(types: &ApiResource) -> Cow<'_, str> {
        DynamicObject::version(types)
    }

    fn plural(types: &ApiResource) -> Cow<'_, str> {
        DynamicObject::plural(types)
    }

    fn meta(&self) -> &ObjectMeta {
        &self.meta
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.meta
    }

    fn metadata_api() -> bool {
        META
    }
}

/// A VM as it is received and as it is kept. It is parsed later, because a VM that can't be read must not stop the watch of all others.
#[derive(Clone, Debug)]
pub struct PackedVm {
    /// What the watch and the queue need.
    meta: ObjectMeta,
    /// What the metrics show.
    pub summary: VmSummary,
    /// When it was received.
    pub arrived: Instant,
    /// Hashes of the Pods and claims that it uses, as its status says. `None`: it was not read yet.
    used: Option<Box<[u64]>>,
    /// Which fields of the status the manager has applied. It is most of what is kept of `managedFields`, and the same for most VMs.
    applied: Option<Arc<str>>,
    text: Box<str>,
}

/// Something that a VM can use: a Pod or a claim with this UID, or a claim of this name.
pub struct Used<'a> {
    name: &'a str,
    hash: u64,
}

impl<'a> Used<'a> {
    /// By its UID or name.
    pub fn of(name: &'a str) -> Self {
        Self { name, hash: hash(name) }
    }
}

/// The UIDs of the VM's Pods, and the UIDs and names of the claims that it uses.
fn used(status: &VirtualMachineStatus) -> impl Iterator<Item = &str> {
    let pods = [&status.pod_uid, &status.reporter_uid].into_iter().flatten().map(String::as_str);
    let claims = status.claims.iter().filter(|claim| !claim.unused);
    pods.chain(claims.flat_map(|claim| std::iter::once(claim.name.as_str()).chain(claim.uid.as_deref())))
}

/// The field set of the status that the manager has applied.
fn applied_fields(vm: &mut ObjectMeta) -> Option<&mut Option<FieldsV1>> {
    let mut entries = vm.managed_fields.iter_mut().flatten();
    let entry = entries.find(|entry| entry.manager.as_deref() == Some(STATUS_MANAGER))?;
    Some(&mut entry.fields_v1)
}

/// The same in each process. What has the same hash is compared itself.
fn hash(text: &str) -> u64 {
    BuildHasherDefault::<DefaultHasher>::new().hash_one(text)
}

impl From<VirtualMachine> for PackedVm {
    /// Keeps what decisions need ([`ownership::trim`]).
    fn from(vm: VirtualMachine) -> Self {
        Self::trimmed(vm, None, &Shapes::default())
    }
}

impl PackedVm {
    /// The VM as it is kept: with what decisions need ([`ownership::trim`]). A spec that can't be read is kept as it is.
    ///
    /// # Errors
    /// As [`PackedVm::read`].
    pub fn trim(&self, shapes: &Shapes) -> Result<Self, serde_json::Error> {
        let vm = self.read()?;
        let is_invalid = vm.spec.invalid.is_some();
        Ok(Self::trimmed(vm, is_invalid.then(|| stored::spec_text(&self.text)).flatten(), shapes))
    }

    /// With `spec` instead of the VM's own, if there is one.
    fn trimmed(mut vm: VirtualMachine, spec: Option<&RawValue>, shapes: &Shapes) -> Self {
        #[derive(Serialize)]
        struct Text<'a, T> {
            metadata: &'a ObjectMeta,
            spec: T,
            status: &'a Option<VirtualMachineStatus>,
        }
        ownership::trim(&mut vm);
        let fields = applied_fields(&mut vm.metadata).and_then(Option::take);
        let applied = fields.map(|fields| shapes.keep(&fields.0.to_string(), &[]));
        let ObjectMeta { name, namespace, uid, resource_version, .. } = vm.metadata.clone();
        let meta = ObjectMeta { name, namespace, uid, resource_version, ..ObjectMeta::default() };
        let VirtualMachine { metadata, status, .. } = &vm;
        let text = match spec {
            Some(spec) => serde_json::to_string(&Text { metadata, spec, status }),
            None => serde_json::to_string(&Text { metadata, spec: &vm.spec, status }),
        };
        let summary = VmSummary::of(&vm);
        let used = vm.status.iter().flat_map(used).map(hash).collect();
        // It was read from JSON, so it can be written.
        let text = text.unwrap_or_default().into();
        Self { meta, summary, arrived: Instant::now(), used: Some(used), applied, text }
    }

    /// Whether the VM may use this, as its status says. Most VMs need not be read to find the one that does.
    pub fn may_use(&self, used: &Used<'_>) -> bool {
        match &self.used {
            Some(hashes) => hashes.contains(&used.hash),
            None => self.mentions(used.name),
        }
    }

    /// Whether the text occurs anywhere in the VM.
    pub fn mentions(&self, text: &str) -> bool {
        self.text.contains(text)
    }

    /// Namespace and name, for people.
    pub fn full_name(&self) -> String {
        full_name(self.meta.namespace.as_deref(), self.meta.name.as_deref().unwrap_or_default())
    }

    /// The VM ([`stored::read`]).
    ///
    /// # Errors
    /// If it has no name.
    pub fn read(&self) -> Result<VirtualMachine, serde_json::Error> {
        let mut vm = stored::read(&self.text)?;
        if let Some(applied) = &self.applied
            && let Some(fields) = applied_fields(&mut vm.metadata)
        {
            *fields = serde_json::from_str(applied).ok();
        }
        Ok(vm)
    }
}

impl<'de> Deserialize<'de> for PackedVm {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Envelope<'a> {
            #[serde(borrow)]
            metadata: Names<'a>,
        }
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Names<'a> {
            #[serde(borrow)]
            name: Option<&'a RawValue>,
            #[serde(borrow)]
            namespace: Option<&'a RawValue>,
            #[serde(borrow)]
            uid: Option<&'a RawValue>,
            #[serde(borrow)]
            resource_version: Option<&'a RawValue>,
        }
        let text: Box<str> = Box::<RawValue>::deserialize(deserializer)?.into();
        let Envelope { metadata } = serde_json::from_str(&text).map_err(D::Error::custom)?;
        let text_of = |field: Option<&RawValue>| field.and_then(|field| serde_json::from_str(field.get()).ok());
        let meta = ObjectMeta {
            name: text_of(metadata.name),
            namespace: text_of(metadata.namespace),
            uid: text_of(metadata.uid),
            resource_version: text_of(metadata.resource_version),
            ..ObjectMeta::default()
        };
        Ok(Self { meta, summary: VmSummary::default(), arrived: Instant::now(), used: None, applied: None, text })
    }
}

impl Resource for PackedVm {
    type DynamicType = ();
    type Scope = NamespaceResourceScope;

    fn kind((): &()) -> Cow<'_, str> {
        VirtualMachine::kind(&())
    }

    fn group((): &()) -> Cow<'_, str> {
        VirtualMachine::group(&())
    }

    fn version((): &()) -> Cow<'_, str> {
        VirtualMachine::version(&())
    }

    fn plural((): &()) -> Cow<'_, str> {
        VirtualMachine::plural(&())
    }

    fn meta(&self) -> &ObjectMeta {
        &self.meta
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.meta
    }
}

/// A VM's namespace and name.
pub type VmName = (Box<str>, Box<str>);

/// A received object, and the VM to which it belongs.
pub struct Arrived {
    /// The VM. The name is empty for a claim or a report that names no VM, and for a Pod that names none but mounts claims.
    pub vm: Option<VmName>,
    /// The object.
    pub object: Packed,
}

impl<const META: bool> Sent<META> {
    /// Its UID.
    pub fn uid(&self) -> &str {
        &self.wire.metadata.uid
    }

    /// Keeps what decisions need: the metadata, and `spec` and `status` of Pods and claims.
    pub fn pack(self, kind: &TypeMeta, shapes: &Shapes) -> Arrived {
        let Wire { metadata, spec, status } = self.wire;
        let key =
            ObjectKey { api_version: kind.api_version.clone(), kind: kind.kind.clone(), name: metadata.name.clone() };
        let content = |part: Option<Box<RawValue>>| part.filter(|_| key.needs_content());
        let claims =
            spec.as_ref().filter(|_| key.is_pod()).map(|spec| written_claims(&key.name, spec)).unwrap_or_default();
        let origin = origin(metadata.creation_timestamp, metadata.managed_fields.iter().map(Fields::entry));
        let is_kept = !claims.is_empty() || key.is_claim() || key.is_report();
        let vm = vm_of(&metadata, &key, origin).or_else(|| is_kept.then(String::new));
        let vm = vm.map(|vm| (metadata.namespace.as_str().into(), vm.into()));
        let maker = maker(&metadata.owner_references);
        let owner_vm = owning_vm(&metadata.owner_references).map(str::to_owned);
        let owners: Vec<String> = metadata.owner_references.into_iter().map(|owner| owner.uid).collect();
        let fields = |operation: &str| {
            let ours = metadata.managed_fields.iter().find(|entry| {
                entry.manager == OBJECT_MANAGER && entry.operation == operation && entry.subresource.is_empty()
            });
            let ours = ours.and_then(|entry| entry.fields_v1.as_ref())?;
            let marked = own_fields(ours, &metadata.managed_fields);
            Some(shapes.keep(marked.as_deref().unwrap_or(ours.get()), &owners))
        };
        let (owned, patched) = (fields("Apply"), fields("Update"));
        let entries: &[Fields] = if key.is_claim() { &metadata.managed_fields } else { &[] };
        let size_applier = size_applier(entries, &metadata.annotations);
        let rest: Rest<_, Option<Box<RawValue>>> = (
            metadata.creation_timestamp,
            metadata.deletion_timestamp,
            metadata.deletion_grace_period_seconds,
            owners,
            owner_vm,
            origin,
            maker,
            metadata.labels,
            metadata.annotations,
            size_applier,
            content(spec),
            content(status),
        );
        // Maps of strings and JSON can always be written.
        let rest = serde_json::to_string(&rest).unwrap_or_default().into();
        let version = metadata.resource_version.parse().unwrap_or_default();
        Arrived { vm, object: Packed { key, uid: metadata.uid.into(), version, claims, owned, patched, rest } }
    }
}

fn size_applier(entries: &[Fields], annotations: &BTreeMap<String, String>) -> Option<String> {
    let sets = entries.iter().filter(|entry| entry.manager != OBJECT_MANAGER).filter_map(|entry| {
        let fields: Value = serde_json::from_str(entry.fields_v1.as_ref()?.get()).ok()?;
        Some((entry, fields))
    });
    let sets: Vec<_> = sets.collect();
    let writers =
        sets.iter().map(|(entry, fields)| Writer { manager: &entry.manager, operation: &entry.operation, fields });
    ownership::size_applier(writers, annotations)
}

/// The manager's field set with what other clients own of it, if there are others ([`ownership::mark_parts`]).
fn own_fields(ours: &RawValue, entries: &[Fields]) -> Option<String> {
    let others = entries.iter().filter(|entry| entry.manager != OBJECT_MANAGER && entry.subresource.is_empty());
    let others: Vec<Value> =
        others.filter_map(|entry| serde_json::from_str(entry.fields_v1.as_ref()?.get()).ok()).collect();
    if others.is_empty() {
        return None;
    }
    let mut ours: Value = serde_json::from_str(ours.get()).ok()?;
    for theirs in &others {
        ownership::mark_parts(&mut ours, theirs);
    }
    Some(ours.to_string())
}

/// The name of the VM to which an object may belong: of a Pod that the manager made, the VM that it gave the Pod as owner, the VM in the label that
/// it gave the Pod, or the Pod's own name. Of anything else the owner, or the labels. [`Object::whose`] decides whether it does.
fn vm_of(metadata: &WireMeta, key: &ObjectKey, origin: Origin) -> Option<String> {
    let is_labelled = metadata.labels.get("app.kubernetes.io/name").is_some_and(|name| name == APP_NAME);
    let labelled = || named_vm(&metadata.annotations, &metadata.labels).filter(|_| is_labelled).cloned();
    if let Some(noted) = key.is_claim().then(|| noted_vm(metadata)).flatten() {
        return Some(noted);
    }
    let owner = owning_vm(&metadata.owner_references).map(str::to_owned);
    if !key.is_pod() || origin != Origin::Manager {
        return owner.or_else(labelled);
    }
    let is_ours = |entry: &&Fields| entry.manager == OBJECT_MANAGER && entry.subresource.is_empty();
    let given = || metadata.managed_fields.iter().filter(is_ours).map(|entry| entry.entry().fields);
    let mut owners = metadata.owner_references.clone();
    owners.retain(|owner| given().any(|fields| has_owner(fields, &owner.uid)));
    let has_label = || given().any(|fields| has_name(fields, INSTANCE_LABEL));
    let by_label = || metadata.labels.get(INSTANCE_LABEL).filter(|_| has_label()).cloned();
    owning_vm(&owners).map(str::to_owned).or_else(by_label).or_else(|| Some(key.name.clone()))
}

/// The name of the VM to which a claim belongs, if the manager has applied the note that says so and nobody has changed it.
fn noted_vm(metadata: &WireMeta) -> Option<String> {
    let (name, _) = belongs_to(&metadata.annotations)?;
    let field = format!("\"f:{BELONGS_TO_ANNOTATION}\"");
    let is_ours = metadata.managed_fields.iter().any(|entry| {
        entry.manager == OBJECT_MANAGER
            && entry.operation == "Apply"
            && entry.fields_v1.as_ref().is_some_and(|fields| fields.get().contains(&field))
    });
    is_ours.then(|| name.to_owned())
}

/// The claims that a Pod mounts and can write to.
fn written_claims(pod: &str, spec: &RawValue) -> Box<[Box<str>]> {
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct Spec {
        volumes: Vec<Volume>,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Volume {
        name: Box<str>,
        persistent_volume_claim: Option<Claim>,
        ephemeral: Option<IgnoredAny>,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Claim {
        claim_name: Box<str>,
        #[serde(default)]
        read_only: bool,
    }
    let spec: Spec = serde_json::from_str(spec.get()).unwrap_or_default();
    let claims = spec.volumes.into_iter().filter_map(|volume| match volume.persistent_volume_claim {
        Some(claim) => Some(claim.claim_name).filter(|_| !claim.read_only),
        None => volume.ephemeral.map(|_| ephemeral_claim(pod, &volume.name).into()),
    });
    claims.collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_ephemeral_volume_is_a_claim_that_its_pod_writes_to() {
        let spec = r#"{"volumes":[{"name":"a","persistentVolumeClaim":{"claimName":"x"}},{"name":"b","persistentVolumeClaim":
            {"claimName":"y","readOnly":true}},{"name":"core-disk","ephemeral":{"volumeClaimTemplate":{}}},{"name":"c","emptyDir":{}}]}"#;
        let spec = RawValue::from_string(spec.into()).unwrap();
        assert_eq!(*written_claims("apple", &spec), ["x".into(), "apple-core-disk".into()]);
    }

    fn pod(uid: &str) -> Value {
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "name": "pear", "namespace": "orchard", "uid": "u-1", "resourceVersion": "17",
                "creationTimestamp": "2027-01-15T07:00:00Z", "deletionTimestamp": "2027-01-15T07:00:09Z",
                "deletionGracePeriodSeconds": 9,
                "labels": { "l": "\"\u{2028}\n\0", "app.kubernetes.io/name": APP_NAME, INSTANCE_LABEL: "pear" }, "annotations": { "a": "" },
                "ownerReferences": [{ "apiVersion": "v1", "kind": "X", "name": "x", "uid": uid }],
                "managedFields": [
                    { "manager": "somebody", "operation": "Apply", "fieldsV1": { "f:spec": {} } },
                    { "manager": "vm-operator", "operation": "Apply", "fieldsV1": { "f:metadata": {
                        "f:ownerReferences": { format!("k:{{\"uid\":\"{uid}\"}}"): {} },
                    } } },
                    { "manager": "vm-operator", "operation": "Update", "fieldsV1": { "f:spec": { "f:x": {} } } },
                    { "manager": "vm-operator", "operation": "Update", "subresource": "status", "fieldsV1": {} },
                ],
            },
            "spec": { "nodeName": "n" }, "status": { "phase": "Running", "podIPs": [{ "ip": "10.0.0.1" }] },
        })
    }

    fn arrive(value: &Value, shapes: &Shapes) -> Arrived {
        let kind = TypeMeta { api_version: "v1".into(), kind: "Pod".into() };
        serde_json::from_str::<Whole>(&value.to_string()).unwrap().pack(&kind, shapes)
    }

    #[test]
    fn what_is_kept_is_what_a_trimmed_object_has() {
        let value = pod("owner-1");
        let dynamic: DynamicObject = serde_json::from_value(value.clone()).unwrap();
        let trimmed = Object::trim(&dynamic.types.clone().unwrap(), dynamic);
        let arrived = arrive(&value, &Shapes::default());
        assert_eq!(arrived.vm, Some(("orchard".into(), "pear".into())));
        assert_eq!(arrived.object.unpack(), trimmed);
    }

    #[test]
    fn a_pod_of_the_manager_is_kept_under_the_vm_that_the_manager_gave_it() {
        let mut value = pod("pear-uid");
        value["metadata"]["name"] = json!("x");
        let vm = |name: &str, uid: &str| json!({ "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine", "name": name, "uid": uid });
        value["metadata"]["ownerReferences"] = json!([vm("apple", "apple-uid"), vm("pear", "pear-uid")]);
        value["metadata"]["managedFields"][1]["fieldsV1"]["f:spec"] = json!({ "f:x": {} });
        let arrived = |value: &Value| arrive(value, &Shapes::default()).vm.unwrap().1;
        assert_eq!(arrived(&value).as_ref(), "pear");
        // Entries that are older than the Pod prove nothing.
        value["metadata"]["managedFields"][1]["time"] = json!("2027-01-14T07:00:00Z");
        assert_eq!(arrived(&value).as_ref(), "apple");
    }

    #[test]
    fn a_packed_vm_is_the_same() {
        let vm = json!({
            "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine",
            "metadata": {
                "name": "pear", "namespace": "n", "uid": "u", "resourceVersion": "1", "generation": 3,
                "managedFields": [
                    { "manager": "me", "fieldsV1": { "f:spec": {} } },
                    { "manager": STATUS_MANAGER, "operation": "Apply", "subresource": "status", "fieldsV1": { "f:status": { "f:phase": {} } } },
                ],
            },
            "spec": { "vm": { "maximumCpus": 2, "maximumRam": "1Gi" } },
        });
        let vm: VirtualMachine = serde_json::from_value(vm).unwrap();
        let received: PackedVm = serde_json::from_value(json!(vm)).unwrap();
        let mut trimmed = vm.clone();
        ownership::trim(&mut trimmed);
        for (packed, vm) in [(PackedVm::from(vm.clone()), trimmed), (received, vm.clone())] {
            let named = [&packed.meta.name, &packed.meta.namespace, &packed.meta.uid, &packed.meta.resource_version];
            assert_eq!(named.map(Option::as_deref), [Some("pear"), Some("n"), Some("u"), Some("1")]);
            assert_eq!(json!(packed.read().unwrap()), json!(vm));
        }
        // What the manager has applied is kept once for all VMs.
        let shapes = Shapes::default();
        let kept = [(); 2].map(|()| serde_json::from_value::<PackedVm>(json!(vm)).unwrap().trim(&shapes).unwrap());
        let [one, other] = kept.map(|it| (it.text.contains("f:phase"), it.applied.unwrap()));
        assert!(!one.0 && !other.0 && Arc::ptr_eq(&one.1, &other.1));
    }

    #[test]
    fn a_packed_vm_knows_what_it_may_use() {
        let claim = |name: &str, unused: bool| json!({ "name": name, "uid": format!("{name}-uid"), "unused": unused });
        let vm = json!({
            "metadata": { "name": "pear", "namespace": "n", "uid": "u", "annotations": { "a": "old" } },
            "spec": { "vm": { "maximumCpus": 2, "maximumRam": "1Gi" } },
            "status": { "podUid": "pod-1", "reporterUid": "pod-2", "claims": [claim("data", false), claim("old", true)] },
        });
        let received: PackedVm = serde_json::from_value(vm).unwrap();
        let kept = received.trim(&Shapes::default()).unwrap();
        for used in ["pod-1", "pod-2", "data", "data-uid"] {
            assert!(received.may_use(&Used::of(used)) && kept.may_use(&Used::of(used)), "{used}");
        }
        // As long as it was not read, whatever occurs in it may be meant.
        assert!(received.may_use(&Used::of("old")) && !received.may_use(&Used::of("other")));
        for other in ["old", "old-uid", "pear", "", "other"] {
            assert!(!kept.may_use(&Used::of(other)), "{other}");
        }
    }

    #[test]
    fn a_spec_that_can_not_be_read_is_kept_as_it_is() {
        let spec = json!({ "vm": { "maximumCpus": "many", "state": "Running" }, "unknown": { "a": [1.0] } });
        let vm = json!({ "metadata": { "name": "pear", "managedFields": [{ "manager": "me", "fieldsV1": { "f:spec": {} } }] }, "spec": spec });
        let arrived: PackedVm = serde_json::from_value(vm).unwrap();
        let kept = arrived.trim(&Shapes::default()).unwrap();
        assert_eq!(
            kept.text.as_ref(),
            format!(
                r#"{{"metadata":{{"managedFields":[{{"fieldsV1":{{"f:spec":{{}}}},"manager":"me"}}],"name":"pear"}},"spec":{spec},"status":null}}"#
            )
        );
        let invalid = |packed: &PackedVm| packed.read().unwrap().spec.invalid.unwrap().message;
        assert_eq!(invalid(&kept), r#"spec.vm.maximumCpus: invalid type: string "many", expected u32"#);
        assert_eq!(invalid(&kept), invalid(&arrived));
    }

    #[test]
    fn the_same_fields_are_kept_once_and_each_owner_has_its_own() {
        let shapes = Shapes::default();
        let [one, other] = ["owner-1", "owner-2"].map(|uid| arrive(&pod(uid), &shapes).object);
        assert!(Arc::ptr_eq(one.owned.as_ref().unwrap(), other.owned.as_ref().unwrap()));
        assert_ne!(one.unpack().owned, other.unpack().owned);
        assert!(!one.is_same(&Packed { version: 18, ..other }));
        assert!(one.is_same(&Packed { version: 18, ..one.clone() }));
    }
}
