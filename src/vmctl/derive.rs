//! Which VM is derived from a prototype for a Pod, or why none is. Pure.
//!
//! | of the prototype | the derived VM |
//! |---|---|
//! | `spec` | the same, but for the fields below |
//! | `spec.vm.state` | `Running` |
//! | `spec.vm.machineUuid`, MAC addresses, `instance-id` and `local-hostname` of cloud-init | without: each VM has its own |
//! | `spec.vm.resetCount`, `rebootCount`, `paused` | without: these are orders to one guest |
//! | `spec.nodeName` | without |
//! | `spec.affinity` | the node of the Pod, by the node's name, and what the prototype says besides |
//! | labels | those that a VM's Pod gets too ([`TOOL_LABELS`] are not), and [`PROTOTYPE_LABEL`] |
//! | annotations | none but those that say of which prototype and Pod it is |

use std::collections::BTreeMap;

use kube::{Resource, ResourceExt, core::DynamicObject};
use serde_json::{Map, Value, json};

use crate::{
    api::{self, VirtualMachine},
    object::PROTOTYPE_ANNOTATION,
    render::{context::TOOL_LABELS, output::digest},
};

/// The label of derived VMs, and so of their Pods: the name of the prototype.
pub const PROTOTYPE_LABEL: &str = "vmoperator.jdrupes.org/prototype";
/// The annotation with the Pod of a derived VM: `NAMESPACE/NAME`.
pub const POD_ANNOTATION: &str = "vmoperator.jdrupes.org/vmctl-pod";
/// The annotation with the UID of that Pod. A VM is only this Pod's.
pub const POD_UID_ANNOTATION: &str = "vmoperator.jdrupes.org/vmctl-pod-uid";

/// The longest name of a VM, which is also a label's value and a host name.
const LONGEST_NAME: usize = 63;
/// How much of a name that is too long is kept, before a `-` and the digits of a hash.
const KEPT: usize = 54;
/// How many hexadecimal digits of a hash a shortened name has.
const DIGITS: usize = 8;
/// How long the VM's Pod may take to end after the guest's time is over, in seconds (templates/pod.yaml.j2).
const POD_ENDS: u64 = 15;

/// The Pod in which vmctl runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodFacts {
    /// Its name.
    pub name: String,
    /// Its UID.
    pub uid: String,
    /// Its namespace.
    pub namespace: String,
    /// The name of its node.
    pub node: String,
}

impl PodFacts {
    /// `NAMESPACE/NAME`.
    pub fn full_name(&self) -> String {
        api::full_name(Some(&self.namespace), &self.name)
    }
}

/// What is known of the Pod's object. All of it may be unknown, because vmctl need not be allowed to read Pods.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodObject {
    /// The kind of the object that controls it, such as `ReplicaSet`.
    pub controller: Option<String>,
    /// The time in seconds that its containers have after SIGTERM.
    pub grace: Option<u64>,
    /// There is no such Pod.
    pub is_missing: bool,
}

/// What becomes of the disks of a derived VM when the VM is deleted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Disks {
    /// They are kept for the next VM of this name. That makes sense in a StatefulSet, whose Pods have the same names again.
    #[default]
    Keep,
    /// They are deleted with it.
    Ephemeral,
}

/// How a VM is derived.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    /// The namespace of the derived VM.
    pub namespace: String,
    /// What becomes of its disks.
    pub disks: Disks,
    /// Keep disks also if no later Pod has the same name, and accept claims that templates fix.
    pub force: bool,
}

/// A VM to apply.
#[derive(Clone, Debug, PartialEq)]
pub struct Derived {
    /// Its manifest.
    pub manifest: Value,
    /// What may surprise its owner, for the log.
    pub warnings: Vec<String>,
}

/// Why no VM is derived.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the texts say what they are")]
pub enum NotDerived {
    #[error(
        "there is no Pod {pod} with the UID {uid}, so Kubernetes would delete its VM at once: either that Pod was deleted, or the name, UID or \
         namespace that this program was told is wrong; to run it outside a Pod, give it a namespace that does not exist (--pod-namespace)"
    )]
    NoPod { pod: String, uid: String },
    #[error("the prototype {prototype} has no spec.vm")]
    NoMachine { prototype: String },
    #[error(
        "the prototype {prototype} names a volume (spec.vm.disks[{disk}].volumeClaimTemplate.spec.volumeName: {volume}), which only one VM \
         can have: remove the field"
    )]
    Volume { prototype: String, disk: usize, volume: String },
    #[error(
        "the prototype {prototype} has a disk with the access mode ReadWriteMany (spec.vm.disks[{disk}].volumeClaimTemplate.spec.accessModes), \
         as if several VMs wrote to it, which would destroy its file system: use ReadWriteOnce; each derived VM has a disk of its own"
    )]
    SharedDisk { prototype: String, disk: usize },
    #[error(
        "a {controller} gives each of its Pods a new name, so the disks of each VM would be left behind, and no later VM would use them: \
         --disks ephemeral deletes them with the VM; a StatefulSet keeps them for the next Pod of the name; --force leaves them behind"
    )]
    DisksLeftBehind { controller: String },
    #[error(
        "the Pod of vm {vm} may write to the claim {claim}, which is no disk of that VM alone: a template names it, so all derived VMs would \
         write to it; mount it readOnly, or let its name begin with that of the VM; --force accepts it, for a file system that is made to be \
         shared"
    )]
    FixedClaim { vm: String, claim: String },
}

/// The name of the VM that is derived for a Pod: `PROTOTYPE-POD`. If that is too long or has a dot, it is shortened, without dots, and ends
/// with digits of a hash of both names with their namespaces.
pub fn name(prototype_namespace: &str, prototype: &str, pod: &PodFacts) -> String {
    let full = format!("{prototype}-{}", pod.name);
    // A VM's name is that of Services too, which have no dots.
    if full.len() <= LONGEST_NAME && !full.contains('.') {
        return full;
    }
    let hash = digest(&format!("{prototype_namespace}/{prototype}/{}/{}", pod.namespace, pod.name));
    let kept: String = full.replace('.', "-").chars().take(KEPT).collect();
    format!("{}-{}", kept.trim_end_matches('-'), hash.get(..DIGITS).unwrap_or(&hash))
}

/// The VM that is derived from a prototype for a Pod.
///
/// The prototype is taken as it is stored, so that fields that this version does not know are kept.
///
/// # Errors
/// What of the prototype, or of the order, would share or lose a disk, or that the VM would have no Pod.
pub fn derive(
    prototype: &DynamicObject,
    pod: &PodFacts,
    object: &PodObject,
    order: &Order,
) -> Result<Derived, NotDerived> {
    let prototype_namespace = prototype.namespace().unwrap_or_default();
    let full_name = api::full_name(Some(&prototype_namespace), &prototype.name_any());
    let mut spec = prototype.data.get("spec").cloned().unwrap_or_default();
    if !spec["vm"].is_object() {
        return Err(NotDerived::NoMachine { prototype: full_name });
    }
    if object.is_missing && pod.namespace == order.namespace {
        return Err(NotDerived::NoPod { pod: pod.full_name(), uid: pod.uid.clone() });
    }
    check_disks(&spec, &full_name)?;
    if let Some(controller) = object.controller.as_ref().filter(|kind| *kind != "StatefulSet")
        && order.disks == Disks::Keep
        && !order.force
    {
        return Err(NotDerived::DisksLeftBehind { controller: controller.clone() });
    }
    let warnings = warnings(&spec, &prototype_namespace, pod, object, order);
    make_own(&mut spec);
    bind_to_node(&mut spec, &pod.node);

    let mut metadata = json!({
        "name": name(&prototype_namespace, &prototype.name_any(), pod),
        "namespace": order.namespace,
        "labels": labels(prototype),
        "annotations": {
            PROTOTYPE_ANNOTATION: full_name,
            POD_ANNOTATION: pod.full_name(),
            POD_UID_ANNOTATION: pod.uid,
        },
    });
    // The garbage collector deletes an object whose owner is in another namespace: it looks for the owner in the object's.
    if pod.namespace == order.namespace {
        metadata["ownerReferences"] = json!([{ "apiVersion": "v1", "kind": "Pod", "name": pod.name, "uid": pod.uid }]);
    }
    let (api_version, kind) = (VirtualMachine::api_version(&()), VirtualMachine::kind(&()));
    let manifest = json!({ "apiVersion": api_version, "kind": kind, "metadata": metadata, "spec": spec });
    Ok(Derived { manifest, warnings })
}

/// Refuses disks that are another VM's too. Claims that templates fix are seen when the VM has a Pod: `standing::fixed_claim`.
fn check_disks(spec: &Value, prototype: &str) -> Result<(), NotDerived> {
    let disks = spec["vm"]["disks"].as_array().map(Vec::as_slice).unwrap_or_default();
    for (disk, claim) in disks.iter().map(|disk| &disk["volumeClaimTemplate"]["spec"]).enumerate() {
        let prototype = prototype.to_owned();
        if let Some(volume) = claim["volumeName"].as_str().filter(|volume| !volume.is_empty()) {
            return Err(NotDerived::Volume { prototype, disk, volume: volume.to_owned() });
        }
        let modes = claim["accessModes"].as_array().map(Vec::as_slice).unwrap_or_default();
        if modes.iter().any(|mode| mode == "ReadWriteMany") {
            return Err(NotDerived::SharedDisk { prototype, disk });
        }
    }
    Ok(())
}

fn warnings(spec: &Value, prototype_namespace: &str, pod: &PodFacts, object: &PodObject, order: &Order) -> Vec<String> {
    let mut warnings = vec![];
    if pod.namespace != order.namespace {
        warnings.push(format!(
            "the VM is in the namespace {} and this Pod in {}, so Kubernetes can't delete the VM with the Pod: it is deleted when this program \
             gets SIGTERM; after a kill, another vmctl of this prototype in the namespace {} deletes it within a minute",
            order.namespace, pod.namespace, pod.namespace
        ));
    }
    let guest = spec["vm"]["powerdownTimeout"].as_u64().unwrap_or(900);
    if let Some(grace) = object.grace.filter(|grace| *grace < guest.saturating_add(POD_ENDS)) {
        warnings.push(format!(
            "this Pod has {grace} s to end (terminationGracePeriodSeconds), and the guest {guest} s to shut down (spec.vm.powerdownTimeout): this \
             program may be killed before the guest is down, and its next Pod then waits for it; give the Pod {} s or more",
            guest.saturating_add(POD_ENDS)
        ));
    }
    let sources = ["userDataFrom", "networkConfigFrom"].map(|from| &spec["cloudInit"][from]);
    if prototype_namespace != order.namespace && sources.iter().any(|from| from.is_object()) {
        warnings.push(format!(
            "cloud-init's data is in an object of the prototype's namespace {prototype_namespace}: one of the same name must be in the namespace {}",
            order.namespace
        ));
    }
    if spec["pools"].as_array().is_some_and(|pools| !pools.is_empty()) {
        warnings.push("the prototype is in a pool, so each derived VM is, too: it may be assigned to a user".into());
    }
    warnings
}

/// Removes what must not be the same in two VMs, and orders that were meant for the guest of the prototype.
fn make_own(spec: &mut Value) {
    let remove = |object: &mut Value, fields: &[&str]| {
        if let Some(object) = object.as_object_mut() {
            fields.iter().for_each(|field| drop(object.remove(*field)));
        }
    };
    remove(spec, &["nodeName"]);
    let vm = &mut spec["vm"];
    vm["state"] = json!("Running");
    remove(vm, &["machineUuid", "resetCount", "rebootCount", "paused"]);
    for network in vm.get_mut("networks").and_then(Value::as_array_mut).into_iter().flatten() {
        network.as_object_mut().into_iter().flatten().for_each(|(_, of_type)| remove(of_type, &["mac"]));
    }
    if let Some(meta_data) = spec.get_mut("cloudInit").and_then(|data| data.get_mut("metaData")) {
        remove(meta_data, &["instance-id", "local-hostname"]);
    }
}

/// Requires the node, beside what the prototype requires. Each term is an alternative, so it is in each of them. A term without conditions is
/// no node's (<https://kubernetes.io/docs/concepts/scheduling-eviction/assign-pod-node/#node-affinity>), and stays so.
fn bind_to_node(spec: &mut Value, node: &str) {
    const REQUIRED: &str = "requiredDuringSchedulingIgnoredDuringExecution";
    let is_node = json!({ "key": "metadata.name", "operator": "In", "values": [node] });
    let required = object_at(object_at(object_at(spec, "affinity"), "nodeAffinity"), REQUIRED);
    let terms = match &mut required["nodeSelectorTerms"] {
        Value::Array(terms) if !terms.is_empty() => terms,
        terms => {
            *terms = json!([{ "matchFields": [is_node] }]);
            return;
        }
    };
    let has = |term: &Value, field: &str| term[field].as_array().is_some_and(|conditions| !conditions.is_empty());
    for term in terms.iter_mut().filter(|term| has(term, "matchExpressions") || has(term, "matchFields")) {
        match term.get_mut("matchFields") {
            Some(Value::Array(fields)) => fields.push(is_node.clone()),
            _ => term["matchFields"] = json!([is_node]),
        }
    }
}

/// The field as a map, which it becomes if it is missing or null.
fn object_at<'a>(value: &'a mut Value, field: &str) -> &'a mut Value {
    if !value.is_object() {
        *value = Value::Object(Map::new());
    }
    let value = &mut value[field];
    if !value.is_object() {
        *value = Value::Object(Map::new());
    }
    value
}

fn labels(prototype: &DynamicObject) -> BTreeMap<String, String> {
    let is_for_tool = |label: &str| TOOL_LABELS.iter().any(|prefix| label.starts_with(prefix));
    let own = prototype.labels().iter().filter(|(label, _)| !is_for_tool(label));
    let marked = [(PROTOTYPE_LABEL.to_owned(), prototype.name_any())];
    own.map(|(label, value)| (label.clone(), value.clone())).chain(marked).collect()
}

#[cfg(test)]
mod tests;
