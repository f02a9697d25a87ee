//! The plan of one VM: which objects are created, changed and deleted, and what must happen first.
//!
//! Pure: all decisions about a VM's objects are made here, and each has a test that needs no cluster.
//!
//! [`power`](crate::power) decides whether the VM should run. For an object with the lifetime `running` (the Pod), that means:
//!
//! | the VM | no object exists | it exists | it has ended | it is being deleted | it belongs to someone else |
//! |---|---|---|---|---|---|
//! | should run | create it | leave it | create it again, after a growing pause | wait | refuse |
//! | should run, and a restart is requested or its guest stays down | create it | delete it, create it again | delete it, create it again | wait | refuse |
//! | should be down | nothing | delete it | delete it | wait | nothing |
//! | is halting: its guest has shut down, and the status does not say so yet | nothing | leave it | leave it | wait | nothing |
//!
//! [`Planner::runtime_object`] is this table.
//!
//! Two Pods never run the same VM:
//! - The Pod has the VM's name, so the API server refuses a second one.
//! - When a Pod is being deleted, the manager waits until it is gone, and never removes it from the API server by force. A person can at
//!   most shorten its grace period to one second ([`FORCE_STOP_ANNOTATION`]).
//! - The manager creates no Pod while an object that the Pod may mount is being deleted or belongs to someone else.
//! - Templates may render a controller (a StatefulSet) instead of the Pod, or the Pod again instead of a controller. The new one is
//!   created only when the Pod of the old one, and every controller that may create it again, is gone. So changed templates neither end a
//!   guest nor start a second one.

use std::{sync::Arc, time::Duration};

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::ResourceExt;
use serde_json::{Value, json};

use crate::{
    api::{PendingChange, VirtualMachine, status::Retry},
    claims,
    object::{
        COMPONENT_LABEL, CONTAINER_NAME, FORCE_STOP_ANNOTATION, HASH_ANNOTATION, LIFETIME_ANNOTATION, Lifetime,
        ObjectKey, RESTARTED_ANNOTATION, Rendered, Update, is_builtin_kind,
    },
    observed::{Object, Observed},
    power::{self, Power, Wanted, power},
};

pub mod conflict;
pub mod kinds;
mod metadata;
pub mod pending;
mod retry;

/// The time after the end of its grace period that a Pod may need until it is gone. The kubelet itself adds a little
/// (<https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/#pod-termination>).
const OVERDUE: SignedDuration = SignedDuration::from_secs(30);
/// The grace period in seconds of a Pod that does not wait for its guest. With 0 the API server would remove the Pod before the node
/// has ended it.
const FORCED_GRACE: i64 = 1;
/// If a Pod ends within this time anyway, its grace period is not shortened.
const SOON: SignedDuration = SignedDuration::from_secs(10);
/// The longest time until the VM is reconciled again when the plan waits for a time. Clocks jump, and timers do not jump with them.
const LONGEST_REQUEUE: SignedDuration = SignedDuration::from_mins(5);

/// What the manager does about one VM.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// Whether the VM should run.
    pub power: Power,
    /// The actions, in order; those of one step do not depend on each other. First comes what the Pod mounts, then the Pod, then the
    /// deletion of objects that are not needed any more. Pods are deleted in the first step.
    pub steps: [Vec<Action>; 3],
    /// What must happen first. An event of a watch triggers the next reconcile.
    pub waits: Vec<Wait>,
    /// When to reconcile again even if nothing changes.
    pub requeue_after: Option<Duration>,
    /// The changes that take effect at the VM's next start.
    pub pending: Vec<PendingChange>,
    /// The new `status.retry`.
    pub retry: Option<Retry>,
}

/// A write to the API server.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Apply the object (server-side apply).
    Apply {
        /// The object.
        object: Rendered,
        /// The UID of the existing object; the API server refuses to apply to another one. `None`: create it.
        uid: Option<String>,
    },
    /// Change only the labels, annotations and owners of an existing object.
    Label {
        /// The object.
        key: ObjectKey,
        /// Its UID.
        uid: String,
        /// A merge patch of its metadata.
        patch: Value,
    },
    /// Delete the object.
    Delete {
        /// The object.
        key: ObjectKey,
        /// Its UID.
        uid: String,
        /// Why it is deleted.
        reason: DeleteReason,
        /// The grace period in seconds; `None`: the object's own.
        grace: Option<i64>,
    },
}

/// Why an object is deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeleteReason {
    /// The VM should be down.
    Stop,
    /// A restart was requested.
    Restart,
    /// The Pod has ended, and is created again.
    Ended,
    /// A forced stop was requested: the Pod does not wait for its guest.
    Force,
    /// No template renders the object any more.
    NotRendered,
}

/// What must happen before the rest can be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wait {
    /// The object is being deleted and must be gone first.
    Gone(ObjectKey),
    /// An object with that name belongs to someone else and must be removed first.
    NotOurs(ObjectKey),
    /// The Pod should be gone already, but its node does not answer.
    NodeNotResponding(ObjectKey),
    /// The Pod should be gone already. It has ended, but something keeps the object, usually a finalizer.
    NotRemoved(ObjectKey),
    /// The Pod has ended and is created again later.
    Retry(ObjectKey),
}

impl Wait {
    /// The object that the plan waits for.
    pub fn key(&self) -> &ObjectKey {
        match self {
            Self::Gone(key)
            | Self::NotOurs(key)
            | Self::NodeNotResponding(key)
            | Self::NotRemoved(key)
            | Self::Retry(key) => key,
        }
    }
}

impl Plan {
    /// Whether the plan applies or labels the object.
    pub fn writes(&self, key: &ObjectKey) -> bool {
        self.steps.iter().flatten().any(|action| match action {
            Action::Apply { object, uid: _ } => object.key == *key,
            Action::Label { key: labelled, uid: _, patch: _ } => labelled == key,
            Action::Delete { key: _, uid: _, reason: _, grace: _ } => false,
        })
    }

    fn requeue_at(&mut self, time: Timestamp, now: Timestamp) {
        let pause = now.duration_until(time).min(LONGEST_REQUEUE).try_into().ok();
        self.requeue_after = self.requeue_after.into_iter().chain(pause).min();
    }
}

/// What exists under the key of a rendered object.
#[derive(Clone, Copy)]
enum Existing<'a> {
    Absent,
    Present(&'a Arc<Object>),
    Ended(&'a Arc<Object>),
    Deleting(&'a Arc<Object>),
    NotOurs,
}

/// The VM's Pod: the Pod with its name or, if its templates render a controller (a StatefulSet), the runner's Pod of that controller.
pub fn pod<'a>(vm: &VirtualMachine, observed: &'a Observed) -> Option<&'a Arc<Object>> {
    let (name, uid) = (vm.name_any(), vm.uid().unwrap_or_default());
    let mut pods = observed.objects.iter().filter(|object| object.key.is_pod());
    let is_runner = |pod: &Object| {
        pod.is_ours() && pod.labels.get(COMPONENT_LABEL).is_some_and(|component| component == CONTAINER_NAME)
    };
    // The controller that owns a Pod may be gone while the Pod is still ending. So the Pod is not found by its owner.
    let is_of_controller = |pod: &Object| pod.key.name != name && !pod.is_owned_or_adoptable(&uid) && is_runner(pod);
    pods.clone()
        .find(|pod| pod.key.name == name && pod.is_owned_or_adoptable(&uid))
        .or_else(|| pods.find(|pod| is_of_controller(pod) || is_legacy_statefulset_pod(&name, pod)))
}

/// The Pod of a deleted VM with the same name. It is being deleted too, but its guest may still run.
pub(crate) fn previous_pod<'a>(vm: &VirtualMachine, observed: &'a Observed) -> Option<&'a Arc<Object>> {
    let (name, uid) = (vm.name_any(), vm.uid().unwrap_or_default());
    let mut pods = observed.objects.iter().filter(|object| object.key.is_pod() && object.key.name == name);
    pods.find(|pod| pod.is_ours() && !pod.is_owned_or_adoptable(&uid))
}

/// Whether a Pod belongs to the StatefulSet that releases before 3.4 created for a VM. Such a Pod has no label that says that it is a
/// runner's.
fn is_legacy_statefulset_pod(vm: &str, pod: &Object) -> bool {
    pod.key.name == format!("{vm}-0") && pod.is_ours() && !pod.labels.contains_key(COMPONENT_LABEL)
}

/// Decides what to do about the objects of a VM.
///
/// `rendered` is `None` while the templates can't be rendered. Then nothing is created, changed or deleted, except that a VM that should
/// be down is stopped.
pub fn plan(vm: &VirtualMachine, observed: &Observed, rendered: Option<&[Rendered]>) -> Plan {
    // The garbage collector deletes the objects of a VM that is being deleted.
    if vm.metadata.deletion_timestamp.is_some() {
        return Plan::default();
    }
    let mut planner = Planner::new(vm, observed, rendered);
    planner.permanent_objects();
    planner.wait_for_controllers();
    planner.wait_for_previous_pod();
    planner.runtime_objects();
    planner.delete_unrendered();
    planner.plan
}

/// Plans one VM. Its first methods are the steps of [`plan`].
struct Planner<'a> {
    vm: &'a VirtualMachine,
    uid: String,
    observed: &'a Observed,
    rendered: Option<&'a [Rendered]>,
    pod: Option<&'a Arc<Object>>,
    plan: Plan,
}

impl<'a> Planner<'a> {
    fn new(vm: &'a VirtualMachine, observed: &'a Observed, rendered: Option<&'a [Rendered]>) -> Self {
        let pod = pod(vm, observed);
        let power = power(vm, pod.map(AsRef::as_ref), observed.now);
        // A Pod that a controller creates is created again by the controller, not by the manager.
        let renders_pod = rendered.is_none_or(|rendered| rendered.iter().any(|object| object.key.is_pod()));
        let retry = vm.status.as_ref().and_then(|status| status.retry.clone());
        let retry = retry.filter(|_| power.wanted == Wanted::Up && renders_pod);
        let plan = Plan { power, retry, ..Plan::default() };
        Self { vm, uid: vm.uid().unwrap_or_default(), observed, rendered, pod, plan }
    }

    fn is_up_wanted(&self) -> bool {
        self.plan.power.wanted == Wanted::Up
    }

    /// The objects that exist whether or not the VM runs.
    fn permanent_objects(&mut self) {
        for object in self.rendered.into_iter().flatten().filter(|object| object.lifetime != Lifetime::Running) {
            match self.existing(object) {
                Existing::Absent => self.plan.steps[0].push(Action::Apply { object: object.clone(), uid: None }),
                Existing::Present(found) | Existing::Ended(found) => self.change(0, object, found),
                // A claim that is being deleted exists until its Pod is gone. Then its data is gone too.
                Existing::Deleting(_) => self.plan.waits.push(Wait::Gone(object.key.clone())),
                Existing::NotOurs => self.plan.waits.push(Wait::NotOurs(object.key.clone())),
            }
        }
    }

    /// Without a Pod, waits for controllers of earlier templates: they could create a second Pod at any time.
    fn wait_for_controllers(&mut self) {
        let (true, None, Some(_)) = (self.is_up_wanted(), self.pod, self.rendered) else { return };
        let left = self.observed.objects.iter().filter(|object| {
            may_create_pods(object) && object.is_ours_and_owned_by(&self.uid) && !self.is_rendered(&object.key)
        });
        let waits: Vec<Wait> = left.map(|object| Wait::Gone(object.key.clone())).collect();
        self.plan.waits.extend(waits);
    }

    /// Waits for the Pod of a deleted VM with the same name, which still has the disks. If that Pod has the key of a rendered object,
    /// [`Self::runtime_object`] waits for it.
    fn wait_for_previous_pod(&mut self) {
        if let Some(previous) = previous_pod(self.vm, self.observed)
            && self.is_up_wanted()
            && !self.is_runtime_key(&previous.key)
        {
            self.wait_until_gone(previous);
        }
    }

    /// The objects that exist only while the VM runs.
    fn runtime_objects(&mut self) {
        let may_start = self.plan.waits.is_empty();
        let unrendered_pod = self.unrendered_pod();
        if let Some(pod) = unrendered_pod {
            self.delete_legacy_pod(pod);
        }
        for object in self.runtime_rendered() {
            match (unrendered_pod, self.existing(object)) {
                (Some(pod), Existing::Absent) if self.is_up_wanted() => self.wait_for_unrendered_pod(object, pod),
                (_, existing) => self.runtime_object(object, existing, may_start),
            }
        }
    }

    /// The objects that no template renders any more.
    fn delete_unrendered(&mut self) {
        let unrendered: Vec<_> = self.unrendered().filter(|object| !self.is_kept(object)).collect();
        for object in unrendered {
            let reason = match (object.key.is_pod(), self.plan.power.wanted) {
                (true, Wanted::Up) if object.has_ended() => DeleteReason::Ended,
                (true, Wanted::Up) => DeleteReason::Restart,
                (true, Wanted::Down | Wanted::Halting) => DeleteReason::Stop,
                (false, Wanted::Up | Wanted::Down | Wanted::Halting) => DeleteReason::NotRendered,
            };
            // What runs the guest is deleted first: a failure of another action must not keep a VM running that should be down.
            let step = if is_runtime_object(object) { 0 } else { 2 };
            self.plan.steps[step].push(delete(object, reason));
        }
    }

    fn runtime_rendered(&self) -> impl Iterator<Item = &'a Rendered> + use<'a> {
        self.rendered.into_iter().flatten().filter(|object| object.lifetime == Lifetime::Running)
    }

    fn is_runtime_key(&self, key: &ObjectKey) -> bool {
        self.runtime_rendered().any(|object| object.key == *key)
    }

    fn is_rendered(&self, key: &ObjectKey) -> bool {
        self.rendered.into_iter().flatten().any(|object| object.key.is_same_object(key))
    }

    fn existing(&self, object: &Rendered) -> Existing<'a> {
        let Some(found) = self.observed.get(&object.key) else { return Existing::Absent };
        if object.lifetime == Lifetime::Keep {
            if !object.key.is_claim() && !found.is_ours() {
                return Existing::NotOurs;
            }
        } else if !found.is_owned_or_adoptable(&self.uid) {
            // An object of a deleted VM is being deleted. The watch reports when it is gone.
            let is_leaving = found.deleting.is_some() || found.is_ours();
            return if is_leaving { Existing::Deleting(found) } else { Existing::NotOurs };
        }
        if found.deleting.is_some() {
            Existing::Deleting(found)
        } else if found.has_ended() {
            Existing::Ended(found)
        } else {
            Existing::Present(found)
        }
    }

    /// The objects of the VM that templates rendered once and do not render any more, never claims. While the templates can't be
    /// rendered: its Pods, which follow the VM's power.
    fn unrendered(&self) -> impl Iterator<Item = &'a Arc<Object>> {
        self.observed.objects.iter().filter(|object| {
            let is_candidate =
                object.is_ours_and_owned_by(&self.uid) && !object.key.is_claim() && object.deleting.is_none();
            is_candidate && if self.rendered.is_some() { !self.is_rendered(&object.key) } else { object.key.is_pod() }
        })
    }

    /// Whether an unrendered object is kept. Changed templates never end a guest; only a person does. A restart deletes what can be
    /// created again. A controller is deleted when it has no Pod, because then it runs no guest.
    fn is_kept(&self, object: &Object) -> bool {
        let is_deleted_while_up = self.is_up_wanted()
            && self.rendered.is_some()
            && (self.pod.is_none() && may_create_pods(object) || object.has_ended() || self.is_replaced(object));
        is_runtime_object(object) && self.plan.power.wanted != Wanted::Down && !is_deleted_while_up
    }

    /// Whether a runtime object is deleted and created again, because a restart is requested or its guest stays down.
    fn is_replaced(&self, object: &Object) -> bool {
        self.plan.power.replace_pod || power::is_restart_wanted(self.vm, object)
    }

    fn is_forced(&self, pod: &Object) -> bool {
        self.vm.annotations().get(FORCE_STOP_ANNOTATION) == Some(&pod.uid)
    }

    /// The VM's Pod, if it is neither rendered nor created by a rendered controller.
    fn unrendered_pod(&self) -> Option<&'a Arc<Object>> {
        let is_controller =
            |object: &Rendered| !object.key.is_pod() && matches!(self.existing(object), Existing::Present(_));
        self.pod.filter(|pod| {
            let is_of_rendered_controller = !pod.is_owned_or_adoptable(&self.uid)
                && !self.unrendered().any(|object| self.is_kept(object))
                && self.runtime_rendered().any(is_controller);
            !is_of_rendered_controller && !self.is_runtime_key(&pod.key)
        })
    }

    /// Deletes the Pod of a release before 3.4 if the VM should be down or is restarted, and the StatefulSet that would create it again.
    fn delete_legacy_pod(&mut self, pod: &Object) {
        let reason = match self.plan.power.wanted {
            Wanted::Down => DeleteReason::Stop,
            Wanted::Up if self.rendered.is_some() && self.is_replaced(pod) => DeleteReason::Restart,
            Wanted::Up | Wanted::Halting => return,
        };
        if !is_legacy_statefulset_pod(&self.vm.name_any(), pod) || pod.deleting.is_some() {
            return;
        }
        let key = ObjectKey { api_version: "apps/v1".into(), kind: "StatefulSet".into(), name: self.vm.name_any() };
        self.plan.steps[0].push(match pod.owners.first() {
            // The garbage collector deletes the Pod with its StatefulSet.
            Some(uid) => Action::Delete { key, uid: uid.clone(), reason, grace: None },
            None => delete(pod, reason),
        });
        self.plan.waits.push(Wait::Gone(pod.key.clone()));
    }

    /// The object is created only when the Pod that other templates created is gone.
    fn wait_for_unrendered_pod(&mut self, object: &Rendered, pod: &Object) {
        self.plan.pending.push(pending::created_after_pod(object, pod));
        let wait = Wait::Gone(pod.key.clone());
        if !self.plan.waits.contains(&wait) {
            self.plan.waits.push(wait);
        }
    }

    /// The table at the head of this module.
    fn runtime_object(&mut self, object: &Rendered, existing: Existing<'_>, may_start: bool) {
        match (self.plan.power.wanted, existing) {
            (Wanted::Up, Existing::Absent) => {
                if may_start {
                    self.create_runtime_object(object);
                }
            }
            (Wanted::Up, Existing::Present(found) | Existing::Ended(found)) if self.is_replaced(found) => {
                self.delete_and_wait(found, DeleteReason::Restart);
            }
            (Wanted::Up, Existing::Present(found)) => self.keep_runtime_object(object, found),
            (Wanted::Up, Existing::Ended(found)) => self.retry_ended(found),
            (Wanted::Up, Existing::NotOurs) => self.plan.waits.push(Wait::NotOurs(object.key.clone())),
            (Wanted::Down, Existing::Present(found) | Existing::Ended(found)) => {
                let reason = if self.is_forced(found) { DeleteReason::Force } else { DeleteReason::Stop };
                self.delete_and_wait(found, reason);
            }
            (Wanted::Up | Wanted::Down | Wanted::Halting, Existing::Deleting(found)) => self.wait_or_force(found),
            (Wanted::Down, Existing::Absent | Existing::NotOurs)
            | (Wanted::Halting, Existing::Absent | Existing::Present(_) | Existing::Ended(_) | Existing::NotOurs) => {}
        }
    }

    fn create_runtime_object(&mut self, object: &Rendered) {
        let object = metadata::with_restart(object, self.vm.annotations().get(RESTARTED_ANNOTATION));
        self.plan.steps[1].push(Action::Apply { object, uid: None });
    }

    fn keep_runtime_object(&mut self, object: &Rendered, found: &Arc<Object>) {
        if object.key.is_pod() {
            self.forget_retry_of_lasting_pod();
        }
        // The existing object keeps its restart annotation. Another value would look like a new restart.
        let object = metadata::with_restart(object, found.annotations.get(RESTARTED_ANNOTATION));
        self.change(1, &object, found);
        // Without `resources` in the spec, the requests follow from the current CPUs and memory. The guest gets a change of those while
        // it runs, so nothing waits for a restart.
        if self.vm.spec.resources.is_none() {
            self.plan.pending.retain(|change| !pending::is_runner_request(change));
        }
    }

    fn forget_retry_of_lasting_pod(&mut self) {
        let Some(retry) = &self.plan.retry else { return };
        let now = self.observed.now;
        match retry::forgotten_at(retry, now) {
            time if time > now => self.plan.requeue_at(time, now),
            _ => self.plan.retry = None,
        }
    }

    /// The Pod ended although the VM should run. It is created again, after a pause.
    fn retry_ended(&mut self, found: &Object) {
        let retry = retry::next(self.plan.retry.take(), found, self.observed);
        let next = retry.next.0;
        self.plan.retry = Some(retry);
        if next > self.observed.now {
            self.plan.waits.push(Wait::Retry(found.key.clone()));
            self.plan.requeue_at(next, self.observed.now);
        } else {
            self.delete_and_wait(found, DeleteReason::Ended);
        }
    }

    fn delete_and_wait(&mut self, found: &Object, reason: DeleteReason) {
        let grace = (reason == DeleteReason::Force).then(|| forced_grace(found, self.observed.now));
        self.plan.steps[0].push(Action::Delete { key: found.key.clone(), uid: found.uid.clone(), reason, grace });
        self.plan.waits.push(Wait::Gone(found.key.clone()));
    }

    /// Waits for an object that is being deleted, and shortens its grace period if a forced stop is requested.
    fn wait_or_force(&mut self, found: &Object) {
        let left = found.deleting.map_or(OVERDUE, |end| end.duration_since(self.observed.now));
        if self.is_forced(found) && left > SOON {
            self.delete_and_wait(found, DeleteReason::Force);
        } else {
            self.wait_until_gone(found);
        }
    }

    fn wait_until_gone(&mut self, found: &Object) {
        let now = self.observed.now;
        let key = found.key.clone();
        match found.deleting.map(|end| end.checked_add(OVERDUE).unwrap_or(Timestamp::MAX)) {
            None => self.plan.waits.push(Wait::Gone(key)),
            Some(overdue) if overdue > now => {
                self.plan.waits.push(Wait::Gone(key));
                self.plan.requeue_at(overdue, now);
            }
            Some(_) if may_run(found) => self.plan.waits.push(Wait::NodeNotResponding(key)),
            Some(_) => self.plan.waits.push(Wait::NotRemoved(key)),
        }
    }

    /// Changes an existing object if it is not as rendered.
    fn change(&mut self, step: usize, object: &Rendered, found: &Arc<Object>) {
        let is_same = found.annotations.get(HASH_ANNOTATION) == Some(&object.hash);
        let uid = || found.uid.clone();
        let label = |patch| Action::Label { key: object.key.clone(), uid: uid(), patch };
        let action = match object.update {
            // `kubectl delete --cascade=orphan` removed the owner.
            Update::Once => metadata::missing_owners(object, found)
                .map(|owners| label(json!({ "metadata": { "ownerReferences": owners } }))),
            Update::AtStart => {
                if !is_same {
                    self.plan.pending.extend(pending::changes(object, found));
                }
                metadata::patch(object, found).map(label)
            }
            Update::Live if object.key.is_claim() => self.changed_claim(object, found),
            Update::Live => (!is_same || !found.owns_all_of(&object.value))
                .then(|| Action::Apply { object: object.clone(), uid: Some(uid()) }),
        };
        self.plan.steps[step].extend(action);
    }

    fn changed_claim(&self, object: &Rendered, found: &Object) -> Option<Action> {
        // The manager does not repeat what the API server refused for the same spec.
        let may_grow = claims::refused_growth(self.vm, object, found).is_none();
        let wanted = claims::as_existing(object, found, may_grow);
        // The manager does not restore fields of the spec that the existing claim does not have.
        let mut owned = Value::clone(&object.value);
        if let Some(spec) = owned["spec"].as_object_mut() {
            spec.retain(|field, _| wanted.value["spec"].get(field).is_some());
        }
        let is_same = found.annotations.get(HASH_ANNOTATION) == Some(&object.hash);
        let grows = claims::requested_size(&wanted.value["spec"]) != claims::requested_size(&found.spec);
        (!is_same || grows || !found.owns_all_of(&owned))
            .then(|| Action::Apply { object: wanted, uid: Some(found.uid.clone()) })
    }
}

/// Whether a container of a Pod may run, as far as its kubelet has reported. The kubelet may have restarted a container that has ended,
/// so only the Pod's phase is final.
fn may_run(pod: &Object) -> bool {
    pod.node_name().is_some() && !pod.has_ended()
}

/// Whether an object exists only while the VM runs.
fn is_runtime_object(object: &Object) -> bool {
    object.key.is_pod() || object.annotations.get(LIFETIME_ANNOTATION).is_some_and(|lifetime| lifetime == "running")
}

/// Whether an object may be a controller that creates the VM's Pod, such as a StatefulSet. Objects of the kinds of the built-in templates
/// are no controllers.
fn may_create_pods(object: &Object) -> bool {
    is_runtime_object(object) && !is_builtin_kind(&object.key.types())
}

/// The grace period in seconds of a Pod that is to end now, also if it is being deleted already.
///
/// Before Kubernetes 1.33 the API server counts the new period from the first deletion request
/// (<https://github.com/kubernetes/kubernetes/pull/122646>). So the time since that request is added: with a shorter period the end would
/// be in the past, the Pod's token would be invalid, and its runner could not ask whether a forced stop is requested. A later version
/// counts from this request. Then the period is too long, and the next reconcile shortens it once more.
fn forced_grace(found: &Object, now: Timestamp) -> i64 {
    let given = SignedDuration::from_secs(found.grace.unwrap_or_default());
    // The API server accepts any number as a grace period.
    let requested = found.deleting.and_then(|end| end.checked_sub(given).ok());
    let since = requested.map_or(0, |requested| now.duration_since(requested).as_secs());
    since.max(0) + FORCED_GRACE
}

fn delete(found: &Object, reason: DeleteReason) -> Action {
    Action::Delete { key: found.key.clone(), uid: found.uid.clone(), reason, grace: None }
}

#[cfg(test)]
mod tests;
