//! power: whether a VM should run.
//!
//! Usually `spec.vm.state` decides that. There are three exceptions: a guest that shut itself down may have to stay down although Git still
//! says Running, a `state` line that was removed from Git does not mean that the VM is to stop, and an annotation may outrank the spec for
//! some time ([`until`]).
//!
//! | `state` | who set it | what happened before | what follows |
//! |---|---|---|---|
//! | Running | any client | | up |
//! | Running | any client | the guest shut itself down, `guestShutdownStops` is true | halting: the shutdown is written to `status.halted`; then down |
//! | Running | a client that applies it (Git) | halted | down, until `state` was Stopped, the restart annotation is new or `halted` is removed |
//! | Running | a client that does not apply it | halted | down, and the manager sets `state` to Stopped |
//! | Stopped | any client | | down |
//! | absent | | the VM was up, or it has a Pod | up, PowerUnmanaged |
//! | absent | | the VM was down | down |
//! | absent | | the VM is new, and a Pod of a deleted VM with its name is not being deleted | down, undecided |
//! | can't be read | any client | the VM was up, or it has a Pod | up |
//! | can't be read | any client | the VM was down | down |
//!
//! Tools that write what is in Git by updates (Helm, Argo CD with `Replace=true`) count as clients that apply it.
//!
//! Absent is also a Stopped that nobody has set: VMs that were stored under an earlier definition have its default. A client that created or
//! changed such a VM by another operation than Apply owns the default, too. For a client-side apply (kubectl, Argo CD), the annotation
//! `last-applied-configuration` shows whether the client set `state` ([`crate::ownership`]).
//!
//! A VM that is made again after `kubectl delete --cascade=orphan` adopts the Pod of the former one. The manager may see the new VM before
//! it sees that the Pod has lost its owner, so until the Pod is being deleted or the VM's, the status says nothing about its power.
//!
//! While the VM is *halting*, the manager changes no object: it deletes the Pod only after the shutdown is in the status, so a crash in
//! between loses nothing. The manager sets `state` to Stopped in the same write as [`GUEST_SHUTDOWN_ANNOTATION`], which identifies the
//! shutdown. If the annotation identifies the shutdown in `status.halted` and `state` is Running, a person has started the VM since.

use k8s_openapi::{
    apimachinery::pkg::apis::meta::v1::Time,
    jiff::{SignedDuration, Timestamp},
};
use kube::ResourceExt;

use self::until::Until;
use crate::{
    api::{
        PowerState, Reason, VirtualMachine,
        conditions::{self, RUNNING},
        status::{Halted, StateOverride, whole_seconds},
    },
    object::{GUEST_SHUTDOWN_ANNOTATION, RESTARTED_ANNOTATION},
    observed::Object,
    ownership::{self, Setter, setter},
};

pub mod force_stop;
pub mod until;

/// What the VM should do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WantedPower {
    /// Run.
    Up,
    /// Not run.
    #[default]
    Down,
    /// Its guest has shut down, and the status must say so before anything else is done.
    Halting,
}

impl From<WantedPower> for PowerState {
    fn from(wanted: WantedPower) -> Self {
        if wanted == WantedPower::Up { Self::Running } else { Self::Stopped }
    }
}

/// What the VM should do, and what follows for its status and its spec.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Power {
    /// What the VM should do.
    pub wanted: WantedPower,
    /// The new `status.halted`.
    pub halted: Option<Halted>,
    /// Nobody sets `state`, so the last power state stays in effect.
    pub unmanaged: bool,
    /// It is not known yet whether the VM was up: a Pod may become this VM's.
    pub undecided: bool,
    /// The VM should run, but the guest in its Pod has shut down and the runner does not start it again: the Pod must be replaced.
    pub replace_pod: bool,
    /// `spec.vm.state` should become Stopped, because the guest shut itself down and no client applies that field.
    pub write_stopped: bool,
    /// What the annotation means that outranks the spec for some time.
    pub until: Until,
    /// While that annotation is in force: the power state without it.
    without_override: Option<PowerState>,
}

impl Power {
    /// The new `status.power`; `None` if it is not known yet.
    pub fn remembered(&self) -> Option<PowerState> {
        (!self.undecided).then(|| self.without_override.unwrap_or_else(|| self.wanted.into()))
    }
}

/// Decides whether a VM should run. `pod` is the VM's Pod, if it has one; `previous` is the Pod of a deleted VM with the same name.
pub fn power(vm: &VirtualMachine, pod: Option<&Object>, previous: Option<&Object>, now: Timestamp) -> Power {
    let shutdown = || Shutdown::new(vm, pod, previous, now);
    let by_spec = by_spec(vm, shutdown());
    let until = until::until(vm, now);
    let Some(StateOverride { state, until: _ }) = until.in_force else { return Power { until, ..by_spec } };
    let power = match state {
        PowerState::Running => shutdown().running(Setter::Applier),
        PowerState::Stopped => by_spec.clone().stopped_for_some_time(),
    };
    Power { undecided: by_spec.undecided, without_override: Some(by_spec.wanted.into()), until, ..power }
}

/// Decides as if no annotation outranked the spec.
fn by_spec(vm: &VirtualMachine, shutdown: Shutdown<'_>) -> Power {
    if vm.is_state_unknown() {
        // PowerUnmanaged says that nobody sets `state`, and here somebody does.
        return Power { unmanaged: false, ..shutdown.state_not_set() };
    }
    let setter = setter(vm);
    match vm.spec.vm.state {
        PowerState::Running => shutdown.running(setter),
        PowerState::Stopped if setter == Setter::Nobody => shutdown.state_not_set(),
        PowerState::Stopped => shutdown.stopped(),
    }
}

impl Power {
    /// The same VM while an annotation stops it. A shutdown that is reported now is not the guest's own decision.
    fn stopped_for_some_time(self) -> Self {
        let is_new = self.wanted == WantedPower::Halting;
        let halted = self.halted.map(|halted| Halted { released: halted.released || is_new, ..halted });
        Self { halted, ..Self::default() }
    }
}

/// What is known of the last shutdown of a VM's guest.
struct Shutdown<'a> {
    vm: &'a VirtualMachine,
    pod: Option<&'a Object>,
    previous: Option<&'a Object>,
    now: Timestamp,
    /// The UID of the Pod whose runner reported last.
    reporting_pod: Option<&'a String>,
    /// What the runner has reported of the guest's own end.
    reported: Option<End>,
    /// The reported shutdown stops the VM.
    stops: bool,
    /// `status.halted`, unless it is about an earlier shutdown than the reported one.
    halted: Option<Halted>,
}

impl<'a> Shutdown<'a> {
    fn new(vm: &'a VirtualMachine, pod: Option<&'a Object>, previous: Option<&'a Object>, now: Timestamp) -> Self {
        let status = vm.status.as_ref();
        let reporting_pod = status.and_then(|status| status.pod_uid.as_ref());
        let reported = reported_end(vm, pod);
        // A Pod that a controller (a StatefulSet) owns has no restart annotation; its controller has it.
        let is_restarting = |pod: &Object| pod.maker.is_none() && pod.is_of(vm) && is_restart_wanted(vm, pod);
        let stops = match reported {
            Some(End::Shutdown) => vm.spec.guest_shutdown_stops,
            Some(End::Panic) => true,
            None => false,
        } && !pod.is_some_and(is_restarting);
        // If the status is about an earlier Pod's guest, the VM was started since, and the reported shutdown is a new one.
        let is_of_report = |halted: &Halted| halted.pod_uid.is_none() || halted.pod_uid.as_ref() == reporting_pod;
        let halted = status.and_then(|status| status.halted.clone());
        let halted = halted.filter(|halted| reported.is_none() || is_of_report(halted));
        Self { vm, pod, previous, now, reporting_pod, reported, stops, halted }
    }

    /// `state` is Running.
    fn running(self, setter: Setter) -> Power {
        match &self.halted {
            Some(halted) if self.keeps_down(halted) => {
                Power { write_stopped: setter != Setter::Applier, halted: self.halted, ..Power::default() }
            }
            None if self.stops => self.halting(),
            Some(_) | None => self.up(),
        }
    }

    /// `state` is Stopped, and someone set it. The person who stops the VM knows of the shutdown, so it does not undo the next start.
    fn stopped(self) -> Power {
        let halted = self.halted.clone().or_else(|| self.stops.then(|| self.new_halted()));
        Power { halted: self.released(halted), ..Power::default() }
    }

    /// Nobody has set `state`.
    fn state_not_set(self) -> Power {
        let before = self.vm.status.as_ref().and_then(|status| status.power);
        let has_pod = || self.pod.is_some_and(|pod| pod.deleting.is_none());
        let was_up = before.map_or_else(has_pod, |before| before == PowerState::Running);
        let undecided = before.is_none() && self.previous.is_some_and(|pod| pod.deleting.is_none());
        match (was_up, self.stops && self.halted.is_none()) {
            (true, false) => Power { unmanaged: true, ..self.up() },
            (true, true) => self.halting(),
            (false, _) => Power { undecided, ..self.stopped() },
        }
    }

    fn up(self) -> Power {
        let halted = self.released(self.halted.clone());
        // A Pod that is being deleted need not be replaced.
        let has_reported =
            |pod: &Object| pod.deleting.is_none() && self.reporting_pod.is_some_and(|uid| *uid == pod.uid);
        let replace_pod = halted.is_some() && self.pod.is_some_and(has_reported);
        Power { wanted: WantedPower::Up, halted, replace_pod, ..Power::default() }
    }

    fn halting(&self) -> Power {
        Power { wanted: WantedPower::Halting, halted: Some(self.new_halted()), ..Power::default() }
    }

    /// Whether a shutdown in the status keeps the VM down.
    fn keeps_down(&self, halted: &Halted) -> bool {
        let restart = self.vm.annotations().get(RESTARTED_ANNOTATION);
        let is_restarted = restart.is_some() && halted.restarted_at.as_ref() != restart;
        let is_started = self.annotated_shutdown() == Some(&stamp(halted));
        !halted.released && !is_restarted && !is_started
    }

    /// The shutdown no longer keeps the VM down. It stays in the status while the runner's report does, or the report would be taken
    /// for a new shutdown.
    fn released(&self, halted: Option<Halted>) -> Option<Halted> {
        halted.filter(|_| self.reported.is_some()).map(|halted| Halted { released: true, ..halted })
    }

    /// `status.halted` for the reported shutdown.
    fn new_halted(&self) -> Halted {
        // The time identifies the shutdown, so two shutdowns in one second must get different times.
        let is_annotated = self.annotated_shutdown().is_some_and(|time| *time == whole_seconds(self.now));
        let time = if is_annotated { self.now + SignedDuration::from_secs(1) } else { self.now };
        Halted {
            by: if self.reported == Some(End::Panic) { Halted::PANIC } else { Halted::GUEST }.into(),
            time: Time(time),
            generation: self.vm.metadata.generation.unwrap_or_default(),
            pod_uid: self.reporting_pod.cloned(),
            restarted_at: self.vm.annotations().get(RESTARTED_ANNOTATION).cloned(),
            released: false,
        }
    }

    /// The shutdown for which the manager set `state` to Stopped last.
    fn annotated_shutdown(&self) -> Option<&'a String> {
        self.vm.annotations().get(GUEST_SHUTDOWN_ANNOTATION)
    }
}

/// The value of [`GUEST_SHUTDOWN_ANNOTATION`] for a shutdown: its time in whole seconds.
pub fn stamp(halted: &Halted) -> String {
    whole_seconds(halted.time.0)
}

/// Whether the Pod was created before the restart that the VM's annotation requests. The Pod carries the annotation's value from the time
/// of its creation, so no clocks are compared.
pub fn is_restart_wanted(vm: &VirtualMachine, pod: &Object) -> bool {
    let wanted = vm.annotations().get(RESTARTED_ANNOTATION);
    wanted.is_some_and(|wanted| pod.annotations.get(RESTARTED_ANNOTATION) != Some(wanted))
}

/// Whether the last report of a runner is about this Pod.
pub fn is_report_of(vm: &VirtualMachine, pod: &Object) -> bool {
    let reported = vm.status.as_ref().and_then(|status| status.pod_uid.as_ref());
    // Legacy runners do not report the Pod's UID. One in the status is from the time when another image ran the VM.
    pod.has_legacy_runner() || reported.is_none_or(|reported| *reported == pod.uid)
}

/// How a guest has ended by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// It shut itself down.
    Shutdown,
    /// It panicked, and the runner ended it, because the spec wanted that when it was started.
    Panic,
}

/// What the runner has reported of the guest's own end. Without a Pod the last report counts: only the manager creates Pods, and after that
/// it owns the condition itself.
fn reported_end(vm: &VirtualMachine, pod: Option<&Object>) -> Option<End> {
    let current = vm.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    let running = conditions::find(current, RUNNING).filter(|running| running.status == "False")?;
    let end = match conditions::reason(running)? {
        Reason::GuestShutdown => End::Shutdown,
        Reason::StoppedAfterPanic => End::Panic,
        _ => return None,
    };
    let is_of_guest = ownership::is_said_by_runner(vm, RUNNING) && pod.is_none_or(|pod| is_report_of(vm, pod));
    is_of_guest.then_some(end)
}

#[cfg(test)]
mod tests;
