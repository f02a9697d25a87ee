//! plan: rendered objects and observed ones become actions.
//!
//! Pure: every decision about a machine's power and its objects is made here, and each has a test without a cluster.
//!
//! What happens to an object that lives while the machine runs (its Pod) is this table:
//!
//! | the machine | there is none | it lives | it has ended | it is going | it is somebody else's |
//! |---|---|---|---|---|---|
//! | should run | make it | leave it | delete it, make it anew | wait | refuse |
//! | should be down | nothing | delete it | delete it | wait | nothing |
//!
//! A Pod has the machine's name, so the API server itself refuses a second one; a Pod that is going is waited for and never
//! deleted by force. Two Pods never run one machine.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use k8s_openapi::jiff::SignedDuration;
use kube::ResourceExt;
use serde_json::{Map, Value, json};

use crate::{
    api::{PowerState, VirtualMachine},
    observed::{Object, Observed, Part},
    render::{
        Lifetime, ObjectKey, Rendered, Update,
        output::{HASH_ANNOTATION, VERSION_ANNOTATION},
    },
};

/// How long after its beginning a Pod that ended is made again, at the earliest.
const RESTART_INTERVAL: SignedDuration = SignedDuration::from_secs(10);

/// What is to be done, in this order; actions of one step do not depend on each other.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// What a Pod mounts comes before the Pod, what is not needed any more goes last.
    pub steps: [Vec<Action>; 3],
    /// What is waited for; the watch wakes us.
    pub waits: Vec<Wait>,
    /// When to look again though nothing has changed.
    pub again_after: Option<Duration>,
    /// Objects of the running machine that are not as they are rendered now and wait for the next start.
    pub outdated: Vec<ObjectKey>,
}

/// A write.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Server-side apply.
    Apply {
        /// The object.
        object: Rendered,
        /// The UID of the existing object; the API server refuses to apply to another one.
        uid: Option<String>,
    },
    /// New labels and annotations for an object whose other fields stay as they are.
    Label {
        /// The object.
        key: ObjectKey,
        /// Its UID.
        uid: String,
        /// A merge patch of its metadata.
        patch: Value,
    },
    /// Deletion, with the grace that the object itself says.
    Delete {
        /// The object.
        key: ObjectKey,
        /// Its UID.
        uid: String,
    },
}

/// What must happen before the rest can be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wait {
    /// An object that is being deleted must be gone.
    Gone(ObjectKey),
    /// An object of that name is not ours and must go away.
    NotOurs(ObjectKey),
    /// A Pod that ended is made again a little later.
    Restart(ObjectKey),
}

/// What there is under the name of a rendered object.
enum Life<'a> {
    Absent,
    Alive(&'a Arc<Object>),
    Ended(&'a Arc<Object>),
    Going,
    NotOurs,
}

/// Whether the machine should run.
pub fn should_run(vm: &VirtualMachine) -> bool {
    vm.spec.vm.state == PowerState::Running && vm.metadata.deletion_timestamp.is_none()
}

/// Decides what to do about a machine's objects.
///
/// `rendered` is `None` while the templates can't be rendered: then nothing is made, changed or pruned, but a machine that
/// should be down still goes down.
pub fn plan(vm: &VirtualMachine, observed: &Observed, rendered: Option<&[Rendered]>) -> Plan {
    let mut plan = Plan::default();
    // The garbage collector deletes what belongs to a machine that is going.
    if vm.metadata.deletion_timestamp.is_some() {
        return plan;
    }
    let run = should_run(vm);
    let uid = vm.uid().unwrap_or_default();
    for object in rendered.unwrap_or_default() {
        let life = life(object, observed, &uid);
        match object.lifetime {
            Lifetime::Running => running(&mut plan, run, object, life, observed),
            Lifetime::Vm | Lifetime::Keep => standing(&mut plan, object, life),
        }
    }
    for object in observed.objects.iter().filter(|object| is_superfluous(object, &uid, run, rendered)) {
        plan.steps[2].push(Action::Delete { key: object.key.clone(), uid: object.uid.clone() });
    }
    plan
}

fn life<'a>(object: &Rendered, observed: &'a Observed, uid: &str) -> Life<'a> {
    match observed.get(&object.key) {
        None => Life::Absent,
        Some(found) if object.lifetime != Lifetime::Keep && !found.belongs_to(uid) => {
            // One whose machine was deleted is on its way out; the watch tells when it is gone.
            if found.deleting.is_some() || found.is_ours() { Life::Going } else { Life::NotOurs }
        }
        Some(found) if found.deleting.is_some() => Life::Going,
        Some(found)
            if matches!(found.text(Part::Status, "/phase"), Some("Succeeded" | "Failed")) && object.key.is_pod() =>
        {
            Life::Ended(found)
        }
        Some(found) => Life::Alive(found),
    }
}

/// An object that lives while the machine runs: the table above.
fn running(plan: &mut Plan, run: bool, object: &Rendered, life: Life<'_>, observed: &Observed) {
    match (run, life) {
        (true, Life::Absent) => plan.steps[1].push(Action::Apply { object: object.clone(), uid: None }),
        (true, Life::Alive(found)) => change(plan, 1, object, found),
        (true, Life::Ended(found)) => {
            let early = found.created.map(|created| created + RESTART_INTERVAL).filter(|time| *time > observed.now);
            if let Some(time) = early {
                plan.waits.push(Wait::Restart(object.key.clone()));
                plan.again_after = (time - observed.now).try_into().ok();
            } else {
                plan.steps[0].push(Action::Delete { key: object.key.clone(), uid: found.uid.clone() });
                plan.waits.push(Wait::Gone(object.key.clone()));
            }
        }
        (false, Life::Alive(found) | Life::Ended(found)) => {
            plan.steps[0].push(Action::Delete { key: object.key.clone(), uid: found.uid.clone() });
            plan.waits.push(Wait::Gone(object.key.clone()));
        }
        (_, Life::Going) => plan.waits.push(Wait::Gone(object.key.clone())),
        (true, Life::NotOurs) => plan.waits.push(Wait::NotOurs(object.key.clone())),
        (false, Life::Absent | Life::NotOurs) => {}
    }
}

/// An object that is there whether or not the machine runs.
fn standing(plan: &mut Plan, object: &Rendered, life: Life<'_>) {
    match life {
        Life::Absent => plan.steps[0].push(Action::Apply { object: object.clone(), uid: None }),
        Life::Alive(found) | Life::Ended(found) => change(plan, 0, object, found),
        // A claim that is going stays until its Pod is gone, with all that is on it.
        Life::Going => plan.waits.push(Wait::Gone(object.key.clone())),
        Life::NotOurs => plan.waits.push(Wait::NotOurs(object.key.clone())),
    }
}

/// An object that exists: is it as it should be?
fn change(plan: &mut Plan, step: usize, object: &Rendered, found: &Arc<Object>) {
    let same = found.annotations.get(HASH_ANNOTATION) == Some(&object.hash);
    match object.update {
        Update::Once => {}
        Update::AtStart => {
            if let Some(patch) = labelling(object, found) {
                plan.steps[step].push(Action::Label { key: object.key.clone(), uid: found.uid.clone(), patch });
            }
            if !same {
                plan.outdated.push(object.key.clone());
            }
        }
        Update::Live => {
            let (wanted, ours) = if object.key.is_claim() {
                let wanted = as_bound(object, found);
                // What the API server does not let us set is not ours to put back.
                let mut ours = object.value.clone();
                if let Some(spec) = ours["spec"].as_object_mut() {
                    spec.retain(|field, _| wanted.value["spec"].get(field).is_some());
                }
                (wanted, ours)
            } else {
                (object.clone(), object.value.clone())
            };
            if !same || !found.owns_all_of(&ours) {
                plan.steps[step].push(Action::Apply { object: wanted, uid: Some(found.uid.clone()) });
            }
        }
    }
}

/// A merge patch that gives the object the rendered labels, annotations and owner. Its hash stays: it says what the rest was
/// made from.
fn labelling(object: &Rendered, found: &Object) -> Option<Value> {
    let mut metadata = Map::new();
    for (field, current) in [("labels", &found.labels), ("annotations", &found.annotations)] {
        let wanted = texts(&object.value["metadata"][field]);
        let mut change: Map<String, Value> = wanted
            .iter()
            .filter(|(name, value)| {
                ![HASH_ANNOTATION, VERSION_ANNOTATION].contains(&name.as_str()) && current.get(*name) != Some(value)
            })
            .map(|(name, value)| (name.clone(), json!(value)))
            .collect();
        let ours = [&found.owned, &found.patched].into_iter().flatten();
        let ours = ours.filter_map(|fields| fields["f:metadata"][format!("f:{field}")].as_object());
        for name in ours.flatten().filter_map(|(name, _)| name.strip_prefix("f:")) {
            if current.contains_key(name) && !wanted.contains_key(name) {
                change.insert(name.to_owned(), Value::Null);
            }
        }
        if !change.is_empty() {
            metadata.insert(field.to_owned(), Value::Object(change));
        }
    }
    if found.owners.is_empty() {
        metadata.insert("ownerReferences".into(), object.value["metadata"]["ownerReferences"].clone());
    }
    (!metadata.is_empty()).then(|| json!({ "metadata": metadata }))
}

fn texts(value: &Value) -> BTreeMap<String, String> {
    let entries = value.as_object().into_iter().flatten();
    entries.filter_map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned()))).collect()
}

/// A claim that is bound: what the API server does not let change any more is as it is, the size never shrinks
/// (<https://kubernetes.io/docs/concepts/storage/persistent-volumes/#persistentvolumeclaims>).
pub(crate) fn as_bound(object: &Rendered, found: &Object) -> Rendered {
    let mut object = object.clone();
    if found.text(Part::Spec, "/volumeName").is_none_or(str::is_empty) {
        return object;
    }
    let size = |spec: &Value| {
        let size = spec.pointer("/resources/requests/storage").cloned()?;
        serde_json::from_value::<crate::api::Quantity>(size).ok().map(|size| size.bytes())
    };
    let larger = size(&object.value["spec"]).max(size(&found.spec)) > size(&found.spec);
    let wanted = object.value["spec"].pointer("/resources/requests/storage").cloned().filter(|_| larger);
    let mut spec = found.spec.clone();
    if let Value::Object(spec) = &mut spec {
        // Set by the binder; not ours to own.
        spec.remove("volumeName");
    }
    if let (Some(wanted), Some(storage)) = (wanted, spec.pointer_mut("/resources/requests/storage")) {
        *storage = wanted;
    }
    object.value["spec"] = spec;
    object
}

/// An object that was rendered once and is not any more. Claims never are.
fn is_superfluous(object: &Object, uid: &str, run: bool, rendered: Option<&[Rendered]>) -> bool {
    let is_mine = object.is_ours() && !object.owners.is_empty() && object.belongs_to(uid);
    if !is_mine || object.key.is_claim() || object.deleting.is_some() {
        return false;
    }
    // Whatever becomes of the templates, a guest is not killed by them, and a Pod goes with its machine's power.
    if object.key.is_pod() && run {
        return false;
    }
    match rendered {
        Some(rendered) => !rendered.iter().any(|rendered| rendered.key == object.key),
        None => object.key.is_pod(),
    }
}

#[cfg(test)]
mod tests;
