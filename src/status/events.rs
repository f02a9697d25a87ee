//! Events: for each thing that a person would ask about, recorded once.
//!
//! Derived from what was done and from how the new status differs from the one before, so a restart of the manager records nothing. An
//! event that is recorded again, because the status could not be written, is counted.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::ResourceExt;

use super::Reconciled;
use crate::{
    api::{
        Reason, RenderedFrom, VirtualMachine, VirtualMachineStatus,
        conditions::{self, POWER_UNMANAGED, READY, RESTART_REQUIRED},
        reasons::Effect,
    },
    claims,
    plan::{Action, Why},
};

/// An event about a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// What happened. Its [`Effect`] says whether the event is a warning.
    pub reason: Reason,
    /// A sentence for people.
    pub note: String,
    /// What the manager did or tried, in a word.
    pub action: &'static str,
}

/// The events of one reconcile. `wanted` is the status that was derived from it; `done` are the actions of the plan that succeeded.
pub fn events(reconciled: &Reconciled<'_>, wanted: &VirtualMachineStatus, done: &[&Action]) -> Vec<Event> {
    let vm = reconciled.vm;
    let mut events: Vec<Event> = done.iter().filter_map(|action| acted(&vm.name_any(), action)).collect();
    events.extend(conditions_changed(vm, &wanted.conditions));
    events.extend(templates_changed(vm, wanted.templates.as_ref()));
    if reconciled.rendered.is_ok() {
        events.extend(claims_changed(vm, wanted));
    }
    events
}

/// `spec.vm.state` was written: a person who looks at the VM later finds that it is Stopped.
pub fn stopped() -> Event {
    Event {
        reason: Reason::GuestShutdown,
        note: "the guest has shut down, and so spec.vm.state becomes Stopped".into(),
        action: "Stop",
    }
}

fn acted(name: &str, action: &Action) -> Option<Event> {
    let (reason, note, action) = match action {
        Action::Apply { object, uid: None } if object.key.is_pod() && object.key.name == name => {
            (Reason::SuccessfulCreate, format!("made Pod {name}"), "Start")
        }
        Action::Delete { key, why, .. } if key.is_pod() && key.name == name => match why {
            Why::Stop => (Reason::SuccessfulDelete, format!("Pod {name} is asked to end"), "Stop"),
            Why::Restart => (Reason::Restarting, format!("Pod {name} is asked to end, and is made again"), "Restart"),
            Why::Ended => (Reason::Restarting, format!("Pod {name} has ended and is made again"), "Restart"),
            Why::Force => (Reason::Forced, format!("Pod {name} ends without waiting for its guest"), "Stop"),
            Why::Superfluous => return None,
        },
        _ => return None,
    };
    Some(Event { reason, note, action })
}

/// The VM is rendered with another version of its templates than before. The first version is no event.
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

/// Claims with new findings, and claims that are not used any more.
fn claims_changed(vm: &VirtualMachine, wanted: &VirtualMachineStatus) -> Vec<Event> {
    let new = claims::new_findings(vm, &wanted.claims);
    let findings = new.findings.iter().map(|(claim, finding)| (finding.reason, claims::sentence(claim, finding)));
    let kept = |name: &&str| (Reason::DiskKept, format!("claim {name} is not used any more; it and its data are kept"));
    let event = |(reason, note)| Event { reason, note, action: "Reconcile" };
    findings.chain(new.unused.iter().map(kept)).map(event).collect()
}

/// Conditions that have another reason than before, or another message where that says what is wrong.
fn conditions_changed(vm: &VirtualMachine, conditions: &[Condition]) -> Vec<Event> {
    let current = vm.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    let changed = conditions.iter().filter_map(|condition| {
        let reason = conditions::reason(condition)?;
        let before = conditions::find(current, &condition.type_);
        let same_reason = before.is_some_and(|before| before.reason == condition.reason);
        let same_message = before.is_some_and(|before| before.message == condition.message);
        let (is_new, reason) = match condition.type_.as_str() {
            // What it says of a guest that shut down is the same each time.
            READY if reason == Reason::GuestShutdown => (!same_reason, reason),
            READY if matches!(reason.effect(), Effect::Warning | Effect::Notice) => {
                (!same_reason || !same_message, reason)
            }
            POWER_UNMANAGED => (!same_reason, Reason::PowerUnmanaged),
            RESTART_REQUIRED => (!same_message, Reason::RestartRequired),
            _ => return None,
        };
        is_new.then(|| Event { reason, note: condition.message.clone(), action: "Reconcile" })
    });
    changed.collect()
}
