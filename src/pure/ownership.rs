//! Which client owns which field of an object, by `metadata.managedFields`
//! (<https://kubernetes.io/docs/reference/using-api/server-side-apply/#field-management>).
//!
//! | field manager | the fields that it applies |
//! |---|---|
//! | [`OBJECT_MANAGER`] | all rendered objects |
//! | [`STATUS_MANAGER`] | the manager's part of a VM's status |
//! | [`REPAIR_MANAGER`] | a status with values that can't be applied; the manager replaces it |
//! | [`POOL_MANAGER`] | assignments that end, and starts for assignments that others have not finished |
//! | [`MEMBER_MANAGER`] | the VMs of pools with a template |
//! | [`RUNNER_MANAGER`] | the runner's part of a VM's status, where a runner writes it that knows no reports |
//! | [`COMMAND_MANAGER`] | changes that a person makes with `kubectl vm` |
//! | [`WEB_MANAGER`] | changes that a person makes in the web interface |
//!
//! A tool may reset the entries
//! (<https://kubernetes.io/docs/reference/using-api/server-side-apply/#clearing-managedfields>), and then the API server records no change by
//! an update until something is applied; a backup brings an object back with entries of its own tool, or with those of the former object, which are
//! older than it ([`is_of_object`]). What asks the entries does this then:
//!
//! | what asks | without entries |
//! |---|---|
//! | who sets `spec.vm.state` ([`setter`]) | a state that the spec has is obeyed ([`crate::api::stored`]); one that it does not have nobody sets, and the VM keeps its power |
//! | who applies a field of the VM ([`applier`]), or syncs the size of a claim ([`size_applier`]) | nobody is named, and nothing is refused because of it |
//! | which of the status is the manager's ([`status_differs`], [`is_said_by_runner`]) | the manager applies its part once more; from then on the API server records changes of the VM |
//! | whether a rendered object is as the manager applied it ([`owns_all_of`]) | it is not, and is applied once more |
//! | which pool made a VM ([`is_made_by_pool`]) | none: the pool leaves the VM alone, and its Pod has no label of the pool |
//! | which program made an object ([`origin`]) | nobody can say: its owner decides whose it is, and labels do not |

mod reserved;

use std::collections::BTreeMap;

use k8s_openapi::{
    apimachinery::pkg::apis::meta::v1::{Condition, FieldsV1, ManagedFieldsEntry, Time},
    jiff::{SignedDuration, Timestamp},
};
use kube::{
    ResourceExt,
    core::{ObjectMeta, Status},
};
use serde_json::{Map, Value, json};

pub use self::reserved::{is_operators_name, reserved};
use crate::{
    answers,
    api::{VirtualMachine, VirtualMachineStatus, conditions},
};

pub mod origin;

/// The field manager of all rendered objects.
pub const OBJECT_MANAGER: &str = "vm-operator";
/// The field manager of the manager's part of the status.
pub const STATUS_MANAGER: &str = "vm-operator-status";
/// The field manager of a status from which the manager removes values that the definition does not allow.
pub const REPAIR_MANAGER: &str = "vm-operator-repair";
/// The field manager of what the manager writes for pools. It updates fields, and does not apply them again.
pub const POOL_MANAGER: &str = "vm-operator-pools";
/// The field manager of the VMs that the manager makes for pools with a template. It never applies `spec.vm.state`.
pub const MEMBER_MANAGER: &str = "vm-operator-members";
/// The field manager of the runner's part of the status, where a runner writes it that knows no reports.
pub const RUNNER_MANAGER: &str = "vm-runner";
/// The field manager of the commands of `kubectl vm`. Unlike Git, they do not apply a field again.
pub const COMMAND_MANAGER: &str = "vm-operator-cli";
/// The field manager of the web interface.
pub const WEB_MANAGER: &str = "vm-operator-web";

/// The annotation in which a client-side apply keeps what it applied
/// (<https://kubernetes.io/docs/reference/labels-annotations-taints/#kubectl-kubernetes-io-last-applied-configuration>).
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

/// The conditions whose observedGeneration is that of the guest's spec, see [`VirtualMachineStatus::guest_generation`].
pub const OF_GUEST: [&str; 2] = [conditions::RUNNING, conditions::BOOTED];

/// Who sets `spec.vm.state`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setter {
    /// No client: the value is the CRD's default.
    Nobody,
    /// A client set it once.
    Somebody,
    /// A client writes it again and again, as a GitOps tool does.
    Applier,
}

/// Marks in a field set the maps of which only a part is owned, because `theirs`, the set of another client, has fields below them.
///
/// A map without fields below it stands for the whole map where its schema says so (`x-kubernetes-map-type: atomic`). Where the schema
/// allows anything, it stands for a map whose fields were all taken over by others. Only their sets tell the two apart.
pub fn mark_parts(owned: &mut Value, theirs: &Value) {
    let (Value::Object(owned), Value::Object(theirs)) = (owned, theirs) else { return };
    for (name, below) in theirs.iter().filter(|(name, below)| *name != SELF && *below != &json!({})) {
        match owned.get_mut(name) {
            Some(Value::Object(ours)) if ours.is_empty() => drop(ours.insert(SELF.into(), json!({}))),
            Some(ours) => mark_parts(ours, below),
            None => {}
        }
    }
}

/// Whether the field set `owned` contains every leaf of an object.
pub fn owns_all_of(owned: &Value, object: &Value) -> bool {
    covers(owned, object, &["apiVersion", "kind"], 0)
}

/// The field managers of tools that write what is in Git by updates instead of applies, and write it again when it differs: Helm, Flux's
/// helm-controller with drift detection, and Argo CD with `Replace=true`.
const UPDATERS: [&str; 4] = ["helm", "helm-controller", "argocd-controller", "argocd-application-controller"];

/// A client's entry in `metadata.managedFields`.
#[derive(Clone, Copy)]
pub struct Writer<'a> {
    /// Its field manager.
    pub manager: &'a str,
    /// `Apply` or `Update`.
    pub operation: &'a str,
    /// Its field set.
    pub fields: &'a Value,
}

impl<'a> From<&'a ManagedFieldsEntry> for Writer<'a> {
    fn from(entry: &'a ManagedFieldsEntry) -> Self {
        Self {
            manager: entry.manager.as_deref().unwrap_or_default(),
            operation: entry.operation.as_deref().unwrap_or_default(),
            fields: entry.fields_v1.as_ref().map_or(&Value::Null, |fields| &fields.0),
        }
    }
}

impl Writer<'_> {
    fn has(&self, path: &[&str]) -> bool {
        path.iter().try_fold(self.fields, |fields, name| fields.get(format!("f:{name}"))).is_some()
    }

    fn is_client_side_apply(&self) -> bool {
        self.operation != "Apply" && self.has(&["metadata", "annotations", LAST_APPLIED])
    }

    /// Whether the client writes the field again and again: by applies, or as one of the [`UPDATERS`]. `last` is what was applied last on the
    /// client's side ([`LAST_APPLIED`]): such a client writes only what is in there.
    fn repeats(&self, path: &[&str], last: Option<&Value>) -> bool {
        if [COMMAND_MANAGER, WEB_MANAGER].contains(&self.manager) {
            return false;
        }
        match last.filter(|_| self.is_client_side_apply()) {
            Some(last) => path.iter().try_fold(last, |value, name| value.get(name)).is_some(),
            None => (self.operation == "Apply" || UPDATERS.contains(&self.manager)) && self.has(path),
        }
    }
}

/// What a client-side apply has applied last.
fn last_applied(annotation: Option<&String>) -> Option<Value> {
    serde_json::from_str(annotation?).ok()
}

/// The field manager of a tool that syncs the size of a claim with Git. `annotations` are those of the claim.
pub fn size_applier<'a>(
    writers: impl IntoIterator<Item = Writer<'a>>,
    annotations: &BTreeMap<String, String>,
) -> Option<String> {
    let last = last_applied(annotations.get(LAST_APPLIED));
    let size = ["spec", "resources", "requests", "storage"];
    let is_tool = |writer: &Writer<'_>| UPDATERS.contains(&writer.manager) || GITOPS_MANAGERS.contains(&writer.manager);
    let mut tools = writers.into_iter().filter(|writer| is_tool(writer) && writer.repeats(&size, last.as_ref()));
    tools.next().map(|tool| tool.manager.to_owned())
}

/// Who sets `spec.vm.state` of a VM, after [`trim`].
pub fn setter(vm: &VirtualMachine) -> Setter {
    let setters = vm.managed_fields().iter().filter(|entry| sets_state(entry));
    setters.fold(Setter::Nobody, |setter, entry| {
        if Writer::from(entry).repeats(&STATE, None) {
            Setter::Applier
        } else if setter == Setter::Nobody {
            Setter::Somebody
        } else {
            setter
        }
    })
}

/// A client that applies `spec.vm.state` again and again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Applier {
    /// Its field manager.
    pub manager: String,
    /// When it last changed something of the VM. The API server keeps no other time.
    pub since: Option<Time>,
    /// It is a controller that syncs with Git by itself, so it takes back soon what somebody else writes.
    pub is_gitops: bool,
}

/// The field managers of controllers that sync with Git by themselves: Argo CD
/// (<https://argo-cd.readthedocs.io/en/stable/user-guide/sync-options/#server-side-apply>), Flux, Rancher Fleet.
const GITOPS_MANAGERS: [&str; 5] =
    ["argocd-controller", "argocd-application-controller", "kustomize-controller", "helm-controller", "fleetagent"];

/// Who applies a field of a VM's `spec.vm` again and again, such as `state`; a controller rather than a person's apply. A list has one
/// owner, whoever's its items are. The VM is as the API server has it: [`trim`] removes what this needs.
pub fn applier(vm: &VirtualMachine, field: &str) -> Option<Applier> {
    let last = last_applied(vm.annotations().get(LAST_APPLIED));
    let path = ["spec", "vm", field];
    let entries = vm.managed_fields().iter().filter(|entry| Writer::from(*entry).repeats(&path, last.as_ref()));
    let appliers = entries.filter_map(|entry| {
        let manager = entry.manager.clone()?;
        let is_gitops = GITOPS_MANAGERS.contains(&manager.as_str());
        Some(Applier { manager, since: entry.time.clone(), is_gitops })
    });
    appliers.max_by_key(|applier| applier.is_gitops)
}

const STATE: [&str; 3] = ["spec", "vm", "state"];

fn sets_state(entry: &ManagedFieldsEntry) -> bool {
    Writer::from(entry).has(&STATE)
}

fn state_fields() -> Value {
    json!({ "f:spec": { "f:vm": { "f:state": {} } } })
}

/// Whether a pool has made the VM: the manager's entry for that is not older than the VM. Labels, annotations and owners can be copied, and a
/// backup tool may bring an entry back, too, into a VM that is younger.
pub fn is_made_by_pool(vm: &ObjectMeta) -> bool {
    has_applied(vm, MEMBER_MANAGER)
}

/// Whether a field manager has applied the object since it was created.
pub fn has_applied(object: &ObjectMeta, manager: &str) -> bool {
    object.managed_fields.iter().flatten().any(|entry| {
        let is_it = entry.manager.as_deref() == Some(manager) && entry.operation.as_deref() == Some("Apply");
        let written = entry.time.as_ref().map(|time| time.0);
        is_it && is_of_object(written, object.creation_timestamp.as_ref().map(|time| time.0))
    })
}

/// How long the API server works on a write at most (`requestTimeoutUpperBound`). It notes the time in `managedFields` before it calls admission
/// webhooks, and the `creationTimestamp` after that, so who creates an object may have an entry that is older than the object by this.
const LONGEST_WRITE: SignedDuration = SignedDuration::from_secs(34);

/// Whether an entry of `managedFields` that was written at a time is about the object that was created at another. Backup tools bring an object
/// back with the entries of the former one (Velero patches them into the new one): these are older than the object, and prove nothing.
pub fn is_of_object(written: Option<Timestamp>, created: Option<Timestamp>) -> bool {
    written.zip(created).is_none_or(|(written, created)| created.duration_since(written) <= LONGEST_WRITE)
}

/// Removes from a VM the field sets that no decision needs. It keeps who set `spec.vm.state`, whether a pool has made the VM, the manager's part of
/// the status, whether a runner has a part of it, and whether anything is recorded of the spec at all ([`crate::api::stored`]).
pub fn trim(vm: &mut VirtualMachine) {
    let state = || Some(FieldsV1(state_fields()));
    let last = vm.annotations_mut().remove(LAST_APPLIED);
    let last = last_applied(last.as_ref());
    let applied_state = last.map(|last| last.pointer("/spec/vm/state").is_some());
    if vm.annotations().is_empty() {
        vm.metadata.annotations = None;
    }
    let entries = vm.metadata.managed_fields.get_or_insert_default();
    let recorded = entries.iter().find(|entry| Writer::from(*entry).has(&["spec"])).cloned();
    entries.retain_mut(|entry| {
        let sets_state =
            sets_state(entry) && !(applied_state == Some(false) && Writer::from(&*entry).is_client_side_apply());
        if sets_state {
            entry.fields_v1 = state();
        }
        let is_of_runner = is_of_runner(entry);
        let is_of_pool = entry.manager.as_deref() == Some(MEMBER_MANAGER);
        if is_of_runner || is_of_pool && !sets_state {
            entry.fields_v1 = None;
        }
        sets_state
            || is_of_runner
            || is_of_pool
            || [STATUS_MANAGER, REPAIR_MANAGER].map(Some).contains(&entry.manager.as_deref())
    });
    // A client-side apply is repeated too, so its client counts as an applier.
    if applied_state == Some(true) {
        entries.push(ManagedFieldsEntry {
            manager: Some(LAST_APPLIED.into()),
            operation: Some("Apply".into()),
            fields_v1: state(),
            ..ManagedFieldsEntry::default()
        });
    }
    let is_noted = entries.iter().any(|entry| Writer::from(entry).has(&["spec"]));
    entries.extend(
        recorded
            .filter(|_| !is_noted)
            .map(|entry| ManagedFieldsEntry { fields_v1: Some(FieldsV1(json!({ "f:spec": {} }))), ..entry }),
    );
}

/// Gives the keys of a ConfigMap's `data` that a command of `kubectl vm` has written to the client that applies the ConfigMap, if there is
/// exactly one. Then the next apply of that client has no conflict, and takes away what it does not have. Returns whether there was something.
pub fn hand_over_data(entries: &mut Vec<ManagedFieldsEntry>) -> bool {
    let is_command = |entry: &ManagedFieldsEntry| entry.manager.as_deref() == Some(COMMAND_MANAGER);
    let written = entries.iter().filter(|entry| is_command(entry)).filter_map(data_fields);
    let keys: Map<String, Value> =
        written.flat_map(|fields| fields.iter().map(|(key, value)| (key.clone(), value.clone()))).collect();
    // It may have lost all its keys to the command.
    let mut appliers = entries
        .iter_mut()
        .filter(|entry| entry.operation.as_deref() == Some("Apply") && !is_command(entry))
        .filter_map(|entry| entry.fields_v1.as_mut()?.0.as_object_mut());
    let (Some(applier), None, false) = (appliers.next(), appliers.next(), keys.is_empty()) else { return false };
    if let Value::Object(all) = applier.entry("f:data").or_insert_with(|| json!({})) {
        all.extend(keys);
    }
    entries.retain_mut(|entry| {
        if is_command(entry)
            && let Some(Value::Object(fields)) = entry.fields_v1.as_mut().map(|fields| &mut fields.0)
        {
            fields.remove("f:data");
            return !fields.is_empty();
        }
        true
    });
    true
}

fn data_fields(entry: &ManagedFieldsEntry) -> Option<&Map<String, Value>> {
    entry.fields_v1.as_ref()?.0.get("f:data")?.as_object()
}

/// The field set of the status that the manager applied.
fn status_fields(vm: &VirtualMachine) -> Option<&Value> {
    vm.managed_fields()
        .iter()
        .find(|entry| entry.manager.as_deref() == Some(STATUS_MANAGER))
        .and_then(|entry| entry.fields_v1.as_ref())
        .map(|fields| &fields.0["f:status"])
}

fn is_of_runner(entry: &ManagedFieldsEntry) -> bool {
    entry.manager.as_deref() == Some(RUNNER_MANAGER)
        && entry.operation.as_deref() == Some("Apply")
        && entry.subresource.as_deref() == Some("status")
}

/// Whether a runner owns fields of the status: one that knows no reports has applied them.
pub fn has_fields_of_runner(vm: &VirtualMachine) -> bool {
    vm.managed_fields().iter().any(is_of_runner)
}

/// Whether the manager applied this field of the status.
pub fn owns_status_field(vm: &VirtualMachine, field: &str) -> bool {
    status_fields(vm).is_some_and(|fields| fields.get(format!("f:{field}")).is_some())
}

/// Whether the status has the condition as a runner has said it last: in a report, or by writing the status as runners of earlier releases do.
/// This is the only place that decides it.
pub fn is_said_by_runner(vm: &VirtualMachine, type_: &str) -> bool {
    let Some(status) = &vm.status else { return false };
    match &status.reported {
        Some(reported) => reported.iter().any(|reported| reported == type_),
        None => conditions::find(&status.conditions, type_).is_some() && !owns_condition(vm, type_),
    }
}

/// Whether the manager, not another program, wrote the stored condition last. If both wrote the same value of a field, both own that field
/// (<https://kubernetes.io/docs/reference/using-api/server-side-apply/#conflicts>). The messages always differ, so only the last writer
/// owns the message.
fn owns_condition(vm: &VirtualMachine, type_: &str) -> bool {
    let item = status_fields(vm).and_then(|fields| fields["f:conditions"].get(condition_key(type_)));
    item.is_some_and(|item| ["f:status", "f:message"].iter().all(|field| item.get(field).is_some()))
}

/// The status to apply: `wanted`, and of the conditions of others the fields that the manager still owns, as they are.
///
/// A client that replaces the whole status, as the runner of the Java VM-Operator does, becomes the owner only of the fields that it
/// changes. If the manager applied nothing of such a condition, the API server would remove the other fields (a time, for example) and
/// then refuse the rest, which lacks a required field.
///
/// Of the runner's conditions in [`OF_GUEST`] the manager applies the observedGeneration, because the runner does not know the VM's generation.
pub fn status_to_apply(vm: &VirtualMachine, wanted: &VirtualMachineStatus) -> Value {
    let mut status = json!(wanted);
    let owned = status_fields(vm).and_then(|fields| fields["f:conditions"].as_object());
    let current = vm.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    // Another program may have stored two of one type, and an apply must not have that.
    let is_first = |condition: &Condition| {
        conditions::find(current, &condition.type_).is_some_and(|first| std::ptr::eq(first, condition))
    };
    let others = current.iter().filter(|condition| {
        conditions::find(&wanted.conditions, &condition.type_).is_none()
            && !owns_condition(vm, &condition.type_)
            && is_first(condition)
    });
    let kept: Vec<Value> = others
        .filter_map(|condition| {
            let owned = owned.and_then(|owned| owned.get(&condition_key(&condition.type_)));
            let generation = wanted.guest_generation.filter(|_| OF_GUEST.contains(&condition.type_.as_str()));
            if owned.is_none() && generation.is_none() {
                return None;
            }
            let is_owned = |field: &str| owned.is_some_and(|owned| owned.get(format!("f:{field}")).is_some());
            let mut kept = json!(condition);
            kept.as_object_mut()?.retain(|field, _| field == "type" || is_owned(field));
            if let Some(generation) = generation {
                kept["observedGeneration"] = generation.into();
            }
            Some(kept)
        })
        .collect();
    if !kept.is_empty() {
        match &mut status["conditions"] {
            Value::Array(conditions) => conditions.extend(kept),
            conditions => *conditions = kept.into(),
        }
    }
    status
}

/// The status without the part that the API server's `answer` refuses, and that part. The part stays as it is stored. `None` if the answer
/// names none, or one that was taken out already.
pub fn without_refused(
    vm: &VirtualMachine,
    wanted: &VirtualMachineStatus,
    answer: &Status,
) -> Option<(String, VirtualMachineStatus)> {
    let mut status = json!(wanted);
    let fields = status.as_object_mut()?;
    let part = answers::refused_part(answer, fields.keys())?.clone();
    let stored = json!(vm.status).get(&part).cloned();
    match stored.filter(|stored| fields.get(&part) != Some(stored)) {
        Some(stored) => drop(fields.insert(part.clone(), stored)),
        None => drop(fields.remove(&part)),
    }
    Some((part, serde_json::from_value(status).ok()?))
}

/// The whole status, for a write that is no apply: `wanted` over the current one.
pub fn merged_status(current: &VirtualMachineStatus, wanted: &VirtualMachineStatus) -> Value {
    let mut merged = json!(current);
    let others = current.conditions.iter().filter(|other| conditions::find(&wanted.conditions, &other.type_).is_none());
    let all: Vec<_> = wanted.conditions.iter().chain(others).collect();
    if let (Value::Object(merged), Value::Object(wanted)) = (&mut merged, json!(wanted)) {
        merged.extend(wanted);
        merged.insert("conditions".into(), json!(all));
    }
    merged
}

/// The key of a condition in a field set.
fn condition_key(type_: &str) -> String {
    format!("k:{}", json!({ "type": type_ }))
}

/// Whether `current` contains everything in `wanted`. List items may be in any order.
fn contains(current: &Value, wanted: &Value) -> bool {
    match (current, wanted) {
        (Value::Object(current), Value::Object(wanted)) => {
            wanted.iter().all(|(name, wanted)| current.get(name).is_some_and(|current| contains(current, wanted)))
        }
        (Value::Array(current), Value::Array(wanted)) => {
            wanted.iter().all(|wanted| current.iter().any(|current| contains(current, wanted)))
        }
        (current, wanted) => current == wanted,
    }
}

/// Whether the field set `owned` has a field that `wanted` does not have. An apply without the field gives it up.
fn has_other_fields(owned: &Value, wanted: &Value) -> bool {
    owned.as_object().into_iter().flatten().any(|(field, below)| match (field.split_once(':'), wanted) {
        (Some(("f", name)), wanted) => wanted.get(name).is_none_or(|wanted| has_other_fields(below, wanted)),
        (Some(("k", key)), Value::Array(items)) => {
            let key: Value = serde_json::from_str(key).unwrap_or_default();
            items.iter().find(|item| contains(item, &key)).is_none_or(|item| has_other_fields(below, item))
        }
        _ => false,
    })
}

/// Whether the manager must write its part of the status: the API server has another one than `wanted`.
pub fn status_differs(vm: &VirtualMachine, wanted: &VirtualMachineStatus) -> bool {
    let wanted = &status_to_apply(vm, wanted);
    let current = json!(vm.status);
    // Without an entry of the manager, a tool has reset them, unless the status could only be replaced.
    let is_replaced = || vm.managed_fields().iter().any(|entry| entry.manager.as_deref() == Some(REPAIR_MANAGER));
    let differs = match status_fields(vm) {
        Some(owned) => has_other_fields(owned, wanted),
        None => !is_replaced(),
    };
    differs || !contains(&current, wanted)
}

/// In a field set: the field itself, without those below it.
const SELF: &str = ".";

/// Whether the field set `owned` (<https://kubernetes.io/docs/reference/using-api/server-side-apply/#field-management>) contains every
/// leaf of `value`. `skip` has the top-level fields that are never in a field set.
fn covers(owned: &Value, value: &Value, skip: &[&str], depth: usize) -> bool {
    let Some(fields) = owned.as_object() else { return false };
    // A field without further fields below it is owned as a whole.
    if depth > 0 && fields.is_empty() {
        return true;
    }
    match value {
        Value::Object(map) => map.iter().all(|(name, value)| {
            skip.contains(&name.as_str())
                || (depth == 1 && ["name", "namespace", "uid"].contains(&name.as_str()) && is_metadata(fields))
                || fields.get(&format!("f:{name}")).is_some_and(|field| {
                    let empty = value.as_object().is_some_and(Map::is_empty);
                    empty || covers(field, value, &[], depth + 1)
                })
        }),
        Value::Array(list) => list.iter().all(|item| {
            fields.iter().any(|(field, below)| match field.split_once(':') {
                Some(("k", key)) => is_item(key, item) && covers(below, item, &[], depth + 1),
                Some(("v", text)) => serde_json::from_str::<Value>(text).is_ok_and(|value| value == *item),
                _ => false,
            })
        }),
        _ => true,
    }
}

/// Whether a field set at depth 1 is that of `metadata`: the manager always sets labels or annotations. `name` and `namespace` are not in
/// field sets.
fn is_metadata(fields: &Map<String, Value>) -> bool {
    fields.contains_key("f:labels") || fields.contains_key("f:annotations")
}

/// Whether a list item has the key's values. The API server added a default for a value that the item does not have.
fn is_item(key: &str, item: &Value) -> bool {
    let Ok(Value::Object(key)) = serde_json::from_str::<Value>(key) else { return false };
    key.iter().all(|(name, value)| item.get(name).is_none_or(|field| field == value))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::test_support::vm;

    #[test]
    fn what_the_api_server_refuses_of_a_status_is_left_out_and_the_rest_is_written() {
        let status = |cpus: u32| json!({ "cpus": cpus, "nodeName": "n", "phase": "Running" });
        let vm = vm(|vm| vm["status"] = status(1));
        let wanted: VirtualMachineStatus = serde_json::from_value(status(2)).unwrap();
        let without = |wanted: &VirtualMachineStatus, message: &str| {
            let answer = Status { message: message.into(), ..Status::default() };
            without_refused(&vm, wanted, &answer).map(|(part, rest)| (part, json!(rest)))
        };
        let (part, stored) =
            without(&wanted, "VirtualMachine \"a\" is invalid: status.cpus: Invalid value: 2").unwrap();
        assert_eq!((part.as_str(), &stored), ("cpus", &status(1)));
        // What is stored is refused, too.
        let (_, rest) = without(&serde_json::from_value(stored).unwrap(), ".status.cpus: no").unwrap();
        assert_eq!(rest, json!({ "nodeName": "n", "phase": "Running" }));
        let (part, _) = without(&wanted, "failed: .status.nodeName: field not declared in schema").unwrap();
        assert_eq!(part, "nodeName");
        assert_eq!(without(&wanted, "a webhook says no to status.cpusAndMore"), None);
    }

    fn owns(owned: Value, rendered: Value) -> bool {
        covers(&owned, &rendered, &["apiVersion", "kind"], 0)
    }

    #[test]
    fn a_map_of_which_another_client_owns_a_part_is_not_owned_as_a_whole() {
        let rendered = json!({ "spec": { "bridge": "br0", "selector": { "a": "b" } } });
        let ours = json!({ "f:spec": { "f:bridge": {}, "f:selector": {} } });
        assert!(owns(ours.clone(), rendered.clone()));
        for (theirs, is_owned) in [
            (json!({ "f:spec": {} }), true),
            (json!({ "f:spec": { "f:selector": {}, "f:mtu": {} } }), true),
            (json!({ "f:spec": { "f:selector": { "f:a": {} } } }), false),
        ] {
            let mut marked = ours.clone();
            mark_parts(&mut marked, &theirs);
            assert_eq!(owns(marked, rendered.clone()), is_owned, "{theirs}");
        }
        let mut all_taken = json!({ "f:spec": {} });
        mark_parts(&mut all_taken, &json!({ "f:spec": { "f:bridge": {} } }));
        assert!(!owns(all_taken.clone(), rendered));
        assert!(owns(all_taken, json!({ "spec": {} })));
    }

    #[test]
    fn a_field_that_another_client_changed_is_not_owned() {
        let rendered = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": { "name": "x", "namespace": "y", "labels": { "a.b/c": "1" } },
            "spec": {
                "containers": [{ "name": "c", "image": "i", "ports": [{ "containerPort": 5900 }], "args": ["a"] }],
                "nodeSelector": {},
                "tolerations": [{ "key": "k" }],
            },
        });
        let owned = json!({
            "f:metadata": { "f:labels": { "f:a.b/c": {} } },
            "f:spec": {
                "f:containers": { "k:{\"name\":\"c\"}": {
                    ".": {}, "f:name": {}, "f:image": {}, "f:args": {},
                    "f:ports": { "k:{\"containerPort\":5900,\"protocol\":\"TCP\"}": { ".": {}, "f:containerPort": {} } },
                } },
                "f:nodeSelector": {},
                "f:tolerations": {},
            },
        });
        assert!(owns(owned.clone(), rendered.clone()));
        for gone in [
            "/f:metadata/f:labels/f:a.b~1c",
            "/f:spec/f:containers/k:{\"name\":\"c\"}/f:image",
            "/f:spec/f:containers/k:{\"name\":\"c\"}/f:ports/k:{\"containerPort\":5900,\"protocol\":\"TCP\"}",
            "/f:spec/f:tolerations",
        ] {
            let mut less = owned.clone();
            let (parent, field) = gone.rsplit_once('/').unwrap();
            let removed = less.pointer_mut(parent).unwrap().as_object_mut().unwrap().remove(&field.replace("~1", "/"));
            assert!(removed.is_some(), "{gone}");
            // When the last field of a map is removed, the map's own entry is removed too.
            let mut parent = parent;
            while let Some((above, field)) = parent.rsplit_once('/')
                && less.pointer(parent).unwrap().as_object().unwrap().is_empty()
            {
                less.pointer_mut(above).unwrap().as_object_mut().unwrap().remove(field);
                parent = above;
            }
            assert!(!owns(less, rendered.clone()), "{gone}");
        }
    }

    #[test]
    fn items_of_a_set_are_matched_by_value() {
        let rendered = json!({ "metadata": { "labels": {}, "list": ["a", "b"] } });
        assert!(owns(
            json!({ "f:metadata": { "f:labels": {}, "f:list": { "v:\"a\"": {}, "v:\"b\"": {} } } }),
            rendered.clone()
        ));
        assert!(!owns(json!({ "f:metadata": { "f:labels": {}, "f:list": { "v:\"a\"": {} } } }), rendered));
    }

    /// The VM of a takeover: the manager has written Running, and then a runner of the Java VM-Operator replaced the whole status.
    fn replaced_by_a_runner() -> VirtualMachine {
        vm(|vm| {
            vm["status"] = json!({ "conditions": [{
                "type": "Running", "status": "True", "reason": "VmRunning", "message": "The VM has been started.",
                "lastTransitionTime": "2026-11-24T10:50:22Z", "observedGeneration": 1,
            }] });
            vm["metadata"]["managedFields"] = json!([{
                "manager": STATUS_MANAGER, "operation": "Apply", "subresource": "status", "fieldsV1": { "f:status": {
                    "f:conditions": { "k:{\"type\":\"Running\"}": { ".": {}, "f:type": {}, "f:lastTransitionTime": {} } },
                } },
            }]);
        })
    }

    #[test]
    fn the_guests_generation_is_applied_once_to_a_condition_that_is_stored_twice() {
        let mut vm = replaced_by_a_runner();
        let conditions = &mut vm.status.as_mut().unwrap().conditions;
        conditions.push(conditions[0].clone());
        vm.metadata.managed_fields = None;
        let wanted = VirtualMachineStatus { guest_generation: Some(4), ..VirtualMachineStatus::default() };
        let applied = json!([{ "type": "Running", "observedGeneration": 4 }]);
        assert_eq!(status_to_apply(&vm, &wanted), json!({ "guestGeneration": 4, "conditions": applied }));
    }

    #[test]
    fn what_the_manager_still_owns_of_a_runners_condition_stays() {
        let wanted = VirtualMachineStatus { phase: Some("Running".into()), ..VirtualMachineStatus::default() };
        let vm = replaced_by_a_runner();
        let kept = json!([{ "type": "Running", "lastTransitionTime": "2026-11-24T10:50:22Z" }]);
        assert_eq!(status_to_apply(&vm, &wanted), json!({ "phase": "Running", "conditions": kept }));
        // Then the manager has nothing more to write.
        let mut written = vm.clone();
        written.status.as_mut().unwrap().phase = wanted.phase.clone();
        written.metadata.managed_fields.as_mut().unwrap()[0].fields_v1.as_mut().unwrap().0["f:status"]["f:phase"] =
            json!({});
        assert!(status_differs(&vm, &wanted) && !status_differs(&written, &wanted));
    }

    #[test]
    fn a_condition_of_the_manager_goes_when_it_is_not_wanted() {
        let mut vm = replaced_by_a_runner();
        let fields = vm.metadata.managed_fields.as_mut().unwrap()[0].fields_v1.as_mut().unwrap();
        let owned = &mut fields.0["f:status"]["f:conditions"]["k:{\"type\":\"Running\"}"];
        *owned = json!({ "f:type": {}, "f:status": {}, "f:message": {}, "f:lastTransitionTime": {} });
        assert_eq!(status_to_apply(&vm, &VirtualMachineStatus::default()), json!({}));
    }

    #[test]
    fn trimming_keeps_who_sets_the_state() {
        let entry = |manager: &str, operation: &str, fields: Value| json!({ "manager": manager, "operation": operation, "fieldsV1": fields });
        let state = json!({ "f:spec": { "f:vm": { "f:state": {}, "f:maximumCpus": {} } } });
        let other = json!({ "f:spec": { "f:vm": { "f:maximumCpus": {} } } });
        let by_client = json!({ "f:metadata": { "f:annotations": { format!("f:{LAST_APPLIED}"): {} } }, "f:spec": { "f:vm": { "f:state": {} } } });
        let last = |text: &str| json!({ LAST_APPLIED: text });
        for (entries, annotations, expected) in [
            (json!([]), json!({}), Setter::Nobody),
            (json!([entry("flux", "Apply", other.clone())]), json!({}), Setter::Nobody),
            (json!([entry("flux", "Apply", state.clone())]), json!({}), Setter::Applier),
            (json!([entry("kubectl-edit", "Update", state.clone())]), json!({}), Setter::Somebody),
            (json!([entry("helm-controller", "Update", state.clone())]), json!({}), Setter::Applier),
            (json!([entry("argocd-application-controller", "Update", state.clone())]), json!({}), Setter::Applier),
            (json!([entry(COMMAND_MANAGER, "Apply", state.clone())]), json!({}), Setter::Somebody),
            (json!([entry(WEB_MANAGER, "Apply", state.clone())]), json!({}), Setter::Somebody),
            (
                json!([entry("kubectl-client-side-apply", "Update", state.clone())]),
                last(r#"{"spec":{"vm":{"state":"Running"}}}"#),
                Setter::Applier,
            ),
            (
                json!([entry("kubectl-client-side-apply", "Update", other)]),
                last(r#"{"spec":{"vm":{}}}"#),
                Setter::Nobody,
            ),
            // The field set of a client-side apply contains the CRD's default.
            (
                json!([entry("argocd-controller", "Update", by_client.clone())]),
                last(r#"{"spec":{"vm":{}}}"#),
                Setter::Nobody,
            ),
            (
                json!([
                    entry("argocd-controller", "Update", by_client),
                    entry("kubectl-patch", "Update", state.clone())
                ]),
                last(r#"{"spec":{"vm":{}}}"#),
                Setter::Somebody,
            ),
        ] {
            let mut vm = vm(|vm| {
                vm["metadata"]["managedFields"] = entries.clone();
                vm["metadata"]["annotations"] = annotations;
            });
            trim(&mut vm);
            assert_eq!(setter(&vm), expected, "{entries}");
            assert_eq!(vm.metadata.annotations, None);
            let kept = json!(vm.metadata.managed_fields);
            assert!(!kept.to_string().contains("maximumCpus"), "{kept}");
            assert_eq!(
                kept.to_string().contains("f:spec"),
                entries != json!([]),
                "whether anything is recorded: {kept}"
            );
        }
    }

    #[test]
    fn what_a_command_wrote_belongs_to_the_one_client_that_applies() {
        let entry = |manager: &str, operation: &str, fields: Value| -> ManagedFieldsEntry {
            serde_json::from_value(json!({ "manager": manager, "operation": operation, "fieldsV1": fields })).unwrap()
        };
        let data = |keys: &[&str]| {
            let keys: Map<String, Value> = keys.iter().map(|key| (format!("f:{key}"), json!({}))).collect();
            json!({ "f:data": keys })
        };
        let kubectl = || entry("kubectl", "Apply", data(&["a", "b"]));
        let command = || entry(COMMAND_MANAGER, "Update", data(&["b", "c"]));
        let mut entries = vec![kubectl(), command(), entry("vm-operator", "Update", json!({ "f:metadata": {} }))];
        assert!(hand_over_data(&mut entries));
        let expected = [
            entry("kubectl", "Apply", data(&["a", "b", "c"])),
            entry("vm-operator", "Update", json!({ "f:metadata": {} })),
        ];
        assert_eq!(entries, expected);
        // Nobody applies, several do, or the command wrote nothing.
        for others in [vec![], vec![kubectl(), entry("flux", "Apply", data(&["x"]))]] {
            let mut entries = others.clone();
            entries.push(command());
            let before = entries.clone();
            assert!(!hand_over_data(&mut entries));
            assert_eq!(entries, before);
        }
        assert!(!hand_over_data(&mut vec![kubectl()]));
    }
}
