//! power: should the machine run?
//!
//! `spec.vm.state` is what somebody wants, but not always all of the answer: a guest that shut itself down may have to stay
//! down though Git goes on saying Running, and a line that was taken out of Git is not a wish to stop.
//!
//! | `state` | who set it | before | then |
//! |---|---|---|---|
//! | Running | | | up |
//! | Running | | the guest shut itself down, `guestShutdownStops` | halting: remembered in `status.halted`, then down |
//! | Running | an applier (Git) | halted | down until `state` was Stopped, the restart annotation is new or `halted` is removed |
//! | Running | nobody who applies | halted | down, and `state` becomes Stopped |
//! | Stopped | somebody | | down |
//! | Stopped | nobody (the CRD's default) | it was up, or a Pod of it is found | up, PowerUnmanaged |
//! | Stopped | nobody | it was down | down |
//!
//! Who created or patched the machine with another operation than Apply owns the CRD's default like what they wrote; what a
//! client-side apply (kubectl, Argo CD) wrote is in its annotation, so where `state` is not in there, it set none.
//!
//! *Halting* touches nothing: the Pod goes only after the memory is written, so a crash in between forgets nothing. And the state
//! is written together with the shutdown that it is for: where the two are there and `state` is Running, somebody has started the
//! machine since.

use k8s_openapi::{
    apimachinery::pkg::apis::meta::v1::Time,
    jiff::{SignedDuration, Timestamp},
};
use kube::ResourceExt;

use crate::{
    api::{
        PowerState, Reason, VirtualMachine,
        conditions::{self, RUNNING},
        status::{Halted, whole_seconds},
    },
    object::{GUEST_SHUTDOWN_ANNOTATION, RESTARTED_ANNOTATION},
    observed::Object,
    ownership::{self, Setter, setter},
};

/// What the machine should do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Wanted {
    /// Run.
    Up,
    /// Not run.
    #[default]
    Down,
    /// Its guest has shut down, and that must be remembered before anything is done.
    Halting,
}

/// The answer, and what the answer hangs on.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Power {
    /// What the machine should do.
    pub wanted: Wanted,
    /// What `status.halted` should say.
    pub halted: Option<Halted>,
    /// Nobody sets `state`, so the last one stays in effect.
    pub unmanaged: bool,
    /// It should run, but the guest of its Pod has shut down and stays down: only another Pod starts it.
    pub anew: bool,
    /// `spec.vm.state` should become Stopped: the guest shut itself down and nobody applies that field.
    pub write_stopped: bool,
}

/// Decides about a machine. `pod` is the Pod of the machine, if there is one.
pub fn power(vm: &VirtualMachine, pod: Option<&Object>, now: Timestamp) -> Power {
    let status = vm.status.as_ref();
    let restart = vm.annotations().get(RESTARTED_ANNOTATION);
    let setter = setter(vm);
    let reported = has_shut_down(vm, pod);
    // What is between the machine and its Pod (a StatefulSet) has the annotation that its Pod has not.
    let is_restarting = |pod: &Object| pod.belongs_to(&vm.uid().unwrap_or_default()) && is_restart_wanted(vm, pod);
    let shut_down = reported && vm.spec.guest_shutdown_stops && !pod.is_some_and(is_restarting);
    // As long as the report stands it must not be taken for a new one.
    let release =
        |halted: Option<Halted>| halted.filter(|_| reported).map(|halted| Halted { released: true, ..halted });
    let named = status.and_then(|status| status.pod_uid.as_ref());
    // What is remembered of an earlier Pod's guest says nothing of this shutdown: it was started since.
    let is_of_report = |halted: &Halted| halted.pod_uid.is_none() || halted.pod_uid.as_ref() == named;
    let halted = status.and_then(|status| status.halted.clone()).filter(|halted| !reported || is_of_report(halted));
    // One that is going already makes way by itself.
    let is_its_report = pod.is_some_and(|pod| named == Some(&pod.uid) && pod.deleting.is_none());
    let up = |halted: Option<Halted>| {
        let anew = halted.is_some() && is_its_report;
        Power { wanted: Wanted::Up, anew, halted, ..Power::default() }
    };
    let down = |halted| Power { halted, ..Power::default() };
    let noted = vm.annotations().get(GUEST_SHUTDOWN_ANNOTATION);
    let memory = || {
        // Two shutdowns within a second are two.
        let is_noted = noted.is_some_and(|noted| *noted == whole_seconds(now));
        let now = if is_noted { now + SignedDuration::from_secs(1) } else { now };
        let generation = vm.metadata.generation.unwrap_or_default();
        Halted {
            by: "guest".into(),
            time: Time(now),
            generation,
            pod_uid: named.cloned(),
            restarted_at: restart.cloned(),
            released: false,
        }
    };
    let halting = || Power { wanted: Wanted::Halting, halted: Some(memory()), ..Power::default() };
    // Who stops the machine knows of the shutdown: the next start is none that it could undo.
    let stopped = |halted: Option<Halted>| down(release(halted.or_else(|| shut_down.then(memory))));
    let is_kept_down = |halted: &Halted| {
        let is_restarted = restart.is_some() && halted.restarted_at.as_ref() != restart;
        !halted.released && !is_restarted && noted != Some(&stamp(halted))
    };
    match vm.spec.vm.state {
        PowerState::Running => match halted {
            Some(halted) if is_kept_down(&halted) => {
                Power { write_stopped: setter != Setter::Applier, ..down(Some(halted)) }
            }
            None if shut_down => halting(),
            halted => up(release(halted)),
        },
        PowerState::Stopped if setter == Setter::Nobody => {
            let before = status.and_then(|status| status.power);
            let was_up =
                before.map_or(pod.is_some_and(|pod| pod.deleting.is_none()), |before| before == PowerState::Running);
            match (was_up, shut_down && halted.is_none()) {
                (true, false) => Power { unmanaged: true, ..up(release(halted)) },
                (true, true) => halting(),
                (false, _) => stopped(halted),
            }
        }
        PowerState::Stopped => stopped(halted),
    }
}

/// The time of a shutdown as the annotation has it: that of the status, in whole seconds.
pub fn stamp(halted: &Halted) -> String {
    whole_seconds(halted.time.0)
}

/// Whether the Pod was made before the restart that the machine's annotation asks for. The Pod carries the text that was
/// there when it was made, so no clocks are compared.
pub fn is_restart_wanted(vm: &VirtualMachine, pod: &Object) -> bool {
    let wanted = vm.annotations().get(RESTARTED_ANNOTATION);
    wanted.is_some_and(|wanted| pod.annotations.get(RESTARTED_ANNOTATION) != Some(wanted))
}

/// Whether what the runner reported last is about this Pod.
pub fn is_report_of(vm: &VirtualMachine, pod: &Object) -> bool {
    // Runners of the old kind do not say it.
    let reported = vm.status.as_ref().and_then(|status| status.pod_uid.as_ref());
    reported.is_none_or(|reported| *reported == pod.uid)
}

/// Whether the guest shut itself down, as far as the runner has reported. Where there is no Pod any more, its last report
/// counts: nobody but the manager makes Pods, and it then takes the condition over.
fn has_shut_down(vm: &VirtualMachine, pod: Option<&Object>) -> bool {
    let current = vm.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    conditions::find(current, RUNNING)
        .is_some_and(|running| running.status == "False" && conditions::reason(running) == Some(Reason::GuestShutdown))
        && !ownership::owns_condition(vm, RUNNING)
        && pod.is_none_or(|pod| is_report_of(vm, pod))
}

#[cfg(test)]
mod tests;
