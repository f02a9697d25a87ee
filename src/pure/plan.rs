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
//! | should run, and no guest has started in its Pod, which is not as rendered any more | | delete it, create it again | | | |
//! | should be down | nothing | delete it | delete it | wait | nothing |
//! | is halting: its guest has shut down, and the status does not say so yet | nothing | leave it | leave it | wait | nothing |
//!
//! [`Planner::runtime_object`] is this table. [`unstarted`] says in which Pod no guest can have started: no node could take it, or the
//! kubelet reports that none of the containers that can run QEMU has ever started, and why. Only such a Pod is replaced because of a change.
//!
//! Two Pods never run the same VM:
//! - The Pod has the VM's name, so the API server refuses a second one.
//! - When a Pod is being deleted, the manager waits until it is gone, and never removes it from the API server by force. A person can at
//!   most shorten its grace period to one second ([`force_stop`](mod@crate::power::force_stop)).
//! - The manager creates no Pod while an object that the Pod mounts is being deleted or belongs to someone else. What it does not mount
//!   holds up nothing ([`beside`]).
//! - Every Pod of the VM counts, whatever its name is, whichever labels it lost and whatever made it ([`instances`]). Templates may name the
//!   Pod otherwise, or render a maker of Pods (a StatefulSet) instead of it. The new one is created only when the old Pod, and everything
//!   that may make it again, is gone. So changed templates neither end a guest nor start a second one.
//! - The manager creates no Pod while a Pod of others can write to the VM's claims, and none that could write to a claim beside any other
//!   ([`Planner::writer_beside`]). Pods that serve disks are [`helpers`].

use std::{sync::Arc, time::Duration};

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::ResourceExt;
use serde_json::{Value, json};

use crate::{
    api::{self, PendingChange, VirtualMachine, status::Retry},
    claims,
    object::{AGENT_NAME, LIFETIME_ANNOTATION, Lifetime, ObjectKey, RESTARTED_ANNOTATION, Rendered, Update},
    observed::{Object, Observed, whose::Whose},
    power::{
        self, Power, WantedPower,
        force_stop::{ForceStop, force_stop},
        power,
    },
};

mod action;
pub mod beside;
pub mod conflict;
pub mod effect;
mod helpers;
pub mod instances;
pub mod kinds;
mod metadata;
pub mod pending;
mod preconditions;
mod retry;
pub mod unstarted;

pub use self::{
    action::{Action, DeleteReason, Wait},
    metadata::image_annotation,
    preconditions::{Fact, Otherwise, Part, Precondition},
};
use self::{
    beside::is_beside,
    instances::Instances,
    preconditions::preconditions,
    unstarted::{late_at, untaken_at},
};

/// The time after the end of its grace period that a Pod may need until it is gone. The kubelet itself adds a little
/// (<https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/#pod-termination>). After that, also the time between two looks at
/// its node.
const OVERDUE: SignedDuration = SignedDuration::from_secs(30);
/// The grace period in seconds of a Pod that does not wait for its guest. With 0 the API server would remove the Pod before the node
/// has ended it.
const FORCED_GRACE: i64 = 1;
/// If a Pod ends within this time anyway, its grace period is not shortened.
const SOON: SignedDuration = SignedDuration::from_secs(10);
/// The time until the manager looks again for objects that do not name the VM. No event of a watch triggers the VM.
const LOOK_AGAIN: SignedDuration = SignedDuration::from_secs(5);
/// The longest time until the VM is reconciled again when the plan waits for a time. Clocks jump, and timers do not jump with them.
const LONGEST_REQUEUE: SignedDuration = SignedDuration::from_mins(5);

/// What the manager does about one VM.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// Whether the VM should run.
    pub power: Power,
    /// Whether a Pod ends without waiting for its guest.
    pub force_stop: ForceStop,
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
    /// What must be true before the first write, in the order in which it is asked.
    pub preconditions: Vec<Precondition>,
    /// The names of the claims that nobody had, and that become the VM's.
    pub taken_claims: Vec<String>,
}

impl Plan {
    /// Whether the plan applies or labels the object.
    pub fn writes(&self, key: &ObjectKey) -> bool {
        self.steps.iter().flatten().any(|action| match action {
            Action::Apply { object, uid: _ } => object.key == *key,
            Action::Label { key: labelled, .. } | Action::Image { key: labelled, .. } => labelled == key,
            Action::Delete { .. } => false,
        })
    }

    /// Leaves out a part of the plan, because a precondition of it is not true.
    pub fn leave_out(&mut self, part: Part) {
        match part {
            Part::AgentsImage => self.steps.iter_mut().for_each(|step| step.retain(|action| !action.is_image())),
            Part::Restart => self.keep_up(),
            Part::Deletions => self.steps.iter_mut().for_each(|step| step.retain(|action| !action.is_delete())),
            Part::Everything => self.steps.iter_mut().for_each(Vec::clear),
        }
    }

    /// Leaves the guest up that would be taken down for a restart.
    fn keep_up(&mut self) {
        let kept: Vec<ObjectKey> = self.restarted().cloned().collect();
        // With what makes the Pod, the Pod stays.
        let makes_pod = kept.iter().any(|key| !key.is_pod());
        self.steps.iter_mut().for_each(|step| step.retain(|action| !action.restarts()));
        let is_kept = |key: &ObjectKey| kept.contains(key) || makes_pod && key.is_pod();
        self.waits.retain(|wait| !matches!(wait, Wait::Gone(key) if is_kept(key)));
    }

    /// Whether a guest that is taken down for a restart would stay down, as far as the plan knows: it waits for a claim, or for something that its Pod
    /// mounts. What goes with the Pod is no such wait: a claim that is being deleted, and what makes Pods.
    fn would_stay_down(&self, rendered: &[Rendered]) -> bool {
        let restarted: Vec<&ObjectKey> = self.restarted().collect();
        let goes_with_guest = |key: &ObjectKey| {
            key.is_pod() || key.is_claim() || restarted.contains(&key) || !rendered.iter().any(|it| it.key == *key)
        };
        self.waits.iter().any(|wait| match wait {
            Wait::ClaimMissing(_) | Wait::ClaimForeign(..) | Wait::ClaimInUse(_) => true,
            Wait::NotOurs(key) => !is_beside(key, rendered),
            Wait::Gone(key) => !goes_with_guest(key) && !is_beside(key, rendered),
            Wait::Overdue(_) | Wait::NotRemoved(_) | Wait::Retry(_) | Wait::HelperNotReady(_) => false,
        })
    }

    /// What is deleted for a restart.
    fn restarted(&self) -> impl Iterator<Item = &ObjectKey> {
        self.steps.iter().flatten().filter(|action| action.restarts()).map(Action::key)
    }

    /// The node of a Pod that should be gone already and may still run.
    pub fn overdue_on<'a>(&self, observed: &'a Observed) -> Option<&'a str> {
        self.waits.iter().find_map(|wait| match wait {
            Wait::Overdue(key) => observed.get(key)?.node_name(),
            Wait::Gone(_)
            | Wait::NotOurs(_)
            | Wait::NotRemoved(_)
            | Wait::Retry(_)
            | Wait::ClaimInUse(_)
            | Wait::ClaimForeign(..)
            | Wait::ClaimMissing(_)
            | Wait::HelperNotReady(_) => None,
        })
    }

    /// Whether the plan creates what runs the guest.
    pub fn starts(&self) -> bool {
        self.steps.iter().flatten().any(Action::starts)
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

/// Decides what to do about the objects of a VM.
///
/// `rendered` is `None` while the templates can't be rendered. Then the plan follows only the VM's power: nothing is created or changed, and
/// nothing is deleted except the Pod of a VM that should be down. The same holds for a VM that is being deleted and that a finalizer keeps;
/// the garbage collector deletes its objects when it is gone. A restart needs a new Pod, so neither of the two is restarted.
pub fn plan(vm: &VirtualMachine, observed: &Observed, rendered: Option<&[Rendered]>) -> Plan {
    let rendered = rendered.filter(|_| vm.metadata.deletion_timestamp.is_none());
    let mut planner = Planner::new(vm, observed, rendered);
    planner.permanent_objects();
    planner.take_down_makers();
    planner.wait_for_previous_pod();
    planner.wait_for_others();
    planner.runtime_objects();
    planner.delete_unrendered();
    planner.hold_restart_for_others();
    planner.finish()
}

/// The step in which what runs a guest is deleted. For a restart it goes only when all that its Pod mounts could be written; a guest that should be down
/// goes whatever else fails.
fn step_of_delete(reason: DeleteReason) -> usize {
    usize::from(reason == DeleteReason::Restart)
}

/// Plans one VM. Its first methods are the steps of [`plan`].
struct Planner<'a> {
    vm: &'a VirtualMachine,
    observed: &'a Observed,
    rendered: Option<&'a [Rendered]>,
    instances: Instances<'a, 'a>,
    /// Whether an object without an owner becomes the VM's.
    adopts: bool,
    plan: Plan,
}

impl<'a> Planner<'a> {
    fn new(vm: &'a VirtualMachine, observed: &'a Observed, rendered: Option<&'a [Rendered]>) -> Self {
        let instances = Instances::new(vm, observed);
        let (pod, previous) = (instances.active().map(AsRef::as_ref), instances.previous().map(AsRef::as_ref));
        let power = power(vm, pod, previous, observed.now);
        // A Pod that a controller creates is created again by the controller, not by the manager.
        let renders_pod = rendered.is_none_or(|rendered| rendered.iter().any(|object| object.key.is_pod()));
        let retry = vm.status.as_ref().and_then(|status| status.retry.clone());
        let retry = retry.filter(|_| power.wanted == WantedPower::Up && renders_pod);
        let force_stop = force_stop(vm, observed, pod, power.wanted);
        let mut plan = Plan { power, force_stop, retry, ..Plan::default() };
        if let Some(end) = plan.power.until.in_force.as_ref().map(|it| it.until.0) {
            plan.requeue_at(end, observed.now);
        }
        Self { vm, observed, rendered, instances, adopts: false, plan }
    }

    /// The plan, without the restart of a guest that would not come back, and with what it presumes.
    fn finish(mut self) -> Plan {
        if self.plan.would_stay_down(self.rendered.unwrap_or_default()) {
            self.plan.keep_up();
        }
        let unrecorded = self.unrecorded_claims();
        // Nothing else would say that a guest has had it.
        if unrecorded.iter().any(|claim| self.observed.claim(claim).is_some_and(|claim| claim.deleting.is_some())) {
            self.plan.leave_out(Part::Deletions);
        }
        let mut plan = self.plan;
        plan.preconditions = preconditions(self.vm, self.observed, &plan, self.adopts, !unrecorded.is_empty());
        plan
    }

    /// The claims that guests have, that may go with the Pods that the plan deletes, and that the status does not name yet. The status of a VM that is
    /// being deleted is read by nobody, and a Pod that is being deleted goes anyway.
    fn unrecorded_claims(&self) -> Vec<String> {
        let mut actions = self.plan.steps.iter().flatten();
        // At rest, and at a start, nobody needs to look for guests.
        if self.vm.metadata.deletion_timestamp.is_some() || !actions.clone().any(Action::is_delete) {
            return Vec::new();
        }
        let guests: Vec<_> = self.instances.guests().chain(self.instances.makers()).map(|object| &object.uid).collect();
        let ends_guest = |action: &Action| matches!(action, Action::Delete { uid, .. } if guests.contains(&uid));
        if !actions.any(ends_guest) {
            return Vec::new();
        }
        let pods = self.instances.guests().filter(|pod| pod.deleting.is_none());
        pods.flat_map(|pod| claims::unrecorded(self.vm, self.observed, self.rendered, pod)).collect()
    }

    fn is_up_wanted(&self) -> bool {
        self.plan.power.wanted == WantedPower::Up
    }

    /// The objects that exist whether or not the VM runs.
    fn permanent_objects(&mut self) {
        let foreign = self.foreign_claims();
        let of_foreign = |object: &Rendered| {
            let text = (!foreign.is_empty() && !object.key.is_claim()).then(|| object.value.to_string());
            text.is_some_and(|text| foreign.iter().any(|claim| text.contains(claim.as_str())))
        };
        for object in self.rendered.into_iter().flatten().filter(|object| object.lifetime != Lifetime::Running) {
            // A Job or a snapshot would read somebody else's data.
            if of_foreign(object) || !self.may_use(object) {
                self.look_again();
                continue;
            }
            match self.existing(object) {
                Existing::Absent if object.key.is_claim() && claims::missing(self.vm, &object.key.name).is_some() => {
                    self.plan.waits.push(Wait::ClaimMissing(object.key.clone()));
                    self.look_again();
                }
                Existing::Absent => self.plan.steps[0].push(Action::Apply { object: object.clone(), uid: None }),
                Existing::Present(found) | Existing::Ended(found) => self.change(0, object, found),
                // A claim that is being deleted exists until its Pod is gone. Then its data is gone too.
                Existing::Deleting(_) => self.plan.waits.push(Wait::Gone(object.key.clone())),
                Existing::NotOurs => self.plan.waits.push(Wait::NotOurs(object.key.clone())),
            }
        }
    }

    /// The claims with names of the VM's disks that are not the VM's.
    fn foreign_claims(&self) -> Vec<String> {
        let claims = self.rendered.into_iter().flatten().filter(|object| object.key.is_claim());
        let is_foreign = |object: &&Rendered| {
            self.observed
                .get(&object.key)
                .is_some_and(|found| matches!(claims::whose(self.vm, self.observed, found), claims::Whose::Foreign(_)))
        };
        claims.filter(is_foreign).map(|object| object.key.name.clone()).collect()
    }

    /// Whether the object is no claim, or one that the VM has or may take. A claim that a Pod of others writes to is not taken.
    fn may_use(&mut self, object: &Rendered) -> bool {
        let Some(found) = self.observed.get(&object.key).filter(|_| object.key.is_claim()) else { return true };
        match claims::whose(self.vm, self.observed, found) {
            claims::Whose::Own | claims::Whose::Former => true,
            claims::Whose::Free => {
                let is_in_use = self.instances.strangers().any(|pod| {
                    let mut mounted = pod.mounted_claims();
                    mounted.any(|(claim, writes)| writes && claim == object.key.name)
                });
                if !is_in_use && found.deleting.is_none() {
                    self.plan.taken_claims.push(object.key.name.clone());
                }
                !is_in_use
            }
            claims::Whose::Foreign(why) => {
                self.plan.waits.push(Wait::ClaimForeign(object.key.clone(), why));
                false
            }
        }
    }

    /// Deletes what makes the VM's Pods and is not rendered, such as the StatefulSet of a release before 3.4: first the maker, because it
    /// would make the Pod again, then its Pods.
    ///
    /// | the VM | a Pod of the maker runs | all its Pods are being deleted, have ended or are gone |
    /// |---|---|---|
    /// | should run | leave both | delete the maker, wait until it is gone |
    /// | should run, and a restart is requested | delete the maker, wait | delete the maker, wait |
    /// | should be down | delete the maker | delete the maker |
    /// | is halting | leave both | leave both |
    fn take_down_makers(&mut self) {
        // While templates can't be rendered, only what runs a guest is certainly not a helper.
        let is_known = |maker: &&Arc<Object>| {
            self.rendered.is_some() || is_runtime_object(maker) || self.instances.pods_of(maker).next().is_some()
        };
        let makers = self.instances.makers().filter(|maker| !self.is_rendered(&maker.key)).filter(is_known);
        for maker in makers.cloned().collect::<Vec<_>>() {
            let pods: Vec<_> = self.instances.pods_of(&maker).collect();
            let runs = pods.iter().any(|pod| pod.deleting.is_none() && !pod.has_ended());
            let is_replaced = self.is_replaced(&maker) || pods.iter().any(|pod| self.is_replaced(pod));
            let reason = match self.plan.power.wanted {
                WantedPower::Down => DeleteReason::Stop,
                WantedPower::Up if self.rendered.is_some() && is_replaced => DeleteReason::Restart,
                WantedPower::Up if self.rendered.is_some() && !runs => DeleteReason::NotRendered,
                WantedPower::Up | WantedPower::Halting => continue,
            };
            if maker.deleting.is_none() {
                self.delete(&maker, reason);
            }
            self.plan.waits.push(Wait::Gone(maker.key.clone()));
        }
    }

    /// Waits for the Pod of a deleted VM with the same name, which still has the disks. If that Pod has the key of a rendered object,
    /// [`Self::runtime_object`] waits for it.
    fn wait_for_previous_pod(&mut self) {
        if self.is_up_wanted() {
            let waits = self.instances.previous_makers().map(|maker| Wait::Gone(maker.key.clone()));
            self.plan.waits.extend(waits);
        }
        if let Some(previous) = self.instances.previous()
            && self.is_up_wanted()
            && !self.is_runtime_key(&previous.key)
        {
            self.wait_until_gone(previous);
        }
    }

    /// Waits for Pods that are not the VM's and can write to its disks. The manager does not delete them.
    fn wait_for_others(&mut self) {
        if self.is_up_wanted() && self.instances.active().is_none() {
            self.wait_for_strangers();
        }
    }

    /// A guest that is taken down for a restart would wait for them, too.
    fn hold_restart_for_others(&mut self) {
        if self.instances.active().is_some() && self.plan.restarted().next().is_some() {
            self.wait_for_strangers();
        }
    }

    fn wait_for_strangers(&mut self) {
        // What has the key of a rendered object is refused anyway.
        let is_found = |pod: &Object| self.is_runtime_key(&pod.key) && self.observed.get(&pod.key).is_some();
        let strangers: Vec<_> = self.instances.strangers().filter(|pod| !is_found(pod)).cloned().collect();
        for pod in strangers {
            self.plan.waits.push(Wait::ClaimInUse(pod.key.clone()));
            self.look_again();
        }
    }

    fn look_again(&mut self) {
        let now = self.observed.now;
        self.plan.requeue_at(now.checked_add(LOOK_AGAIN).unwrap_or(Timestamp::MAX), now);
    }

    /// The objects that exist only while the VM runs.
    fn runtime_objects(&mut self) {
        self.helpers();
        let rendered = self.rendered.unwrap_or_default();
        let may_start = self.plan.waits.iter().all(|wait| is_beside(wait.key(), rendered));
        let unrendered: Vec<&Arc<Object>> = self.unrendered_pods().collect();
        // No event of a watch triggers the VM when a Pod goes that does not name it.
        if self.observed.others.iter().any(|other| unrendered.iter().any(|pod| pod.uid == other.uid)) {
            self.look_again();
        }
        for pod in &unrendered {
            self.unrendered_pod(pod);
        }
        for object in self.runtime_rendered().filter(|object| !object.is_helper) {
            match self.existing(object) {
                // It goes, or is waited for, as a helper that no template renders.
                Existing::Present(found) | Existing::Ended(found) | Existing::Deleting(found) if found.is_helper() => {}
                Existing::Absent if self.is_up_wanted() && !unrendered.is_empty() => {
                    self.wait_for_unrendered_pods(object, &unrendered);
                }
                existing => self.runtime_object(object, existing, may_start),
            }
        }
    }

    /// The objects that no template renders any more, except Pods and what makes them.
    fn delete_unrendered(&mut self) {
        let unrendered: Vec<_> = self.unrendered().filter(|object| !self.is_kept(object)).collect();
        for object in unrendered {
            // What runs with the guest is deleted first: a failure of another action must not keep it while the VM should be down.
            let is_runtime = is_runtime_object(object);
            let goes_with_guest = is_runtime && self.plan.power.wanted == WantedPower::Up && !object.has_ended();
            let reason = if goes_with_guest { DeleteReason::Restart } else { DeleteReason::NotRendered };
            let step = if is_runtime { step_of_delete(reason) } else { 2 };
            self.plan.steps[step].push(self.deletion(object, reason));
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
        if !object.key.is_claim() && !self.instances.contains(found) {
            match self.instances.whose(found) {
                Whose::Vm => {}
                // The garbage collector deletes it. The watch reports when it is gone.
                Whose::Former => return Existing::Deleting(found),
                Whose::Other if found.deleting.is_some() => return Existing::Deleting(found),
                Whose::Other => return Existing::NotOurs,
            }
        }
        if found.deleting.is_some() {
            Existing::Deleting(found)
        } else if found.has_ended() {
            Existing::Ended(found)
        } else {
            Existing::Present(found)
        }
    }

    /// The objects of the VM that templates rendered once and do not render any more: no claims, which are kept, and neither the Pods of
    /// guests nor what makes them, which follow the VM's power.
    fn unrendered(&self) -> impl Iterator<Item = &'a Arc<Object>> {
        let is_of_guest = |object: &Object| {
            self.instances.contains(object) || self.instances.makers().any(|maker| maker.uid == object.uid)
        };
        self.observed.objects.iter().filter(move |object| {
            object.is_made_for(self.vm)
                && !object.key.is_claim()
                && object.deleting.is_none()
                && self.rendered.is_some()
                && !self.is_rendered(&object.key)
                && !is_of_guest(object)
        })
    }

    /// Whether an unrendered object is kept: what exists only while the VM runs stays as long as it does.
    fn is_kept(&self, object: &Object) -> bool {
        is_runtime_object(object)
            && match self.plan.power.wanted {
                WantedPower::Up => !self.is_replaced(object) && !object.has_ended(),
                WantedPower::Halting => true,
                WantedPower::Down => false,
            }
    }

    /// Whether a runtime object is deleted and created again, because a restart is requested or its guest stays down.
    fn is_replaced(&self, object: &Object) -> bool {
        self.plan.power.replace_pod || power::is_restart_wanted(self.vm, object)
    }

    fn is_forced(&self, pod: &Object) -> bool {
        self.plan.force_stop.pod_uid.as_ref() == Some(&pod.uid)
    }

    /// The VM's Pods that are neither rendered nor made by a rendered object.
    fn unrendered_pods(&self) -> impl Iterator<Item = &'a Arc<Object>> {
        let is_maker =
            |object: &Rendered| !object.key.is_pod() && matches!(self.existing(object), Existing::Present(_));
        let is_left = || self.instances.makers().any(|maker| !self.is_rendered(&maker.key));
        let is_of_rendered = move |pod: &Object| {
            let makers: Vec<_> = self.observed.makers_of(pod).collect();
            // A maker that can't be read is known by its owner reference alone, and what made that is not known.
            let is_unknown = makers.last().is_none_or(|top| top.version == 0);
            pod.maker.is_some()
                && (makers.iter().any(|maker| self.is_rendered(&maker.key))
                    || is_unknown && !is_left() && self.runtime_rendered().any(is_maker))
        };
        let is_rendered = |pod: &Object| self.runtime_rendered().any(|it| it.key == pod.key && !it.is_helper);
        self.instances.guests().filter(move |pod| !is_rendered(pod) && !is_of_rendered(pod))
    }

    /// A Pod that other templates or another release made. Changed templates never end a guest; a person does, and a restart if the
    /// Pod can be created again.
    fn unrendered_pod(&mut self, pod: &Arc<Object>) {
        if pod.deleting.is_some() {
            return self.wait_or_force(pod);
        }
        let reason = match self.plan.power.wanted {
            WantedPower::Down if self.is_forced(pod) => DeleteReason::Force,
            WantedPower::Down => DeleteReason::Stop,
            WantedPower::Up if self.rendered.is_some() && self.is_replaced(pod) => DeleteReason::Restart,
            WantedPower::Up
                if self.rendered.is_some() && pod.has_ended() && self.claim_that_goes_with(pod).is_none() =>
            {
                DeleteReason::Ended
            }
            WantedPower::Up | WantedPower::Halting => return,
        };
        match self.observed.makers_of(pod).last() {
            // The Pod would be made again. The garbage collector deletes it with its maker.
            Some(_) if self.instances.is_taken_down(pod) => self.plan.waits.push(Wait::Gone(pod.key.clone())),
            Some(maker) if maker.deleting.is_none() => self.plan.waits.push(Wait::NotOurs(maker.key.clone())),
            Some(_) | None => self.delete_and_wait(pod, reason),
        }
    }

    /// The object is created only when the Pods that other templates created are gone.
    fn wait_for_unrendered_pods(&mut self, object: &Rendered, pods: &[&Arc<Object>]) {
        for pod in pods {
            api::pending::add(&mut self.plan.pending, [pending::created_after_pod(object, pod)]);
            let wait = Wait::Gone(pod.key.clone());
            if !self.plan.waits.contains(&wait) {
                self.plan.waits.push(wait);
            }
        }
    }

    /// The table at the head of this module.
    fn runtime_object(&mut self, object: &Rendered, existing: Existing<'_>, may_start: bool) {
        match (self.plan.power.wanted, existing) {
            (WantedPower::Up, Existing::Absent) => {
                if may_start {
                    self.create_runtime_object(object);
                }
            }
            (WantedPower::Up, Existing::Present(found) | Existing::Ended(found)) if self.is_replaced(found) => {
                self.delete_and_wait(found, DeleteReason::Restart);
            }
            (WantedPower::Up, Existing::Present(found))
                if unstarted::is_outdated(self.vm, object, found, self.observed.now)
                    && self.claim_that_goes_with(found).is_none() =>
            {
                self.delete_and_wait(found, DeleteReason::Changed);
            }
            (WantedPower::Up, Existing::Present(found)) => self.keep_runtime_object(object, found),
            (WantedPower::Up, Existing::Ended(found)) => self.retry_ended(found),
            (WantedPower::Up, Existing::NotOurs) => self.plan.waits.push(Wait::NotOurs(object.key.clone())),
            (WantedPower::Down, Existing::Present(found) | Existing::Ended(found)) => {
                let reason = if self.is_forced(found) { DeleteReason::Force } else { DeleteReason::Stop };
                self.delete_and_wait(found, reason);
            }
            (WantedPower::Up | WantedPower::Down | WantedPower::Halting, Existing::Deleting(found)) => {
                self.wait_or_force(found)
            }
            (WantedPower::Down, Existing::Absent | Existing::NotOurs)
            | (
                WantedPower::Halting,
                Existing::Absent | Existing::Present(_) | Existing::Ended(_) | Existing::NotOurs,
            ) => {}
        }
    }

    /// Creates the object, unless another Pod can write to a disk of it.
    fn create_runtime_object(&mut self, object: &Rendered) {
        if let Some(writer) = self.writer_beside(object) {
            self.plan.waits.push(Wait::ClaimInUse(writer.key.clone()));
            return self.look_again();
        }
        let object = metadata::with_restart(object, self.vm.annotations().get(RESTARTED_ANNOTATION));
        let object = if object.key.is_pod() { metadata::with_images(object) } else { object };
        self.plan.steps[1].push(Action::Apply { object, uid: None });
    }

    fn keep_runtime_object(&mut self, object: &Rendered, found: &Arc<Object>) {
        if object.key.is_pod() && !object.is_helper {
            self.forget_retry_of_lasting_pod();
            for late in [late_at(found), untaken_at(found)].into_iter().flatten() {
                if late > self.observed.now {
                    self.plan.requeue_at(late, self.observed.now);
                }
            }
        }
        // The existing object keeps its restart annotation. Another value would look like a new restart.
        let object = metadata::with_restart(object, found.annotations.get(RESTARTED_ANNOTATION));
        self.change(1, &object, found);
    }

    /// Whether the difference of a Pod is one for which no guest waits.
    fn is_of_no_guest(&self, change: &pending::Difference, pod: &Object) -> bool {
        // Without `resources` in the spec, the requests follow from the current CPUs and memory. The guest gets a change of those while
        // it runs, so nothing waits for a restart.
        let is_derived = self.vm.spec.resources.is_none();
        pending::is_request_before_guest(change, pod) || is_derived && pending::is_runner_request(change, pod)
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
        if let Some(claim) = self.claim_that_goes_with(found) {
            self.plan.waits.push(Wait::Gone(claim.key.clone()));
            return;
        }
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

    fn claim_that_goes_with(&self, pod: &Object) -> Option<&'a Arc<Object>> {
        claims::that_goes_with_pod(self.vm, self.observed, pod)
    }

    fn delete_and_wait(&mut self, found: &Object, reason: DeleteReason) {
        self.delete(found, reason);
        self.plan.waits.push(Wait::Gone(found.key.clone()));
    }

    fn delete(&mut self, found: &Object, reason: DeleteReason) {
        let delete = self.deletion(found, reason);
        self.plan.steps[step_of_delete(reason)].push(delete);
    }

    fn deletion(&self, found: &Object, reason: DeleteReason) -> Action {
        Action::Delete {
            key: found.key.clone(),
            uid: found.uid.clone(),
            reason,
            grace: (reason == DeleteReason::Force).then(|| forced_grace(found, self.observed.now)),
            // A Pod that gets its node or starts at this moment has another version then, and is kept.
            version: (reason == DeleteReason::Changed).then_some(found.version),
            keeps_owned: self.owns_claims(found),
        }
    }

    /// Whether claims would be deleted with the object, with the VM's data: a StatefulSet, and then its Pod, may own its claims
    /// (`persistentVolumeClaimRetentionPolicy`). Those of a Pod's volumes of type `ephemeral` are meant to.
    fn owns_claims(&self, found: &Object) -> bool {
        let mut claims = self.observed.objects.iter().filter(|object| object.key.is_claim());
        claims.any(|claim| claim.is_owned_by(&found.uid) && !found.ephemeral_claims().any(|own| own == claim.key.name))
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
            Some(_) if may_run(found) => {
                self.plan.waits.push(Wait::Overdue(key));
                // The manager does not watch Nodes.
                self.plan.requeue_at(now + OVERDUE, now);
            }
            Some(_) => self.plan.waits.push(Wait::NotRemoved(key)),
        }
    }

    /// Changes an existing object if it is not as rendered.
    fn change(&mut self, step: usize, object: &Rendered, found: &Arc<Object>) {
        let is_same = found.is_as(object);
        let uid = || found.uid.clone();
        let label = |patch| Action::Label { key: object.key.clone(), uid: uid(), patch };
        let is_taken =
            || object.key.is_claim() && !matches!(claims::whose(self.vm, self.observed, found), claims::Whose::Own);
        // While the VM has no Pod, what lasts longer is as its next Pod wants it. Nothing else applies it then.
        let is_start = object.lifetime != Lifetime::Running && self.instances.guests().next().is_none();
        let update = match object.update {
            Update::AtStart if is_start => Update::Live,
            update => update,
        };
        let action = match update {
            // However the template wants it to change, it is noted in the claim whose it is.
            Update::Once | Update::AtStart if is_taken() => self.changed_claim(object, found),
            // `kubectl delete --cascade=orphan` removed the owner.
            Update::Once => metadata::missing_owners(object, found)
                .map(|owners| label(json!({ "metadata": { "ownerReferences": owners } }))),
            Update::AtStart => {
                if !is_same {
                    let mut differences = pending::differences(object, &metadata::with_rendered_images(found));
                    let image = differences.as_mut().and_then(pending::take_agent_image);
                    if let Some(differences) = &mut differences {
                        differences.retain(|change| !self.is_of_no_guest(change, found));
                    }
                    self.plan.steps[step].extend(image.map(|image| Action::Image {
                        key: object.key.clone(),
                        uid: uid(),
                        container: AGENT_NAME.into(),
                        image,
                    }));
                    api::pending::add(&mut self.plan.pending, pending::changes(object, differences));
                }
                metadata::patch(object, found).map(label)
            }
            Update::Live if object.key.is_claim() => self.changed_claim(object, found),
            Update::Live => (!is_same || !found.owns_all_of(&object.value))
                .then(|| Action::Apply { object: object.clone(), uid: Some(uid()) }),
        };
        self.adopts |= action.is_some() && metadata::missing_owners(object, found).is_some();
        self.plan.steps[step].extend(action);
    }

    fn changed_claim(&self, object: &Rendered, found: &Object) -> Option<Action> {
        let may_grow = claims::may_grow(self.vm, object, found);
        let wanted = claims::as_existing(object, found, may_grow);
        // The manager does not restore fields of the spec that the existing claim does not have.
        let mut owned = Value::clone(&object.value);
        owned["metadata"] = wanted.value["metadata"].clone();
        if let Some(spec) = owned["spec"].as_object_mut() {
            spec.retain(|field, _| wanted.value["spec"].get(field).is_some());
        }
        let is_same = found.is_as(object);
        let grows = claims::requested_size(&wanted.value["spec"]) != claims::requested_size(&found.spec);
        let is_others = claims::has_other_vm(self.vm, found);
        let is_taken = is_others || !matches!(claims::whose(self.vm, self.observed, found), claims::Whose::Own);
        let wanted = if is_taken { claims::as_taken(wanted, found) } else { wanted };
        (!is_same || grows || is_others || !found.owns_all_of(&owned))
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

#[cfg(test)]
mod tests;
