//! The status of a VM, derived from what is observed and planned.
//!
//! | the VM | Ready (it is as its spec wants it) | Running (power) | `ready` (the guest is up) |
//! |---|---|---|---|
//! | stopped, as wanted | True, StoppedAsRequested | False | false |
//! | is starting | False, Starting or the cause | False | false |
//! | up, as wanted | True, Running | True | true |
//! | up, but QEMU refused a change | False, ChangeFailed | True | true |
//! | up, but a device does not work (a disk is full) | False, StorageFull or another | True | true |
//! | up, but its guest is paused | False, Paused | False | false |
//! | up, but its node does not answer | False, NodeNotResponding | Unknown | false, because nobody knows |
//! | up, should stop | False, Stopping | True | true until the guest is down |
//! | down, should run | False, the cause and the next try | False | false |
//! | down, because the guest shut itself down | True, GuestShutdown | False | false |
//!
//! The runner writes `Running`, `Booted`, the conditions about the guest's agents and the display, and measured values. Without a Pod no
//! runner can write them, so the manager then writes that no guest runs.

use std::collections::BTreeSet;

use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Condition, jiff::Timestamp};
use kube::{ResourceExt, core::TypeMeta};
use serde_json::Value;

use self::{
    generation::generations,
    guest::{LastReport, ReportedGuest, is_lost},
    new_disks::new_disks,
    ready::ready,
};
use crate::{
    advice::{advice, summary},
    api::{
        ObjectKind, PendingChange, Problem, Reason, RenderedFrom, RunnerStatus, VirtualMachine, VirtualMachineStatus,
        conditions::{
            self, BOOTED, CHANGES_APPLIED, CONSOLE_CONNECTED, DEVICES_READY, NewCondition, OBJECTS_READY,
            POWER_UNMANAGED, READY, RESTART_REQUIRED, RUNNING, SPEC_QUESTIONABLE, STALLED, STATE_OVERRIDDEN,
            TEMPLATES_VALID, USER_LOGGED_IN, VMOP_AGENT_CONNECTED,
        },
        reasons::Effect,
        report::REPORTED_CONDITIONS,
        status::{Address, Phase, StateOverride, whole_seconds},
    },
    claims::{self, RefusedChange},
    object::{Rendered, STATE_UNTIL_ANNOTATION},
    observed::{NodeState, Object, Observed},
    ownership::{OF_GUEST, is_said_by_runner},
    plan::{Plan, Wait, beside::is_beside, instances::Instances, kinds},
    power::{
        WantedPower,
        until::{self, Misuse, Until},
    },
    render::{TemplateError, TemplateSet},
};

pub mod events;
mod generation;
mod guest;
mod new_disks;
mod ready;
pub mod reports;

/// How the execution of a plan ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExecutionResult {
    /// The action that failed, if a person must know of it.
    pub failure: Option<Problem>,
    /// The same of objects that no Pod mounts.
    pub beside: Vec<Problem>,
    /// The changes of claims that the API server refused. The VM runs without them.
    pub refusals: Vec<RefusedChange>,
    /// The kinds in `status.objectKinds` that the manager does not watch.
    pub unknown_kinds: Vec<TypeMeta>,
    /// The state of the node of a Pod that is overdue ([`Wait::Overdue`]).
    pub node: NodeState,
    /// Why the manager waits before it writes the VM again.
    pub unrest: Option<Problem>,
}

/// A cause that was looked up: it takes the place of what Ready would say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LookedUp {
    /// What is wrong, with the names of the objects.
    pub message: String,
    /// What a person can do.
    pub what_to_do: String,
}

/// The templates of a VM.
#[derive(Clone, Copy, Debug, Default)]
pub struct UsedTemplates<'a> {
    /// The template set that is in use for it.
    pub set: Option<&'a TemplateSet>,
    /// Why a newer version of the set is not used.
    pub refused: Option<&'a TemplateError>,
}

/// A VM after one reconcile: everything from which its status and its events are derived.
#[derive(Clone, Copy)]
pub struct Reconciled<'a> {
    /// The VM, with the status that the API server has.
    pub vm: &'a VirtualMachine,
    /// Its objects after the plan was executed.
    pub observed: &'a Observed,
    /// The plan.
    pub plan: &'a Plan,
    /// Its rendered objects.
    pub rendered: Result<&'a [Rendered], &'a TemplateError>,
    /// How the execution of the plan ended.
    pub outcome: &'a ExecutionResult,
    /// Its templates.
    pub source: UsedTemplates<'a>,
}

/// The Pods in which a guest of the VM may run.
#[derive(Clone, Copy)]
struct Pods<'a> {
    /// The VM's Pod.
    own: Option<&'a Object>,
    /// If the VM has no Pod: the Pod of a deleted VM with the same name, which must end first.
    previous: Option<&'a Object>,
    /// A Pod that can write to the VM's disks beside its own one.
    second: Option<&'a Object>,
}

impl<'a> Pods<'a> {
    fn new(vm: &VirtualMachine, observed: &'a Observed, plan: &Plan) -> Self {
        let instances = Instances::new(vm, observed);
        let own = instances.active().map(AsRef::as_ref);
        let is_awaited = |pod: &&Object| plan.waits.iter().any(|wait| is_deletion(wait) && *wait.key() == pod.key);
        let previous = instances.previous().map(AsRef::as_ref).filter(is_awaited);
        let second = own.and_then(|_| instances.second()).map(AsRef::as_ref);
        Self { own, previous: previous.filter(|_| own.is_none()), second }
    }
}

/// Whether a plan waits until an object that is being deleted is gone.
fn is_deletion(wait: &Wait) -> bool {
    match wait {
        Wait::Gone(_) | Wait::Overdue(_) | Wait::NotRemoved(_) => true,
        Wait::NotOurs(_)
        | Wait::Retry(_)
        | Wait::ClaimInUse(_)
        | Wait::ClaimForeign(..)
        | Wait::ClaimMissing(_)
        | Wait::HelperNotReady(_) => false,
    }
}

/// A status for which nothing was looked up beyond the VM's own objects.
#[derive(Clone, Debug)]
pub struct Draft {
    /// The status.
    pub status: VirtualMachineStatus,
    /// The reason of Ready.
    reason: Reason,
    /// How the message of Ready ends whatever the cause is.
    tail: String,
}

impl Draft {
    /// The status with the cause why the VM is not as its spec wants it, in `problem`, in the message of Ready, and in what repeats it. If the VM is
    /// being deleted, the cause is why it still exists.
    pub fn explained(mut self, vm: &VirtualMachine, cause: LookedUp, now: Timestamp) -> VirtualMachineStatus {
        let is_going = vm.metadata.deletion_timestamp.is_some();
        let reason = if is_going { Reason::BeingDeleted } else { self.reason };
        let LookedUp { message, what_to_do } = cause;
        let problem = Problem { reason, message, what_to_do: Some(what_to_do) };
        let message = problem.words() + if is_going { "" } else { &self.tail };
        self.status.problem = Some(problem);
        let of_type = |type_, status| NewCondition { type_, status, reason, message: message.clone() };
        let changed = [of_type(READY, false)].into_iter().chain(reason.is_stalled().then(|| of_type(STALLED, true)));
        let changed = conditions::with_times(changed.collect(), current_conditions(vm), vm.metadata.generation, now);
        for present in &mut self.status.conditions {
            if let Some(changed) = conditions::find(&changed, &present.type_) {
                present.clone_from(changed);
            }
        }
        self.status.valid()
    }

    /// The status with the present messages of Ready and of what repeats it, where the reasons are the same: the cause could not be looked up now.
    pub fn as_it_was(mut self, vm: &VirtualMachine) -> VirtualMachineStatus {
        for condition in self.status.conditions.iter_mut().filter(|it| [READY, STALLED].contains(&it.type_.as_str())) {
            let same = conditions::find(current_conditions(vm), &condition.type_)
                .filter(|it| (&it.status, &it.reason) == (&condition.status, &condition.reason));
            if let Some(same) = same {
                condition.message.clone_from(&same.message);
            }
        }
        let known = vm.status.as_ref().and_then(|status| status.problem.as_ref());
        if let Some(known) = known.filter(|known| known.reason == self.reason) {
            self.status.problem = Some(known.clone());
        }
        self.status
    }
}

/// Derives the manager's part of a VM's status. Fields that the manager does not write are absent.
pub fn status(reconciled: &Reconciled<'_>) -> VirtualMachineStatus {
    draft(reconciled).status
}

/// Derives the same, for a cause to be looked up.
pub fn draft(reconciled: &Reconciled<'_>) -> Draft {
    let Reconciled { vm, observed, plan, rendered, outcome, source } = *reconciled;
    let pods = Pods::new(vm, observed, plan);
    let guest = ReportedGuest::new(vm, pods.own, reports::is_of_pod(vm, observed));
    let ready = ready(reconciled, &guest, pods);
    let (reason, tail) = (ready.reason(), ready.tail().to_owned());
    let phase = phase(reconciled, &guest, pods, reason);
    let claims = claims::named(vm, observed, rendered.ok(), &outcome.refusals);

    let problem = ready.problem();
    let mut new = vec![templates_valid(reconciled), ready.into()];
    new.extend(restart_required(vm, plan, &guest));
    new.extend(power_unmanaged(plan));
    new.extend(state_overridden(vm, plan));
    new.extend(spec_questionable(vm));
    new.extend(rendered.ok().and_then(|rendered| claims::storage_ready(&claims, rendered)));
    new.extend(objects_ready(reconciled));
    new.extend(stalled(vm, &new));
    new.extend(conditions_without_report(&guest, phase));
    new.sort_by_key(|condition| condition.type_);

    // What the runner wrote no longer holds when no runner reports.
    let is_runner_silent = guest.is_silent();
    let (guest_generation, taken_generation) = generations(reconciled, &guest);
    let mut conditions = conditions::with_times(new, guest.conditions, vm.metadata.generation, observed.now);
    conditions.extend(reported(vm, &conditions));
    for condition in conditions.iter_mut().filter(|condition| OF_GUEST.contains(&condition.type_.as_str())) {
        condition.observed_generation = guest_generation.or(condition.observed_generation);
    }
    let of_runner = reports::carried(vm);
    let status = VirtualMachineStatus {
        observed_generation: Some(vm.metadata.generation.unwrap_or_default()),
        phase: Some(phase.as_str().to_owned()),
        created: Some(pods.own.is_some()),
        ready: Some(guest.is_up),
        power: plan.power.remembered(),
        state_override: plan.power.until.in_force.clone(),
        state_until_ignored: plan.power.until.ignored.clone(),
        problem,
        conditions,
        templates: source.set.filter(|_| rendered.is_ok()).map(|set| RenderedFrom {
            set: vm.template_set().map(str::to_owned),
            version: Some(set.version().to_owned()),
        }),
        object_kinds: object_kinds(vm, observed, rendered.unwrap_or_default(), &outcome.unknown_kinds),
        new_disks: rendered.ok().and_then(|rendered| new_disks(vm, observed, rendered)),
        claims,
        halted: plan.power.halted.clone(),
        force_stop_ignored: plan.force_stop.ignored.clone(),
        end_guest: plan.force_stop.pod_uid.clone(),
        reporter_uid: pods.own.filter(|pod| pod.key.name != vm.name_any()).map(|pod| pod.uid.clone()),
        retry: plan.retry.clone(),
        pending_changes: plan.pending.iter().cloned().chain(pending_of_runner(vm, is_runner_silent)).collect(),
        guest_generation,
        taken_generation,
        pod_uid: reports::reporting_pod(vm),
        runner: if is_runner_silent { without_guest(vm, of_runner) } else { of_runner },
        node_name: pods.own.and_then(Object::node_name).map(str::to_owned),
        addresses: pods.own.map(addresses).filter(|addresses| !addresses.is_empty()),
        ..VirtualMachineStatus::default()
    };
    Draft { status: status.valid(), reason, tail }
}

/// The runner's part of the status while nothing runs. The manager can't remove another field manager's field, but it can empty it.
fn without_guest(vm: &VirtualMachine, of_runner: RunnerStatus) -> RunnerStatus {
    let before = vm.status.as_ref().map(|status| &status.runner);
    let emptied =
        |field: fn(&RunnerStatus) -> &Option<String>| before.and_then(|it| field(it).as_ref()).map(|_| String::new());
    RunnerStatus {
        cpus: Some(0),
        ram: Some("0".into()),
        console_client: emptied(|it| &it.console_client),
        logged_in_user: emptied(|it| &it.logged_in_user),
        relay_port: before.and_then(|it| it.relay_port).map(|_| 0),
        serial_users: Vec::new(),
        devices: Vec::new(),
        ..of_runner
    }
}

/// The conditions of a report, if the manager writes none of that type.
fn reported(vm: &VirtualMachine, written: &[Condition]) -> Vec<Condition> {
    if !reports::is_folded(vm) {
        return Vec::new();
    }
    let is_reported = |condition: &&Condition| {
        REPORTED_CONDITIONS.contains(&condition.type_.as_str())
            && is_said_by_runner(vm, &condition.type_)
            && conditions::find(written, &condition.type_).is_none()
    };
    current_conditions(vm).iter().filter(is_reported).cloned().collect()
}

/// The changes that wait for QEMU's next start, as a report has them.
fn pending_of_runner(vm: &VirtualMachine, is_silent: bool) -> impl Iterator<Item = PendingChange> + '_ {
    let is_folded = !is_silent && reports::is_folded(vm);
    let changes = vm.status.iter().flat_map(|status| &status.pending_changes);
    changes.filter(move |change| is_folded && !change.is_of_manager()).cloned()
}

fn restart_required(vm: &VirtualMachine, plan: &Plan, guest: &ReportedGuest<'_>) -> Option<NewCondition> {
    // The runner lists the settings that QEMU reads only when it starts.
    let of_runner = vm.status.iter().flat_map(|status| &status.pending_changes);
    let of_runner = of_runner.filter(|change| guest.reports(RUNNING) && !change.is_of_manager());
    let paths: Vec<&str> = plan.pending.iter().chain(of_runner).map(|change| change.path.as_str()).collect();
    (!paths.is_empty()).then(|| NewCondition {
        type_: RESTART_REQUIRED,
        status: true,
        reason: Reason::Changed,
        message: format!("these changes take effect at the next start: {}", paths.join(", ")),
    })
}

/// The condition exists only while something is wrong with an object that no Pod mounts.
fn objects_ready(reconciled: &Reconciled<'_>) -> Option<NewCondition> {
    let rendered = reconciled.rendered.unwrap_or_default();
    let waits = reconciled.plan.waits.iter().filter(|wait| is_beside(wait.key(), rendered)).map(|wait| match wait {
        Wait::NotOurs(key) => ready::name_taken(key),
        wait => Problem::new(Reason::WaitingForDeletion, format!("waiting until {} is gone", wait.key())),
    });
    let problem = {
        let ExecutionResult { beside, unrest, .. } = reconciled.outcome;
        beside.iter().cloned().chain(waits).chain(unrest.clone()).next()?
    };
    Some(NewCondition { type_: OBJECTS_READY, status: false, reason: problem.reason, message: problem.words() })
}

/// For tools that wait for a VM and know nothing of its reasons: they wait no longer
/// (<https://github.com/kubernetes-sigs/cli-utils/blob/master/pkg/kstatus/README.md>). The condition exists only while it is True.
fn stalled(vm: &VirtualMachine, conditions: &[NewCondition]) -> Option<NewCondition> {
    let is_cause = |condition: &&NewCondition| {
        [READY, OBJECTS_READY].contains(&condition.type_) && !condition.status && condition.reason.is_stalled()
    };
    let cause = conditions.iter().find(is_cause).filter(|_| vm.metadata.deletion_timestamp.is_none())?;
    Some(NewCondition { type_: STALLED, status: true, reason: cause.reason, message: cause.message.clone() })
}

fn power_unmanaged(plan: &Plan) -> Option<NewCondition> {
    plan.power.unmanaged.then(|| NewCondition {
        type_: POWER_UNMANAGED,
        status: true,
        reason: Reason::StateNotSet,
        message: "nobody sets spec.vm.state any more, so the VM stays up; to stop it, set state to Stopped, or, if it says that already, to Running \
                  and then to Stopped"
            .into(),
    })
}

/// The condition exists only while something of the spec will probably not be as it is meant.
fn spec_questionable(vm: &VirtualMachine) -> Option<NewCondition> {
    let advice = advice(vm);
    let reason = advice.iter().find(|it| it.is_fatal).or(advice.first())?.reason;
    Some(NewCondition { type_: SPEC_QUESTIONABLE, status: true, reason, message: summary(&advice)? })
}

/// The condition exists only while there is an annotation that outranks the spec, or that is ignored.
fn state_overridden(vm: &VirtualMachine, plan: &Plan) -> Option<NewCondition> {
    let Until { in_force, ignored: _, misuse } = &plan.power.until;
    let (status, reason, message) = match (in_force, misuse) {
        (Some(StateOverride { state, until }), _) => {
            let end = whole_seconds(until.0);
            let state = state.as_str();
            let message = format!(
                "{state} until {end}, as the annotation {STATE_UNTIL_ANNOTATION} says; then spec.vm.state ({}) is in force again",
                vm.spec.vm.state.as_str()
            );
            (true, Reason::Overridden, message)
        }
        (None, Some(Misuse::Unreadable(value))) => {
            let message = format!(
                "the annotation {STATE_UNTIL_ANNOTATION} is ignored: \"{value}\" is not a state and a time, such as \"Stopped \
                 2027-01-15T10:00:00Z\""
            );
            (false, Reason::OverrideIgnored, message)
        }
        (None, Some(Misuse::TooFar)) => {
            let days = until::LONGEST.as_hours() / 24;
            let message = format!(
                "the annotation {STATE_UNTIL_ANNOTATION} is ignored: its time is more than {days} days off, or was when it was set; \
                 remove it, and set it again with an earlier time"
            );
            (false, Reason::OverrideIgnored, message)
        }
        (None, None) => return None,
    };
    Some(NewCondition { type_: STATE_OVERRIDDEN, status, reason, message })
}

/// The runner's conditions that no runner reports: without a guest they are False, and while the Pod's node does not answer they are Unknown
/// ([`ReportedGuest::last_report`]). Runners of older versions do not write all of them.
fn conditions_without_report(guest: &ReportedGuest<'_>, phase: Phase) -> Vec<NewCondition> {
    let written = |type_: &&'static str| match (guest.last_report(type_), *type_) {
        (Some(_), _) => true,
        (None, RUNNING | BOOTED) => !guest.reports(type_),
        (None, _) => conditions::find(guest.conditions, type_).is_some() && guest.is_silent(),
    };
    let condition = |type_: &'static str| {
        let (status, reason, message) = match guest.last_report(type_) {
            Some(LastReport::NotKnown) => (false, Reason::Unknown, "the Pod's node does not answer"),
            Some(LastReport::Holds) => (
                true,
                reported_as_true(type_),
                "the Pod's node answers again, and the runner has reported nothing else",
            ),
            None if phase == Phase::Unknown => (false, Reason::Unknown, "the Pod's node does not answer"),
            None => (false, phase.reason(), "no guest is running"),
        };
        NewCondition { type_, status, reason, message: message.into() }
    };
    let types =
        [RUNNING, BOOTED, VMOP_AGENT_CONNECTED, USER_LOGGED_IN, CONSOLE_CONNECTED, CHANGES_APPLIED, DEVICES_READY];
    types.into_iter().filter(written).map(condition).collect()
}

/// The reason with which the runner reports that a condition is True.
fn reported_as_true(type_: &str) -> Reason {
    match type_ {
        BOOTED => Reason::GuestAgentAnswered,
        VMOP_AGENT_CONNECTED => Reason::LoginAgentAnswered,
        USER_LOGGED_IN => Reason::LoggedIn,
        CONSOLE_CONNECTED => Reason::Connected,
        _ => Reason::Started,
    }
}

fn addresses(pod: &Object) -> Vec<Address> {
    let addresses = pod.status["podIPs"].as_array().into_iter().flatten();
    let address = |item: &Value| Some(Address { type_: "PodIP".into(), address: item["ip"].as_str()?.to_owned() });
    addresses.filter_map(address).collect()
}

/// The kinds of the VM's objects, except those that are watched anyway.
fn object_kinds(
    vm: &VirtualMachine,
    observed: &Observed,
    rendered: &[Rendered],
    unknown: &[TypeMeta],
) -> Vec<ObjectKind> {
    let existing = observed.objects.iter().filter(|object| object.is_made_for(vm));
    let existing = existing.map(|object| object.key.types()).filter(|kind| !kinds::is_needed(kind, rendered));
    let rendered = rendered.iter().map(|object| object.key.types()).filter(|kind| !kinds::is_needed(kind, &[]));
    let kinds = existing.chain(unknown.iter().cloned()).chain(rendered);
    kinds.map(ObjectKind::from).collect::<BTreeSet<_>>().into_iter().collect()
}

/// `ready` is the reason of the condition Ready.
fn phase(reconciled: &Reconciled<'_>, guest: &ReportedGuest<'_>, pods: Pods<'_>, ready: Reason) -> Phase {
    let is_being_deleted = reconciled.vm.metadata.deletion_timestamp.is_some();
    match (reconciled.plan.power.wanted, pods.own.or(pods.previous)) {
        (WantedPower::Up, Some(pod)) if pod.deleting.is_some() => Phase::Stopping,
        (WantedPower::Up, Some(_)) if guest.is_up => Phase::Running,
        (WantedPower::Up, Some(pod)) if is_lost(pod) => Phase::Unknown,
        (WantedPower::Up, Some(_)) if matches!(ready, Reason::Paused | Reason::Resuming | Reason::GuestPanicked) => {
            Phase::Paused
        }
        (WantedPower::Up, None) if is_being_deleted => Phase::Stopped,
        (WantedPower::Up, Some(_) | None) if is_failure(ready) => Phase::Failed,
        (WantedPower::Up, Some(_) | None) => Phase::Starting,
        (WantedPower::Down, None) if ready::is_ending_helper(reconciled) => Phase::Stopping,
        (WantedPower::Down | WantedPower::Halting, None) => Phase::Stopped,
        (WantedPower::Down | WantedPower::Halting, Some(_)) => Phase::Stopping,
    }
}

/// Whether a VM with this reason of Ready fails to start. A VM that only waits, for a node or for its image, does not.
fn is_failure(ready: Reason) -> bool {
    ready.effect() == Effect::Warning && !matches!(ready, Reason::Unschedulable | Reason::StartDelayed)
}

fn templates_valid(reconciled: &Reconciled<'_>) -> NewCondition {
    let (status, reason, message) = match (reconciled.rendered, reconciled.source.refused) {
        (Err(error), _) => {
            let problem = not_rendered(reconciled, error);
            (false, problem.reason, problem.words())
        }
        (Ok(_), Some(error)) if error.of_values => {
            let message = format!(
                "the VM keeps the version of its templates, because its values do not match the newest one: {error}"
            );
            (true, Reason::ValuesRefused, message)
        }
        (Ok(_), Some(error)) if error.is_of_configuration() => {
            let message = format!("the newest configuration of the manager is not used: {error}");
            (true, Reason::ConfigurationRefused, message)
        }
        (Ok(_), Some(error)) => (true, Reason::NewerRefused, format!("newer templates are not used: {error}")),
        (Ok(_), None) => (true, Reason::Rendered, String::new()),
    };
    NewCondition { type_: TEMPLATES_VALID, status, reason, message }
}

/// Why the VM can't be rendered.
fn not_rendered(reconciled: &Reconciled<'_>, error: &TemplateError) -> Problem {
    match (&reconciled.vm.spec.invalid, reconciled.source.refused) {
        (Some(invalid), _) => Problem::new(Reason::InvalidSpec, &invalid.message),
        (None, _) if error.not_allowed => {
            let instances = Instances::new(reconciled.vm, reconciled.observed);
            let runs = instances.active().is_some_and(|pod| pod.deleting.is_none());
            let end = if runs { ". The guest goes on as it was started; it will not be started again" } else { "" };
            Problem::new(Reason::NotAllowed, format!("{}{end}", error.message))
        }
        // Who has just corrected the templates looks for what is wrong now, not for what they have corrected.
        (None, Some(newer)) if newer != error => Problem::new(
            Reason::TemplateError,
            format!("the newest templates are refused: {newer}; those in use do not render this VM either: {error}"),
        ),
        (None, _) => Problem::new(Reason::TemplateError, error.to_string()),
    }
}

/// The conditions that the API server has.
fn current_conditions(vm: &VirtualMachine) -> &[Condition] {
    vm.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default()
}

/// A string in JSON; empty if there is none.
fn string(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests;
