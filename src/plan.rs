//! plan: rendered objects and observed ones become actions.
//!
//! Pure: every decision about a machine's power and its objects is made here, and each has a test without a cluster.
//!
//! Whether the machine should run is [`power`](crate::power)'s answer. What then happens to an object that lives while the
//! machine runs (its Pod) is this table:
//!
//! | the machine | there is none | it lives | it has ended | it is going | it is somebody else's |
//! |---|---|---|---|---|---|
//! | should run | make it | leave it | make it anew, later and later | wait | refuse |
//! | should run, a restart is asked for, or its guest stays down | make it | delete it, make it anew | delete it, make it anew | wait | refuse |
//! | should be down | nothing | delete it | delete it | wait | nothing |
//! | is halting (its guest has shut down) | nothing | leave it | leave it | wait | nothing |
//!
//! A Pod has the machine's name, so the API server itself refuses a second one; a Pod that is going is waited for and never
//! removed by force: the most that a person can ask for is a grace period of one second
//! ([`FORCE_STOP_ANNOTATION`]). Two Pods never run one machine. A Pod is not made while something that it may mount is on
//! its way out or is somebody else's, nor what makes Pods in another way than before while a Pod of the former way lives, or what
//! may make one: changed templates neither end a guest nor start a second one.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use k8s_openapi::{
    apimachinery::pkg::apis::meta::v1::Time,
    jiff::{SignedDuration, Timestamp},
};
use kube::ResourceExt;
use serde_json::{Map, Value, json};

use crate::{
    api::{PendingChange, VirtualMachine, status::Retry},
    claims,
    object::{
        COMPONENT_LABEL, CONTAINER_NAME, FORCE_STOP_ANNOTATION, HASH_ANNOTATION, LIFETIME_ANNOTATION, Lifetime,
        ObjectKey, RESTARTED_ANNOTATION, Rendered, Update, VERSION_ANNOTATION, is_builtin_kind,
    },
    observed::{Json, Object, Observed, Part},
    power::{self, Power, Wanted, power},
};

pub mod conflict;
pub mod kinds;
pub mod pending;

/// How long after its beginning a Pod that ended is made again: at the earliest, and at the latest. The kubelet's numbers for
/// containers (<https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/#restart-policy>).
const RETRY: (SignedDuration, SignedDuration) = (SignedDuration::from_secs(10), SignedDuration::from_mins(5));
/// A Pod that lived this long is not one that ends at once.
const SUCCESS: SignedDuration = SignedDuration::from_mins(10);
/// How long after its grace period a Pod may need to go. The kubelet itself adds a little
/// (<https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/#pod-termination>).
const OVERDUE: SignedDuration = SignedDuration::from_secs(30);
/// The grace period of a Pod that is not to wait for its guest, in seconds. With 0 the API server would forget the Pod
/// before the node has ended it.
const NO_GRACE: i64 = 1;
/// A Pod that is to end within this needs no shorter grace period.
const SOON: SignedDuration = SignedDuration::from_secs(10);

/// What is to be done, in this order; actions of one step do not depend on each other.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// Whether the machine should run.
    pub power: Power,
    /// What a Pod mounts comes before the Pod, what is not needed any more goes last.
    pub steps: [Vec<Action>; 3],
    /// What is waited for; the watch wakes us.
    pub waits: Vec<Wait>,
    /// When to look again though nothing has changed.
    pub again_after: Option<Duration>,
    /// What the running machine does not have yet and gets with its next start.
    pub pending: Vec<PendingChange>,
    /// What `status.retry` should say.
    pub retry: Option<Retry>,
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
    /// Deletion.
    Delete {
        /// The object.
        key: ObjectKey,
        /// Its UID.
        uid: String,
        /// Why.
        why: Why,
        /// The grace period in seconds; the object's own when `None`.
        grace: Option<i64>,
    },
}

/// Why an object is deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// The machine should be down.
    Stop,
    /// Somebody asked for a restart.
    Restart,
    /// It has ended and is made anew.
    Ended,
    /// Somebody does not want to wait for the guest.
    Force,
    /// It is not rendered any more.
    Superfluous,
}

/// What must happen before the rest can be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wait {
    /// An object that is being deleted must be gone.
    Gone(ObjectKey),
    /// An object of that name is not ours and must go away.
    NotOurs(ObjectKey),
    /// A Pod should be gone already: its node does not answer.
    Overdue(ObjectKey),
    /// A Pod should be gone already: it has ended, but something keeps it.
    Kept(ObjectKey),
    /// A Pod that ended is made again a little later.
    Retry(ObjectKey),
}

/// What there is under the name of a rendered object.
#[derive(Clone, Copy)]
enum Life<'a> {
    Absent,
    Alive(&'a Arc<Object>),
    Ended(&'a Arc<Object>),
    Going(&'a Arc<Object>),
    NotOurs,
}

/// The machine's Pod: the one of its name or, if its templates make what makes the Pod (a StatefulSet), the runner's Pod that
/// belongs to that.
pub fn pod<'a>(vm: &VirtualMachine, observed: &'a Observed) -> Option<&'a Arc<Object>> {
    let (name, uid) = (vm.name_any(), vm.uid().unwrap_or_default());
    let mut pods = observed.objects.iter().filter(|object| object.key.is_pod());
    let is_runner = |pod: &Object| {
        pod.is_ours() && pod.labels.get(COMPONENT_LABEL).is_some_and(|component| component == CONTAINER_NAME)
    };
    // What owns it may be gone already while it ends.
    let is_made = |pod: &Object| pod.key.name != name && !pod.belongs_to(&uid) && is_runner(pod);
    let indirect = |pod: &Object| is_made(pod) || is_of_the_oldest(&name, pod);
    pods.clone().find(|pod| pod.key.name == name && pod.belongs_to(&uid)).or_else(|| pods.find(|pod| indirect(pod)))
}

/// The Pod of an earlier machine of that name: it goes, but its guest may still run.
pub(crate) fn predecessor<'a>(vm: &VirtualMachine, observed: &'a Observed) -> Option<&'a Arc<Object>> {
    let (name, uid) = (vm.name_any(), vm.uid().unwrap_or_default());
    let mut pods = observed.objects.iter().filter(|object| object.key.is_pod() && object.key.name == name);
    pods.find(|pod| pod.is_ours() && !pod.belongs_to(&uid))
}

/// Whether a Pod is what releases before 3.4 made of a machine, by a StatefulSet of its name. It does not say that it is a
/// runner's.
fn is_of_the_oldest(vm: &str, pod: &Object) -> bool {
    pod.key.name == format!("{vm}-0") && pod.is_ours() && !pod.labels.contains_key(COMPONENT_LABEL)
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
    plan.power = power(vm, pod(vm, observed).map(AsRef::as_ref), observed.now);
    // Where something else makes the Pod, it is not for us to make it again.
    let makes_pod = rendered.is_none_or(|rendered| rendered.iter().any(|object| object.key.is_pod()));
    let retry = vm.status.as_ref().and_then(|status| status.retry.clone());
    plan.retry = retry.filter(|_| plan.power.wanted == Wanted::Up && makes_pod);
    let uid = vm.uid().unwrap_or_default();
    let (running, standing): (Vec<_>, Vec<_>) = rendered
        .unwrap_or_default()
        .iter()
        .map(|object| (object, life(object, observed, &uid)))
        .partition(|(object, _)| object.lifetime == Lifetime::Running);
    for (object, life) in standing {
        plan.standing(vm, object, life);
    }
    let superfluous = observed.objects.iter().filter(|object| is_superfluous(object, &uid, rendered));
    let no_pod = pod(vm, observed).is_none();
    let (staying, going): (Vec<_>, Vec<_>) =
        superfluous.partition(|object| plan.stays(vm, object, rendered.is_some(), no_pod));
    if let (Wanted::Up, true, Some(rendered)) = (plan.power.wanted, no_pod, rendered) {
        // It may make a Pod any moment, and that would be the second.
        let is_left =
            |object: &&Arc<Object>| makes_pods(object) && object.was_made_for(&uid) && !is_rendered(object, rendered);
        plan.waits.extend(observed.objects.iter().filter(is_left).map(|object| Wait::Gone(object.key.clone())));
    }
    // Where the templates call the Pod otherwise, the predecessor's still has the disks.
    let is_rendered_too = |pod: &Object| running.iter().any(|(object, _)| object.key == pod.key);
    if let Some(predecessor) = predecessor(vm, observed)
        && plan.power.wanted == Wanted::Up
        && !is_rendered_too(predecessor)
    {
        plan.wait_for_end(predecessor, observed);
    }
    let may_start = plan.waits.is_empty();
    // The Pod, if it is not what is rendered, nor made by that.
    let is_maker = |(object, life): &(&Rendered, Life<'_>)| !object.key.is_pod() && matches!(life, Life::Alive(_));
    let former = pod(vm, observed).filter(|pod| {
        let is_made = !pod.belongs_to(&uid) && staying.is_empty() && running.iter().any(is_maker);
        !is_made && !is_rendered_too(pod)
    });
    if let Some(former) = former {
        plan.end_oldest(vm, former, rendered.is_some());
    }
    for (object, life) in running {
        match (former, life) {
            (Some(former), Life::Absent) if plan.power.wanted == Wanted::Up => {
                plan.pending.push(pending::instead_of(object, former));
                let wait = Wait::Gone(former.key.clone());
                if !plan.waits.contains(&wait) {
                    plan.waits.push(wait);
                }
            }
            _ => plan.running(vm, object, life, may_start, observed),
        }
    }
    for object in going {
        let why = match (object.key.is_pod(), plan.power.wanted) {
            (true, Wanted::Up) if has_ended(object) => Why::Ended,
            (true, Wanted::Up) => Why::Restart,
            (true, _) => Why::Stop,
            (false, _) => Why::Superfluous,
        };
        // What the guest runs in hangs on nothing else: refused objects do not keep a machine up that should be down.
        let step = if lives_while_running(object) { 0 } else { 2 };
        plan.steps[step].push(delete(object, why));
    }
    plan
}

fn life<'a>(object: &Rendered, observed: &'a Observed, uid: &str) -> Life<'a> {
    match observed.get(&object.key) {
        None => Life::Absent,
        Some(found) if object.lifetime == Lifetime::Keep && !object.key.is_claim() && !found.is_ours() => Life::NotOurs,
        Some(found) if object.lifetime != Lifetime::Keep && !found.belongs_to(uid) => {
            // One whose machine was deleted is on its way out; the watch tells when it is gone.
            if found.deleting.is_some() || found.is_ours() { Life::Going(found) } else { Life::NotOurs }
        }
        Some(found) if found.deleting.is_some() => Life::Going(found),
        Some(found) if has_ended(found) => Life::Ended(found),
        Some(found) => Life::Alive(found),
    }
}

/// Whether it is a Pod whose containers have ended for good.
pub(crate) fn has_ended(object: &Object) -> bool {
    object.key.is_pod() && matches!(object.text(Part::Status, "/phase"), Some("Succeeded" | "Failed"))
}

/// Whether a container of a Pod may run, as far as its kubelet has said. One that has ended may have been started again since: only
/// the Pod's phase is the last word.
fn may_run(pod: &Object) -> bool {
    pod.text(Part::Spec, "/nodeName").is_some() && !has_ended(pod)
}

/// Whether an object was made to go with the machine's power.
fn lives_while_running(object: &Object) -> bool {
    object.key.is_pod() || object.annotations.get(LIFETIME_ANNOTATION).is_some_and(|lifetime| lifetime == "running")
}

/// Whether an object that is there while the machine runs may be what makes its Pod, such as a StatefulSet. The kinds that the
/// built-in templates make can't.
fn makes_pods(object: &Object) -> bool {
    lives_while_running(object) && !is_builtin_kind(&object.key.types())
}

/// The grace period of a Pod that is not to wait for its guest any longer, also of one that is being deleted already. Before
/// Kubernetes 1.33 the API server counts it from the first request on
/// (<https://github.com/kubernetes/kubernetes/pull/122646>); a shorter one would end in the past, where the Pod's token is not
/// valid any more, and its runner has to ask whether it is forced. Where it counts from now on, what is too long then is
/// shortened once more.
fn grace_until_now(found: &Object, now: Timestamp) -> i64 {
    let given = SignedDuration::from_secs(found.grace.unwrap_or_default());
    // The API server takes any number for the period.
    let asked = found.deleting.and_then(|end| end.checked_sub(given).ok());
    let since = asked.map_or(0, |asked| now.duration_since(asked).as_secs());
    since.max(0) + NO_GRACE
}

/// How long a Pod lived that has ended, by what the cluster says: until the last of its containers ended, or the last of its
/// conditions changed. One without any never began.
fn lived(pod: &Object) -> SignedDuration {
    let ends = pod.containers().map(|item| &item["state"]["terminated"]["finishedAt"]);
    let conditions = pod.status["conditions"].as_array().into_iter().flatten();
    let changes = conditions.map(|item| &item["lastTransitionTime"]);
    let times = ends.chain(changes).filter_map(|time| time.as_str()?.parse::<Timestamp>().ok());
    let end = times.max().zip(pod.created).map(|(end, created)| end.duration_since(created));
    end.unwrap_or_default().max(SignedDuration::ZERO)
}

fn delete(found: &Object, why: Why) -> Action {
    Action::Delete { key: found.key.clone(), uid: found.uid.clone(), why, grace: None }
}

impl Plan {
    /// Whether an object is applied or labelled.
    pub fn writes(&self, key: &ObjectKey) -> bool {
        self.steps.iter().flatten().any(|action| match action {
            Action::Apply { object, .. } => object.key == *key,
            Action::Label { key: labelled, .. } => labelled == key,
            Action::Delete { .. } => false,
        })
    }

    /// Whether an object that is not rendered is left alone: a guest is killed by no templates, only by what people want. A
    /// restart takes what can be made anew, and where there is no Pod, what made it keeps no guest.
    fn stays(&self, vm: &VirtualMachine, object: &Object, can_be_made_anew: bool, no_pod: bool) -> bool {
        let is_over = self.power.wanted == Wanted::Up
            && can_be_made_anew
            && (no_pod && makes_pods(object) || has_ended(object) || self.is_made_anew(vm, object));
        lives_while_running(object) && self.power.wanted != Wanted::Down && !is_over
    }

    /// Whether an object that lives while the machine runs is ended so that it can be made again.
    fn is_made_anew(&self, vm: &VirtualMachine, object: &Object) -> bool {
        self.power.anew || power::is_restart_wanted(vm, object)
    }

    /// An object that lives while the machine runs: the table above.
    fn running(
        &mut self,
        vm: &VirtualMachine,
        object: &Rendered,
        life: Life<'_>,
        may_start: bool,
        observed: &Observed,
    ) {
        let is_forced = |found: &Object| vm.annotations().get(FORCE_STOP_ANNOTATION) == Some(&found.uid);
        let restart = vm.annotations().get(RESTARTED_ANNOTATION);
        match (self.power.wanted, life) {
            (Wanted::Up, Life::Absent) if may_start => {
                let object = with_restart(object, restart);
                self.steps[1].push(Action::Apply { object, uid: None });
            }
            (Wanted::Up, Life::Alive(found) | Life::Ended(found)) if self.is_made_anew(vm, found) => {
                self.replace(found, Why::Restart, observed);
            }
            (Wanted::Up, Life::Alive(found)) => {
                if object.key.is_pod()
                    && let Some(retry) = &self.retry
                {
                    // It was made about then, by this clock; anything later is none of it.
                    let success = retry.next.0.min(observed.now) + SUCCESS;
                    if success > observed.now {
                        self.look_again(success, observed);
                    } else {
                        self.retry = None;
                    }
                }
                // What a restart left on the object stays there, or it would look like a new one.
                let object = with_restart(object, found.annotations.get(RESTARTED_ANNOTATION));
                self.change(1, vm, &object, found);
                // Where the machine does not say what to request, that follows from its current CPUs and memory, and those are
                // live: nothing that the guest has waits for a restart.
                if vm.spec.resources.is_none() {
                    self.pending.retain(|change| !is_request_of_runner(change));
                }
            }
            (Wanted::Up, Life::Ended(found)) => self.ended(found, observed),
            (Wanted::Down, Life::Alive(found) | Life::Ended(found)) => {
                let why = if is_forced(found) { Why::Force } else { Why::Stop };
                self.replace(found, why, observed);
            }
            (_, Life::Going(found)) => {
                let left = found.deleting.map_or(OVERDUE, |end| end.duration_since(observed.now));
                if is_forced(found) && left > SOON {
                    self.replace(found, Why::Force, observed);
                } else {
                    self.wait_for_end(found, observed);
                }
            }
            (Wanted::Up, Life::NotOurs) => self.waits.push(Wait::NotOurs(object.key.clone())),
            (Wanted::Up, Life::Absent)
            | (Wanted::Down, Life::Absent | Life::NotOurs)
            | (Wanted::Halting, Life::Absent | Life::Alive(_) | Life::Ended(_) | Life::NotOurs) => {}
        }
    }

    /// Ends the Pod of a release before 3.4 when that is wanted, and takes away what would make it anew.
    fn end_oldest(&mut self, vm: &VirtualMachine, pod: &Object, can_be_made_anew: bool) {
        let why = match self.power.wanted {
            Wanted::Down => Why::Stop,
            Wanted::Up if can_be_made_anew && self.is_made_anew(vm, pod) => Why::Restart,
            _ => return,
        };
        if !is_of_the_oldest(&vm.name_any(), pod) || pod.deleting.is_some() {
            return;
        }
        let key = ObjectKey { api_version: "apps/v1".into(), kind: "StatefulSet".into(), name: vm.name_any() };
        self.steps[0].push(match pod.owners.first() {
            // Its Pod goes with it.
            Some(uid) => Action::Delete { key, uid: uid.clone(), why, grace: None },
            None => delete(pod, why),
        });
        self.waits.push(Wait::Gone(pod.key.clone()));
    }

    fn replace(&mut self, found: &Object, why: Why, observed: &Observed) {
        let grace = (why == Why::Force).then(|| grace_until_now(found, observed.now));
        self.steps[0].push(Action::Delete { key: found.key.clone(), uid: found.uid.clone(), why, grace });
        self.waits.push(Wait::Gone(found.key.clone()));
    }

    fn wait_for_end(&mut self, found: &Object, observed: &Observed) {
        match found.deleting.map(|end| end.checked_add(OVERDUE).unwrap_or(Timestamp::MAX)) {
            Some(end) if end <= observed.now => {
                let wait = if may_run(found) { Wait::Overdue } else { Wait::Kept };
                self.waits.push(wait(found.key.clone()));
            }
            end => {
                self.waits.push(Wait::Gone(found.key.clone()));
                if let Some(end) = end {
                    self.look_again(end, observed);
                }
            }
        }
    }

    /// Waits for a time. Clocks jump, and a timer does not jump with them, so it is looked at again before long.
    fn look_again(&mut self, time: Timestamp, observed: &Observed) {
        let (_, longest) = RETRY;
        let pause = observed.now.duration_until(time).min(longest).try_into().ok();
        self.again_after = self.again_after.into_iter().chain(pause).min();
    }

    /// A Pod that ended while its machine should run is made anew, after a pause that doubles with each that does not last and
    /// counts from when it was made.
    fn ended(&mut self, found: &Object, observed: &Observed) {
        let (first, longest) = RETRY;
        let lived = lived(found);
        let retry = self.retry.take();
        // All that have ended wait for the same time.
        let waits = |uid: &str| observed.objects.iter().any(|other| other.uid == uid && has_ended(other));
        let known = retry.as_ref().filter(|retry| retry.pod_uid == found.uid || waits(&retry.pod_uid));
        let failed_before = retry.as_ref().filter(|_| lived <= SUCCESS);
        let next_count = || failed_before.map_or(1, |retry| retry.count.saturating_add(1));
        let count = known.map_or_else(next_count, |retry| retry.count);
        let pause = first.saturating_mul(1 << count.saturating_sub(1).min(10)).min(longest);
        // The machine's clock may be another one than the API server's and the node's, and it may jump.
        let next = known.map_or(observed.now + (pause - lived).max(SignedDuration::ZERO), |retry| retry.next.0);
        let next = next.min(observed.now + pause);
        let pod_uid = known.map_or(&found.uid, |retry| &retry.pod_uid).clone();
        self.retry = Some(Retry { count, pod_uid, next: Time(next) });
        if next > observed.now {
            self.waits.push(Wait::Retry(found.key.clone()));
            self.look_again(next, observed);
        } else {
            self.replace(found, Why::Ended, observed);
        }
    }

    /// An object that is there whether or not the machine runs.
    fn standing(&mut self, vm: &VirtualMachine, object: &Rendered, life: Life<'_>) {
        match life {
            Life::Absent => self.steps[0].push(Action::Apply { object: object.clone(), uid: None }),
            Life::Alive(found) | Life::Ended(found) => self.change(0, vm, object, found),
            // A claim that is going stays until its Pod is gone, with all that is on it.
            Life::Going(_) => self.waits.push(Wait::Gone(object.key.clone())),
            Life::NotOurs => self.waits.push(Wait::NotOurs(object.key.clone())),
        }
    }

    /// An object that exists: is it as it should be?
    fn change(&mut self, step: usize, vm: &VirtualMachine, object: &Rendered, found: &Arc<Object>) {
        let same = found.annotations.get(HASH_ANNOTATION) == Some(&object.hash);
        match object.update {
            // Deleted with `--cascade=orphan`, its machine left it without an owner.
            Update::Once => {
                if let Some(owners) = lost_owners(object, found) {
                    let patch = json!({ "metadata": { "ownerReferences": owners } });
                    self.steps[step].push(Action::Label { key: object.key.clone(), uid: found.uid.clone(), patch });
                }
            }
            Update::AtStart => {
                if let Some(patch) = labelling(object, found) {
                    self.steps[step].push(Action::Label { key: object.key.clone(), uid: found.uid.clone(), patch });
                }
                if !same {
                    self.pending.extend(pending::changes(object, found));
                }
            }
            Update::Live if object.key.is_claim() => {
                // What the cluster refused for the same spec is not asked for again.
                let wanted = claims::as_existing(object, found, claims::refused_growth(vm, object, found).is_none());
                // What the API server made of the spec is not ours to put back.
                let mut ours = Value::clone(&object.value);
                if let Some(spec) = ours["spec"].as_object_mut() {
                    spec.retain(|field, _| wanted.value["spec"].get(field).is_some());
                }
                let grows = claims::requested_size(&wanted.value["spec"]) != claims::requested_size(&found.spec);
                if !same || grows || !found.owns_all_of(&ours) {
                    self.steps[step].push(Action::Apply { object: wanted, uid: Some(found.uid.clone()) });
                }
            }
            Update::Live => {
                if !same || !found.owns_all_of(&object.value) {
                    self.steps[step].push(Action::Apply { object: object.clone(), uid: Some(found.uid.clone()) });
                }
            }
        }
    }
}

/// Whether the runner is to have other CPUs or memory than it has.
fn is_request_of_runner(change: &PendingChange) -> bool {
    let requests = format!("{}Pod/spec.containers[{CONTAINER_NAME}].resources.requests.", pending::PREFIX);
    let what = change.path.strip_prefix(&requests);
    matches!(what, Some("cpu" | "memory")) && change.current.is_some() && change.wanted.is_some()
}

/// The object with the restart that it was made after.
fn with_restart(object: &Rendered, restart: Option<&String>) -> Rendered {
    let mut object = object.clone();
    if let Some(restart) = restart {
        Arc::make_mut(&mut object.value)["metadata"]["annotations"][RESTARTED_ANNOTATION] = json!(restart);
    }
    object
}

/// Annotations that speak of how the whole object was made, so they do not change without it.
const OF_THE_WHOLE: [&str; 3] = [HASH_ANNOTATION, VERSION_ANNOTATION, RESTARTED_ANNOTATION];

/// Annotations that only make the kubelet look again at what a Pod mounts
/// (<https://kubernetes.io/docs/concepts/configuration/configmap/#mounted-configmaps-are-updated-automatically>). A Pod without
/// a node mounts nothing yet, so they wait until it has one.
const FOR_THE_KUBELET: [&str; 2] = ["vmrunner.jdrupes.org/cmVersion", "vmrunner.jdrupes.org/dpVersion"];

/// A merge patch that gives the object the rendered labels, annotations and owner. Its hash stays: it says what the rest was
/// made from.
fn labelling(object: &Rendered, found: &Object) -> Option<Value> {
    let mut metadata = Map::new();
    let has_kubelet = !found.key.is_pod() || found.text(Part::Spec, "/nodeName").is_some();
    let waits = |name: &str| OF_THE_WHOLE.contains(&name) || (FOR_THE_KUBELET.contains(&name) && !has_kubelet);
    let ours: Vec<Value> = [&found.owned, &found.patched].into_iter().flatten().map(Json::value).collect();
    for (field, current) in [("labels", &found.labels), ("annotations", &found.annotations)] {
        let wanted = texts(&object.value["metadata"][field]);
        let mut change: Map<String, Value> = wanted
            .iter()
            .filter(|(name, value)| !waits(name) && current.get(*name) != Some(value))
            .map(|(name, value)| (name.clone(), json!(value)))
            .collect();
        let ours = ours.iter().filter_map(|fields| fields["f:metadata"][format!("f:{field}")].as_object());
        for name in ours.flatten().filter_map(|(name, _)| name.strip_prefix("f:")) {
            if current.contains_key(name) && !wanted.contains_key(name) && !waits(name) {
                change.insert(name.to_owned(), Value::Null);
            }
        }
        if !change.is_empty() {
            metadata.insert(field.to_owned(), Value::Object(change));
        }
    }
    if let Some(owners) = lost_owners(object, found) {
        metadata.insert("ownerReferences".into(), owners.clone());
    }
    (!metadata.is_empty()).then(|| json!({ "metadata": metadata }))
}

/// The rendered owners of an object that has none any more.
fn lost_owners<'a>(object: &'a Rendered, found: &Object) -> Option<&'a Value> {
    object.value["metadata"].get("ownerReferences").filter(|_| found.owners.is_empty())
}

fn texts(value: &Value) -> BTreeMap<String, String> {
    let entries = value.as_object().into_iter().flatten();
    entries.filter_map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned()))).collect()
}

/// An object that was rendered once and is not any more. Claims never are. While templates can't be rendered, Pods are: they
/// go with the machine's power.
fn is_superfluous(object: &Object, uid: &str, rendered: Option<&[Rendered]>) -> bool {
    if !object.was_made_for(uid) || object.key.is_claim() || object.deleting.is_some() {
        return false;
    }
    match rendered {
        Some(rendered) => !is_rendered(object, rendered),
        None => object.key.is_pod(),
    }
}

fn is_rendered(object: &Object, rendered: &[Rendered]) -> bool {
    rendered.iter().any(|rendered| rendered.key.is_same_object(&object.key))
}

#[cfg(test)]
mod tests;
