//! status: what is observed and planned becomes what the manager says about a machine.
//!
//! | | Ready (the state is the wanted one) | Running (power) | `ready` (the guest is up) |
//! |---|---|---|---|
//! | stopped, as wanted | True, StoppedAsRequested | False | false |
//! | starting | False, Starting or the cause | False | false |
//! | up, as wanted | True, Running | True | true |
//! | up, but its node does not answer | False, NodeNotResponding | True | false: nobody knows |
//! | up, should stop | False, Stopping | True | true until the guest is down |
//! | down, should run | False, the cause and the next try | False | false |
//! | down, because the guest shut itself down | True, GuestShutdown | False | false |
//!
//! The runner writes `Running`, `Booted`, what the guest's agents and its display tell, and what it measures; where there is
//! no Pod, nobody else can, so then it is the manager who says that nothing runs.

use std::collections::BTreeSet;

use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Condition, jiff::Timestamp};
use kube::{ResourceExt, core::TypeMeta};
use serde_json::Value;

use crate::{
    api::{
        ObjectKind, PowerState, Reason, RenderedFrom, VirtualMachine, VirtualMachineStatus,
        conditions::{
            self, BOOTED, CONSOLE_CONNECTED, NewCondition, POWER_UNMANAGED, READY, RESTART_REQUIRED, RUNNING,
            TEMPLATES_VALID, USER_LOGGED_IN, VMOP_AGENT_CONNECTED,
        },
        status::{Address, Phase, whole_seconds},
    },
    claims::{self, Refusal},
    object::{CONTAINER_NAME, RESTARTED_ANNOTATION, Rendered},
    observed::{Object, Observed, Part},
    ownership::owns_condition,
    plan::{self, Plan, Wait, kinds},
    power::{Power, Wanted, is_report_of},
    render::{TemplateError, TemplateSet},
};

pub mod events;

/// How the execution of a plan ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Why an action failed, if a person must know.
    pub failure: Option<Failure>,
    /// What the API server answered to changes of claims that it refused. The VM runs without them.
    pub refusals: Vec<Refusal>,
    /// Kinds of objects that the VM's status names and of which the manager does not know the objects.
    pub unknown_kinds: Vec<TypeMeta>,
}

/// Why an action failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The reason of the condition Ready.
    pub reason: Reason,
    /// For a person.
    pub message: String,
}

/// Where a VM's templates come from.
#[derive(Clone, Copy, Debug, Default)]
pub struct Source<'a> {
    /// The set that is in force for it.
    pub set: Option<&'a TemplateSet>,
    /// Why a newer version of the set is not.
    pub refused: Option<&'a TemplateError>,
}

/// A VM after one reconcile: everything that its status and its events are derived from.
#[derive(Clone, Copy)]
pub struct Reconciled<'a> {
    /// The VM, with the status that the API server has.
    pub vm: &'a VirtualMachine,
    /// Its objects after the plan was executed.
    pub observed: &'a Observed,
    /// What was planned.
    pub plan: &'a Plan,
    /// What the templates made of it.
    pub rendered: Result<&'a [Rendered], &'a TemplateError>,
    /// How the execution of the plan ended.
    pub outcome: &'a Outcome,
    /// Where the templates come from.
    pub source: Source<'a>,
}

/// The Pods that a machine may be in.
#[derive(Clone, Copy)]
struct Pods<'a> {
    /// The machine's.
    own: Option<&'a Object>,
    /// Where it has none: that of an earlier machine of its name, which must end first.
    former: Option<&'a Object>,
}

/// Derives the manager's part of a VM's status. Fields that the manager does not write are absent.
pub fn status(reconciled: &Reconciled<'_>) -> VirtualMachineStatus {
    let Reconciled { vm, observed, plan, rendered, outcome, source } = *reconciled;
    let pod = plan::pod(vm, observed).map(AsRef::as_ref);
    let guest = Guest::of(vm, pod);
    let pods = Pods { own: pod, former: former(vm, observed, plan).filter(|_| pod.is_none()) };
    let phase = phase(plan.power.wanted, guest.up, pods.own.or(pods.former));
    let claims = rendered.map(|rendered| claims::claims(vm, observed, rendered, &outcome.refusals)).unwrap_or_default();

    let mut new = vec![templates_valid(rendered, source.refused), ready(reconciled, guest.up, pods)];
    new.extend(restart_required(vm, plan, &guest));
    new.extend(power_unmanaged(plan));
    new.extend(rendered.ok().and_then(|rendered| claims::storage_ready(&claims, rendered)));
    new.extend(without_report(vm, &guest, phase));
    new.sort_by_key(|condition| condition.type_);

    let is_runner_silent = !guest.reports(RUNNING);
    let reported = vm.status.as_ref().filter(|_| is_runner_silent);
    // Another manager's field can't be removed, but it can be set to nothing.
    let emptied = |is_set: bool| is_set.then(String::new);
    VirtualMachineStatus {
        observed_generation: Some(vm.metadata.generation.unwrap_or_default()),
        phase: Some(phase.as_str().to_owned()),
        created: Some(pod.is_some()),
        ready: Some(guest.up),
        power: Some(if plan.power.wanted == Wanted::Up { PowerState::Running } else { PowerState::Stopped }),
        conditions: conditions::with_times(new, guest.current, vm.metadata.generation, observed.now),
        templates: source.set.filter(|_| rendered.is_ok()).map(|set| RenderedFrom {
            set: vm.template_set().map(str::to_owned),
            version: Some(set.version().to_owned()),
        }),
        object_kinds: object_kinds(vm, observed, rendered.unwrap_or_default(), &outcome.unknown_kinds),
        claims,
        halted: plan.power.halted.clone(),
        retry: plan.retry.clone(),
        pending_changes: plan.pending.clone(),
        cpus: is_runner_silent.then_some(0),
        ram: is_runner_silent.then(|| "0".into()),
        console_client: emptied(reported.is_some_and(|status| status.console_client.is_some())),
        logged_in_user: emptied(reported.is_some_and(|status| status.logged_in_user.is_some())),
        node_name: pod.and_then(|pod| pod.text(Part::Spec, "/nodeName")).map(str::to_owned),
        addresses: pod.map(addresses).filter(|addresses| !addresses.is_empty()),
        ..VirtualMachineStatus::default()
    }
}

/// What the runner has reported of the guest, as far as it still holds.
struct Guest<'a> {
    vm: &'a VirtualMachine,
    pod: Option<&'a Object>,
    /// The conditions that the API server has.
    current: &'a [Condition],
    was_killed: bool,
    /// The guest runs.
    up: bool,
}

impl<'a> Guest<'a> {
    fn of(vm: &'a VirtualMachine, pod: Option<&'a Object>) -> Self {
        let current = vm.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
        let was_killed = pod.is_some_and(|pod| was_killed(pod, current));
        let mut guest = Self { vm, pod, current, was_killed, up: false };
        let is_over = pod.is_some_and(|pod| plan::has_ended(pod) || is_down(pod) || is_lost(pod));
        guest.up = guest.reports(RUNNING) && conditions::is_true(current, RUNNING) && !is_over;
        guest
    }

    /// Whether the runner of this Pod has written the condition, and it still holds. Without a Pod, or before the runner's first
    /// report, only the manager can say that nothing runs.
    fn reports(&self, type_: &str) -> bool {
        let is_over = |condition: &Condition| self.was_killed && condition.status == "True";
        conditions::find(self.current, type_)
            .is_some_and(|condition| !owns_condition(self.vm, type_) && !is_over(condition))
            && self.pod.is_some_and(|pod| is_report_of(self.vm, pod))
    }
}

fn restart_required(vm: &VirtualMachine, plan: &Plan, guest: &Guest<'_>) -> Option<NewCondition> {
    // The runner lists what QEMU takes at its start only.
    let runners = vm.status.iter().flat_map(|status| &status.pending_changes);
    let runners = runners.filter(|change| guest.reports(RUNNING) && !change.path.starts_with(plan::pending::PREFIX));
    let paths: Vec<&str> = plan.pending.iter().chain(runners).map(|change| change.path.as_str()).collect();
    (!paths.is_empty()).then(|| NewCondition {
        type_: RESTART_REQUIRED,
        status: true,
        reason: Reason::Changed,
        message: format!("the next start brings: {}", paths.join(", ")),
    })
}

fn power_unmanaged(plan: &Plan) -> Option<NewCondition> {
    plan.power.unmanaged.then(|| NewCondition {
        type_: POWER_UNMANAGED,
        status: true,
        reason: Reason::StateNotSet,
        message: "nobody sets spec.vm.state any more, so the VM stays up; to stop it, set state to Running and then to Stopped"
            .into(),
    })
}

/// The runner's conditions where no runner reports: of a guest that is gone nothing holds any more. A runner that is older than
/// some of these conditions does not write them.
fn without_report(vm: &VirtualMachine, guest: &Guest<'_>, phase: Phase) -> Vec<NewCondition> {
    let current = vm.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    let of_guest = [VMOP_AGENT_CONNECTED, USER_LOGGED_IN, CONSOLE_CONNECTED];
    let of_guest = of_guest.into_iter().filter(|type_| conditions::find(current, type_).is_some());
    let unknown = [RUNNING, BOOTED].into_iter().filter(|type_| !guest.reports(type_));
    let condition =
        |type_| NewCondition { type_, status: false, reason: phase.reason(), message: "no guest is running".into() };
    unknown.chain(of_guest.filter(|_| !guest.reports(RUNNING))).map(condition).collect()
}

fn addresses(pod: &Object) -> Vec<Address> {
    let addresses = pod.status["podIPs"].as_array().into_iter().flatten();
    let address = |item: &Value| Some(Address { type_: "PodIP".into(), address: item["ip"].as_str()?.to_owned() });
    addresses.filter_map(address).collect()
}

/// The kinds of the machine's objects, but for those that are looked for in any case.
fn object_kinds(
    vm: &VirtualMachine,
    observed: &Observed,
    rendered: &[Rendered],
    unseen: &[TypeMeta],
) -> Vec<ObjectKind> {
    let uid = vm.uid().unwrap_or_default();
    let there = observed.objects.iter().filter(|object| object.was_made_for(&uid)).map(|object| object.key.types());
    let left = there.filter(|kind| !kinds::is_needed(kind, rendered)).chain(unseen.iter().cloned());
    let made = rendered.iter().map(|object| object.key.types()).filter(|kind| !kinds::is_needed(kind, &[]));
    left.chain(made).map(ObjectKind::from).collect::<BTreeSet<_>>().into_iter().collect()
}

/// The Pod of an earlier machine of that name, if the plan waits for it.
fn former<'a>(vm: &VirtualMachine, observed: &'a Observed, plan: &Plan) -> Option<&'a Object> {
    let is_awaited = |pod: &&Object| {
        plan.waits
            .iter()
            .any(|wait| matches!(wait, Wait::Gone(key) | Wait::Overdue(key) | Wait::Kept(key) if *key == pod.key))
    };
    plan::predecessor(vm, observed).map(AsRef::as_ref).filter(is_awaited)
}

fn phase(wanted: Wanted, up: bool, pod: Option<&Object>) -> Phase {
    match (wanted, pod) {
        (Wanted::Up, Some(pod)) if pod.deleting.is_some() => Phase::Stopping,
        (Wanted::Up, Some(_)) if up => Phase::Running,
        (Wanted::Up, Some(pod)) if is_lost(pod) => Phase::Unknown,
        (Wanted::Up, Some(pod)) if pod.text(Part::Status, "/phase") == Some("Failed") => Phase::Failed,
        (Wanted::Up, _) => Phase::Starting,
        (Wanted::Down | Wanted::Halting, None) => Phase::Stopped,
        (Wanted::Down | Wanted::Halting, Some(_)) => Phase::Stopping,
    }
}

/// Whether the runner's container does not run. One that was killed could not report that.
fn is_down(pod: &Object) -> bool {
    let containers = pod.status["containerStatuses"].as_array().into_iter().flatten();
    let state = |container: &Value, state: &str| !container["state"][state].is_null();
    containers
        .filter(|container| container["name"] == CONTAINER_NAME)
        .any(|container| state(container, "waiting") || state(container, "terminated"))
}

/// Whether the runner ended after it had said that its guest runs, so that nobody but us can take that back. The times of both are
/// the node's, and what says so anew is a runner that was started since.
fn was_killed(pod: &Object, current: &[Condition]) -> bool {
    let running = conditions::find(current, RUNNING).filter(|running| running.status == "True");
    let Some(since) = running.map(|running| running.last_transition_time.0) else { return false };
    let containers = pod.status["containerStatuses"].as_array().into_iter().flatten();
    let ended = |container: &Value| {
        let state = &container["state"];
        let last = if state["waiting"].is_null() { state } else { &container["lastState"] };
        last.pointer("/terminated/finishedAt").and_then(|time| time.as_str()?.parse::<Timestamp>().ok())
    };
    plan::has_ended(pod)
        || containers.filter(|container| container["name"] == CONTAINER_NAME).filter_map(ended).any(|end| since < end)
}

/// Whether the Pod's node does not answer, so that nobody knows whether the guest runs. The node controller then says that the Pod
/// is not ready and leaves alone what the kubelet has said last of its containers
/// (<https://kubernetes.io/docs/concepts/architecture/nodes/#node-controller>); the kubelet itself says both or neither, but for
/// a readiness gate.
fn is_lost(pod: &Object) -> bool {
    pod.condition("ContainersReady", "True").is_some()
        && pod.condition("Ready", "False").is_some_and(|ready| ready["reason"] != "ReadinessGatesNotReady")
}

fn templates_valid(rendered: Result<&[Rendered], &TemplateError>, refused: Option<&TemplateError>) -> NewCondition {
    let (status, reason, message) = match (rendered, refused) {
        (Err(error), _) => (false, Reason::TemplateError, error.to_string()),
        (Ok(_), Some(error)) => (true, Reason::NewerRefused, format!("newer templates are not used: {error}")),
        (Ok(_), None) => (true, Reason::Rendered, String::new()),
    };
    NewCondition { type_: TEMPLATES_VALID, status, reason, message }
}

fn ready(reconciled: &Reconciled<'_>, up: bool, Pods { own: pod, former }: Pods<'_>) -> NewCondition {
    let Reconciled { vm, plan, rendered, outcome, .. } = *reconciled;
    let taken = plan.waits.iter().find_map(|wait| match wait {
        Wait::NotOurs(key) => Some(key),
        _ => None,
    });
    let (status, reason, message) = match (plan.power.wanted, pod) {
        _ if let Some(failure) = &outcome.failure => (false, failure.reason, failure.message.clone()),
        _ if let Some(key) = taken => (
            false,
            Reason::NameTaken,
            format!("{key} exists and is not this machine's: delete or rename one of the two"),
        ),
        (_, None) if let Some((reason, message)) = unanswered(plan, former) => (false, reason, message),
        (Wanted::Down, None) if let Some(former) = former => {
            (false, Reason::Stopping, format!("waiting for {} of an earlier machine of this name to end", former.key))
        }
        (Wanted::Down, None) => stopped(&plan.power),
        (Wanted::Down | Wanted::Halting, pod) => match unanswered(plan, pod) {
            Some((reason, message)) => (false, reason, message),
            None if plan.power.wanted == Wanted::Halting => {
                (false, Reason::Stopping, "the guest has shut itself down; its Pod goes next".into())
            }
            None => (false, Reason::Stopping, "waiting for the guest to power down".into()),
        },
        (Wanted::Up, Some(pod)) if pod.deleting.is_some() => match unanswered(plan, Some(pod)) {
            Some((reason, message)) => (false, reason, message),
            None => (
                false,
                Reason::Restarting,
                format!("waiting for the old Pod to be gone before a new one is made{}", disruption(pod)),
            ),
        },
        (Wanted::Up, Some(_)) if up => (true, Reason::Running, "the machine runs, as the spec says".into()),
        (Wanted::Up, Some(_)) if let Some((reason, message)) = unanswered(plan, pod) => (false, reason, message),
        (Wanted::Up, Some(pod)) => {
            let (reason, message) = cause(vm, pod)
                .unwrap_or_else(|| (Reason::Starting, "waiting for the runner to report that the guest runs".into()));
            let retry = plan.retry.as_ref().filter(|retry| retry.pod_uid == pod.uid);
            let retry = retry
                .map(|retry| format!("; try {} is at {}", retry.count.saturating_add(1), whole_seconds(retry.next.0)));
            (false, reason, message + &retry.unwrap_or_default())
        }
        (Wanted::Up, None) => match (rendered, plan.waits.first()) {
            (Err(error), _) => (false, Reason::TemplateError, error.to_string()),
            (
                Ok(_),
                Some(Wait::Gone(key) | Wait::Overdue(key) | Wait::Kept(key) | Wait::NotOurs(key) | Wait::Retry(key)),
            ) => (false, Reason::WaitingForDeletion, format!("waiting for {key} to be gone")),
            (Ok(_), None) => (false, Reason::Starting, "waiting for the Pod to start".into()),
        },
    };
    NewCondition { type_: READY, status, reason, message }
}

fn stopped(power: &Power) -> (bool, Reason, String) {
    if power.halted.as_ref().is_some_and(|halted| !halted.released) {
        let message = format!(
            "the guest shut itself down and guestShutdownStops is set; to start it, set state to Stopped and then to Running, \
             or give the annotation {RESTARTED_ANNOTATION} a new value"
        );
        (true, Reason::GuestShutdown, message)
    } else {
        (true, Reason::StoppedAsRequested, "the machine is down, as the spec says".into())
    }
}

/// A Pod whose node does not answer, or that should be gone: a reason and what to do.
fn unanswered(plan: &Plan, pod: Option<&Object>) -> Option<(Reason, String)> {
    let pod = pod?;
    let (name, node) = (&pod.key.name, pod.text(Part::Spec, "/nodeName").unwrap_or("?"));
    let since = || pod.deleting.map(whole_seconds).unwrap_or_default();
    if plan.waits.contains(&Wait::Kept(pod.key.clone())) {
        let message = format!(
            "Pod {name} should have gone at {}; nothing runs in it any more, but something keeps it: see its metadata.finalizers",
            since()
        );
        return Some((Reason::PodNotRemoved, message));
    }
    let head = if plan.waits.contains(&Wait::Overdue(pod.key.clone())) {
        format!("Pod {name} should have ended at {}, but node {node} does not say so", since())
    } else if is_lost(pod) {
        format!("node {node}, on which Pod {name} runs, does not answer")
    } else {
        return None;
    };
    let message = format!(
        "{head}; the guest may still run there, so nothing is started elsewhere. If the node is really down, say so: \
         kubectl taint node {node} node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
    );
    Some((Reason::NodeNotResponding, message))
}

/// Why a Pod is going, if the cluster removes it.
fn disruption(pod: &Object) -> String {
    let disruption = pod.condition("DisruptionTarget", "True");
    disruption.map(|item| format!(" ({}: {})", text(&item["reason"]), text(&item["message"]))).unwrap_or_default()
}

/// Why a Pod that is there does not run its guest: what its conditions and its containers say.
fn cause(vm: &VirtualMachine, pod: &Object) -> Option<(Reason, String)> {
    if let Some(condition) = pod.condition("PodScheduled", "False") {
        return Some((Reason::Unschedulable, text(&condition["message"])));
    }
    match pod.text(Part::Status, "/phase") {
        Some("Succeeded") => return Some((Reason::PodSucceeded, "its containers have ended".into())),
        Some("Failed") => return Some((Reason::PodFailed, failed(pod))),
        _ => {}
    }
    let mut shut_down = None;
    for container in pod.containers() {
        let name = text(&container["name"]);
        let ended = ended(container);
        if let Some(ended) = ended.filter(|ended| ended["exitCode"] != 0) {
            return Some((Reason::RunnerFailed, end_of(&name, ended)));
        }
        let waiting = &container["state"]["waiting"];
        match waiting["reason"].as_str() {
            None | Some("ContainerCreating" | "PodInitializing") => {}
            // The kubelet's word for each pause before a container is started again
            // (<https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/#restart-policy>).
            Some("CrashLoopBackOff") if ended.is_some() && name == CONTAINER_NAME => {
                let message =
                    "the guest has shut down; its node starts it again after a pause, which grows up to 5 min";
                shut_down = Some((Reason::Starting, message.to_owned()));
            }
            // The kubelet says why, and then, in turns, only that it waits.
            Some("ImagePullBackOff") if let Some(said) = said_before(vm, Reason::ImagePullFailed) => {
                return Some((Reason::ImagePullFailed, said));
            }
            Some(reason @ ("ErrImagePull" | "ImagePullBackOff" | "InvalidImageName" | "ErrImageNeverPull")) => {
                return Some((Reason::ImagePullFailed, format!("{name}: {reason}: {}", text(&waiting["message"]))));
            }
            Some(reason) => {
                return Some((Reason::ContainerWaiting, format!("{name}: {reason}: {}", text(&waiting["message"]))));
            }
        }
    }
    if shut_down.is_some() {
        return shut_down;
    }
    let current = vm.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    let running =
        conditions::find(current, RUNNING).filter(|_| !owns_condition(vm, RUNNING) && is_report_of(vm, pod))?;
    (running.status == "False" && conditions::reason(running) == Some(Reason::QemuFailed))
        .then(|| (Reason::RunnerFailed, running.message.clone()))
}

/// How a container ended that has, or how it did the last time.
fn ended(container: &Value) -> Option<&Value> {
    [&container["state"]["terminated"], &container["lastState"]["terminated"]].into_iter().find(|it| it.is_object())
}

/// How a container ended, in words: its own, which are the end of its log if it had none for that.
fn end_of(name: &str, ended: &Value) -> String {
    let (reason, words) = (text(&ended["reason"]), text(&ended["message"]));
    // These say no more than the exit code.
    let reason = Some(reason).filter(|reason| !["", "Error", "Completed"].contains(&reason.as_str()));
    let reason = reason.map(|reason| format!(" ({reason})")).unwrap_or_default();
    let words = Some(words.trim()).filter(|words| !words.is_empty()).map(|words| format!(": {words}"));
    format!("{name} ended with exit code {}{reason}{}", ended["exitCode"], words.unwrap_or_default())
}

/// Why a Pod has failed: the cluster's words, or how its containers ended.
fn failed(pod: &Object) -> String {
    let said: Vec<&str> = ["/reason", "/message"].iter().filter_map(|part| pod.text(Part::Status, part)).collect();
    if !said.is_empty() {
        return said.join(": ");
    }
    let ends = pod.containers().filter_map(|it| Some((text(&it["name"]), ended(it)?)));
    let ends: Vec<String> =
        ends.filter(|(_, ended)| ended["exitCode"] != 0).map(|(name, ended)| end_of(&name, ended)).collect();
    if ends.is_empty() { "its containers have ended".into() } else { ends.join("; ") }
}

/// What the condition Ready says already for that reason.
fn said_before(vm: &VirtualMachine, reason: Reason) -> Option<String> {
    let ready = conditions::find(&vm.status.as_ref()?.conditions, READY)?;
    (conditions::reason(ready) == Some(reason)).then(|| ready.message.clone())
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests;
