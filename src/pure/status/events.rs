//! The events of one reconcile.
//!
//! They are derived from the actions that succeeded and from the difference between the new status and the one before. So a restarted
//! manager records no event again. If the status could not be written, an event is recorded again, and its count increases.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

use super::{Reconciled, string};
use crate::{
    api::{
        Reason, RenderedFrom, VirtualMachine, VirtualMachineStatus,
        conditions::{
            self, OBJECTS_READY, POWER_UNMANAGED, READY, RESTART_REQUIRED, RUNNING, SPEC_QUESTIONABLE,
            STATE_OVERRIDDEN, TEMPLATES_VALID,
        },
        reasons::{Effect, Event},
        status::Phase,
    },
    claims,
    object::{FORCE_STOP_ANNOTATION, STATE_UNTIL_ANNOTATION, is_workload},
    plan::{Action, DeleteReason, Plan, instances},
    power::{force_stop::Misuse, is_report_of},
};

/// Derives the events. `wanted` is the new status; `done` are the actions of the plan that succeeded.
pub fn events(reconciled: &Reconciled<'_>, wanted: &VirtualMachineStatus, done: &[&Action]) -> Vec<Event> {
    let vm = reconciled.vm;
    let mut events: Vec<Event> = done.iter().filter_map(|action| action_done(action)).collect();
    events.extend(reconciled.plan.force_stop.misuse.map(force_stop_ignored));
    events.extend(conditions_changed(vm, &wanted.conditions));
    events.extend(guest_changed(reconciled, wanted));
    events.extend(templates_changed(vm, wanted.templates.as_ref()));
    if reconciled.rendered.is_ok() {
        events.extend(claims_adopted(reconciled.plan, done));
        events.extend(claims_changed(vm, wanted));
    }
    events
}

/// The manager has set `spec.vm.state` to Stopped.
pub fn stopped() -> Event {
    Event {
        reason: Reason::GuestShutdown,
        note: "the guest has shut down, so the manager set spec.vm.state to Stopped".into(),
        action: "Stop",
    }
}

/// The API server has refused the VM's status: only an event can say so. `message` is its answer.
pub fn status_refused(message: &str) -> Event {
    Event { reason: Reason::StatusRefused, note: format!("write the status: {message}"), action: "Report" }
}

/// The annotation for a forced stop is ignored.
fn force_stop_ignored(misuse: Misuse) -> Event {
    let cause = match misuse {
        Misuse::NotStopping => "the VM should run: first stop it",
        Misuse::AnotherPod => "it is not the UID of the VM's Pod",
    };
    Event {
        reason: Reason::ForceStopIgnored,
        note: format!(
            "the annotation {FORCE_STOP_ANNOTATION} is ignored, because {cause}; to force a stop, remove the annotation and set it again"
        ),
        action: "Stop",
    }
}

/// The event about an action on a Pod of the VM.
fn action_done(action: &Action) -> Option<Event> {
    let (reason, note, action) = match action {
        Action::Apply { object, uid: None } if object.key.is_pod() => {
            (Reason::SuccessfulCreate, format!("created {}", object.key), "Start")
        }
        Action::Delete { key, reason, .. } if key.is_pod() || is_workload(key) => match reason {
            DeleteReason::Stop => (Reason::SuccessfulDelete, format!("deleted {key} to stop the VM"), "Stop"),
            DeleteReason::Restart => (
                Reason::Restarting,
                format!("deleted {key} to create the Pod again: a restart was requested"),
                "Restart",
            ),
            DeleteReason::Ended => {
                (Reason::Restarting, format!("deleted {key} to create it again: it has ended"), "Restart")
            }
            DeleteReason::Changed => (
                Reason::Restarting,
                format!(
                    "deleted {key} to create it again: no guest has started in it, and its spec or its template has changed"
                ),
                "Restart",
            ),
            DeleteReason::Renewed => {
                (Reason::Restarting, format!("deleted {key} to create it again before the guest starts"), "Restart")
            }
            DeleteReason::Force => (Reason::Forced, format!("{key} ends without waiting for its guest"), "Stop"),
            DeleteReason::NotRendered => return None,
        },
        Action::Image { key, image, .. } => {
            (Reason::AgentReplaced, format!("the agent of {key} gets the image {image}; the guest goes on"), "Update")
        }
        Action::Apply { object: _, uid: _ } | Action::Label { .. } | Action::Delete { .. } => return None,
    };
    Some(Event { reason, note, action })
}

/// The guest has started, starts again in the same Pod or is reset, or its Pod is evicted. A restart in the Pod that is so short that the
/// manager does not see the guest down causes no event.
fn guest_changed(reconciled: &Reconciled<'_>, wanted: &VirtualMachineStatus) -> Vec<Event> {
    let Reconciled { vm, observed, plan: _, rendered: _, outcome: _, source: _ } = *reconciled;
    let before = vm.status.as_ref();
    let phase =
        |status: Option<&VirtualMachineStatus>| status.and_then(|status| status.phase.clone()).unwrap_or_default();
    let (old, new) = (phase(before), phase(Some(wanted)));
    let is = |text: &str, phase: Phase| text == phase.as_str();
    let pod = instances::active(vm, observed);
    let mut events = Vec::new();
    let mut add = |reason, note, action| events.push(Event { reason, note, action });
    if is(&new, Phase::Running) && ![Phase::Running, Phase::Paused, Phase::Unknown].iter().any(|phase| is(&old, *phase))
    {
        let node = pod.and_then(|pod| pod.node_name()).map(|node| format!(" on node {node}")).unwrap_or_default();
        add(Reason::Started, format!("the guest has started{node}"), "Start");
    }
    // The runner of the same Pod has reported that.
    let running = before.and_then(|status| conditions::find(&status.conditions, RUNNING)).and_then(conditions::reason);
    let is_restart = matches!(running, Some(Reason::GuestShutdown | Reason::Starting))
        && pod.is_some_and(|pod| is_report_of(vm, pod));
    if is(&old, Phase::Running) && is(&new, Phase::Starting) && is_restart {
        add(
            Reason::GuestRestarts,
            "the guest has shut down; its node starts it again in the same Pod".into(),
            "Restart",
        );
    }
    let counts = (vm.spec.vm.reset_count, before.and_then(|status| status.runner.reset_count));
    let is_new_spec = before.and_then(|status| status.observed_generation) != vm.metadata.generation;
    if let (Some(asked), Some(done)) = counts
        && is(&new, Phase::Running)
        && is_new_spec
        && asked > done
    {
        add(Reason::Reset, format!("resetCount was increased to {asked}: the guest is reset"), "Reset");
    }
    let counts = (vm.spec.vm.reboot_count, before.and_then(|status| status.runner.reboot_count));
    if let (Some(asked), done) = counts
        && is(&new, Phase::Running)
        && is_new_spec
        && asked > done.unwrap_or_default()
    {
        add(Reason::Reboot, format!("rebootCount was increased to {asked}: the guest is asked to reboot"), "Reboot");
    }
    let disruption = pod.and_then(|pod| pod.condition("DisruptionTarget", "True"));
    if let (Some(pod), Some(disruption)) = (pod, disruption)
        && is(&new, Phase::Stopping)
        && !is(&old, Phase::Stopping)
    {
        let cause = format!("{}: {}", string(&disruption["reason"]), string(&disruption["message"]));
        add(Reason::Evicted, format!("the cluster removes Pod {}: {cause}", pod.key.name), "Stop");
    }
    events
}

/// The VM is rendered with another version of its templates than before. The first version causes no event.
fn templates_changed(vm: &VirtualMachine, after: Option<&RenderedFrom>) -> Option<Event> {
    let version = |from: &RenderedFrom| {
        let set = from.set.as_deref().map(|set| format!(" of the set {set}")).unwrap_or_default();
        format!("version {}{set}", from.version.as_deref().unwrap_or("?"))
    };
    let before = vm.status.as_ref()?.templates.as_ref()?;
    let after = after.filter(|after| *after != before)?;
    Some(Event {
        reason: Reason::TemplatesChanged,
        note: format!("rendered with templates {}; before with {}", version(after), version(before)),
        action: "Reconcile",
    })
}

/// The claims that nobody had, and that have become the VM's.
fn claims_adopted(plan: &Plan, done: &[&Action]) -> Vec<Event> {
    let is_done = |claim: &&String| {
        done.iter().any(|action| matches!(action, Action::Apply { object, .. } if object.key.is_claim() && object.key.name == **claim))
    };
    let event = |claim: &String| Event {
        reason: Reason::ClaimAdopted,
        note: format!(
            "claim {claim} existed already, and was nobody's: the VM uses it from now on, with what is in it"
        ),
        action: "Reconcile",
    };
    plan.taken_claims.iter().filter(is_done).map(event).collect()
}

/// New findings about claims, and claims that the VM does not use any more.
fn claims_changed(vm: &VirtualMachine, wanted: &VirtualMachineStatus) -> Vec<Event> {
    let new = claims::new_findings(vm, &wanted.claims);
    let findings = new.findings.iter().map(|(claim, finding)| (finding.reason, claims::sentence(claim, finding)));
    let kept = |name: &&str| {
        (Reason::DiskKept, format!("the VM does not use claim {name} any more; the claim and its data are kept"))
    };
    let event = |(reason, note)| Event { reason, note, action: "Reconcile" };
    findings.chain(new.unused.iter().map(kept)).map(event).collect()
}

/// Conditions that have another reason than before, or, if the message describes a problem, another message.
fn conditions_changed(vm: &VirtualMachine, conditions: &[Condition]) -> Vec<Event> {
    let current = vm.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    let changed = conditions.iter().filter_map(|condition| {
        let reason = conditions::reason(condition)?;
        let before = conditions::find(current, &condition.type_);
        let same_reason = before.is_some_and(|before| before.reason == condition.reason);
        let same_message = before.is_some_and(|before| before.message == condition.message);
        let (is_new, reason) = match condition.type_.as_str() {
            // After a shutdown the message is always the same.
            READY if matches!(reason, Reason::GuestShutdown | Reason::StoppedAfterPanic) => (!same_reason, reason),
            READY if matches!(reason.effect(), Effect::Warning | Effect::Notice) => {
                (!same_reason || !same_message, reason)
            }
            OBJECTS_READY if reason.effect() == Effect::Warning => (!same_reason || !same_message, reason),
            TEMPLATES_VALID if reason == Reason::ValuesRefused => (!same_message, reason),
            SPEC_QUESTIONABLE => (!same_message, reason),
            STATE_OVERRIDDEN => (!same_reason || !same_message, reason),
            POWER_UNMANAGED => (!same_reason, Reason::PowerUnmanaged),
            RESTART_REQUIRED => (!same_message, Reason::RestartRequired),
            _ => return None,
        };
        is_new.then(|| Event { reason, note: condition.message.clone(), action: "Reconcile" })
    });
    changed.chain(override_ended(current, conditions)).collect()
}

/// The annotation that outranked `spec.vm.state` does so no more.
fn override_ended(before: &[Condition], after: &[Condition]) -> Option<Event> {
    let is_over = conditions::is_true(before, STATE_OVERRIDDEN) && !conditions::is_true(after, STATE_OVERRIDDEN);
    is_over.then(|| Event {
        reason: Reason::OverrideEnded,
        note: format!(
            "the annotation {STATE_UNTIL_ANNOTATION} has no effect any more: spec.vm.state is in force again"
        ),
        action: "Reconcile",
    })
}
