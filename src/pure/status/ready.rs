//! The condition Ready: whether the VM is as its spec wants it, and if not, why.

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::ResourceExt;
use serde_json::Value;

use super::{
    Pods, Reconciled, current_conditions,
    generation::has_read,
    guest::{ReportedGuest, is_lost, runner_statuses},
    not_rendered, string,
};
use crate::{
    api::{
        Accelerator, Problem, Reason, VirtualMachine,
        conditions::{self, CHANGES_APPLIED, DEVICES_READY, NewCondition, READY, RUNNING},
        reasons::Effect,
        status::{Halted, Retry, whole_seconds},
    },
    claims,
    object::{AGENT_NAME, FORCE_STOP_ANNOTATION, ObjectKey, PASST_NAME, RESTARTED_ANNOTATION},
    observed::{NodeState, Object, end_of, printable},
    ownership::is_said_by_runner,
    plan::{
        Plan, Wait,
        beside::is_beside,
        unstarted::{late_at, untaken_at, working},
    },
    power::{Power, WantedPower, is_report_of},
};

/// The kubelet's first and longest pause before it starts a container again.
const FIRST_PAUSE: SignedDuration = SignedDuration::from_secs(10);
const LONGEST_PAUSE: SignedDuration = SignedDuration::from_mins(5);

/// The condition Ready, and what of it is a field of the status.
pub(super) enum Readiness {
    /// The VM is as its spec wants it.
    Ready(Reason, String),
    /// It is not.
    Not {
        /// Why not.
        problem: Problem,
        /// What else people should know, such as the time of the next try.
        more: String,
    },
}

impl Readiness {
    /// The reason of the condition.
    pub(super) const fn reason(&self) -> Reason {
        match self {
            Self::Ready(reason, _) | Self::Not { problem: Problem { reason, .. }, .. } => *reason,
        }
    }

    /// What follows the problem in the message, and stays if a cause is found for it ([`super::Draft::explained`]).
    pub(super) fn tail(&self) -> &str {
        match self {
            Self::Ready(..) => "",
            Self::Not { more, .. } => more,
        }
    }

    /// The problem, if a person must know of it.
    pub(super) fn problem(&self) -> Option<Problem> {
        match self {
            Self::Not { problem, .. } if problem.reason.effect() == Effect::Warning => Some(problem.clone()),
            Self::Ready(..) | Self::Not { .. } => None,
        }
    }
}

impl From<Problem> for Readiness {
    fn from(problem: Problem) -> Self {
        Self::Not { problem, more: String::new() }
    }
}

impl From<Readiness> for NewCondition {
    fn from(readiness: Readiness) -> Self {
        let (status, reason, message) = match readiness {
            Readiness::Ready(reason, message) => (true, reason, message),
            Readiness::Not { problem, more } => (false, problem.reason, problem.words() + &more),
        };
        Self { type_: READY, status, reason, message }
    }
}

/// Derives the condition: the first problem that blocks the plan, else by the wanted power and the Pod. A VM whose spec can't be rendered is
/// never ready: nothing shows whether it is as that spec wants it.
pub(super) fn ready(reconciled: &Reconciled<'_>, guest: &ReportedGuest<'_>, pods: Pods<'_>) -> Readiness {
    let Reconciled { vm, observed: _, plan, rendered: _, outcome, source: _ } = *reconciled;
    if let Some(failure) = &outcome.failure {
        return failure.clone().into();
    }
    let taken = waits(reconciled).find(|wait| matches!(wait, Wait::NotOurs(_)));
    if let Some(wait) = taken {
        return name_taken(wait.key()).into();
    }
    let is_stopping = plan.power.wanted != WantedPower::Up && pods.own.or(pods.previous).is_some();
    if let Some(invalid) = vm.spec.invalid.as_ref().filter(|_| !is_stopping) {
        return Problem::new(Reason::InvalidSpec, &invalid.message).into();
    }
    match (by_power(reconciled, guest, pods), reconciled.rendered) {
        // The VM is as an earlier spec wanted it.
        (Readiness::Ready(..), Err(error)) => not_rendered(reconciled, error).into(),
        (readiness, _) => readiness,
    }
}

/// The condition by the wanted power and the Pod.
fn by_power(reconciled: &Reconciled<'_>, guest: &ReportedGuest<'_>, pods: Pods<'_>) -> Readiness {
    let plan = reconciled.plan;
    if let (WantedPower::Up, Some(own), Some(second)) = (plan.power.wanted, pods.own, pods.second)
        && own.deleting.is_none()
        && !own.has_ended()
    {
        return written_by_two(own, second).into();
    }
    match (plan.power.wanted, pods.own) {
        (WantedPower::Up, Some(pod)) if pod.deleting.is_some() => replacing(reconciled, guest, pod).into(),
        (WantedPower::Up, Some(pod)) if guest.is_up && reconciled.vm.spec.vm.paused => {
            pausing(guest, has_read(reconciled, pod)).into()
        }
        (WantedPower::Up, Some(_)) if guest.is_up => match beside_guest(reconciled, guest) {
            Some(problem) => problem.into(),
            None => Readiness::Ready(Reason::Running, running(&plan.power)),
        },
        (WantedPower::Up, Some(pod)) => {
            let readiness = starting(reconciled, pod);
            match readiness.reason() {
                Reason::Paused if reconciled.vm.spec.vm.paused => {
                    Readiness::Ready(Reason::Paused, "the guest is paused, as the VM's spec wants it".into())
                }
                Reason::Paused if was_to_be_paused(reconciled.vm) && !has_read(reconciled, pod) => {
                    Problem::new(Reason::Resuming, "the runner lets the paused guest go on next").into()
                }
                _ => readiness,
            }
        }
        (WantedPower::Up, None) => {
            stuck(reconciled, pods.previous).unwrap_or_else(|| waiting_for_pod(reconciled)).into()
        }
        (WantedPower::Halting, pod) => stuck(reconciled, pod.or(pods.previous))
            .unwrap_or_else(|| {
                Problem::new(Reason::Stopping, "the guest has shut itself down; the manager deletes its Pod next")
            })
            .into(),
        (WantedPower::Down, Some(pod)) => stuck(reconciled, Some(pod))
            .unwrap_or_else(|| {
                let message = beside(guest, pod).unwrap_or_else(|| {
                    format!("waiting until the guest has powered down{}", time_limit(reconciled.vm, plan, pod))
                });
                Problem::new(Reason::Stopping, message)
            })
            .into(),
        (WantedPower::Down, None) => match pods.previous {
            Some(previous) => {
                stuck(reconciled, Some(previous)).unwrap_or_else(|| waiting_for_previous(previous)).into()
            }
            None => helper(reconciled).map_or_else(|| stopped(&plan.power), Readiness::from),
        },
    }
}

/// Whether the guest is paused because an earlier spec wanted that, and nobody has paused it by hand.
fn was_to_be_paused(vm: &VirtualMachine) -> bool {
    conditions::find(current_conditions(vm), READY).is_some_and(|ready| match conditions::reason(ready) {
        Some(Reason::Paused) => ready.status == "True",
        reason => matches!(reason, Some(Reason::Pausing | Reason::Resuming)),
    })
}

/// The guest runs and should be paused. If the runner has read that, it has done it, and somebody has let the guest go on.
fn pausing(guest: &ReportedGuest<'_>, has_read: bool) -> Problem {
    device_problem(guest).or_else(|| refused_change(guest)).unwrap_or_else(|| {
        let message = if has_read {
            "spec.vm.paused is set, and the guest runs: somebody has let it go on with vm-runner ctl resume, or the runner's image is older than \
             this field"
        } else {
            "the runner pauses the guest next"
        };
        Problem::new(Reason::Pausing, message)
    })
}

/// A device of the running guest that does not work, as the runner reports it.
fn device_problem(guest: &ReportedGuest<'_>) -> Option<Problem> {
    let failed = conditions::find(guest.conditions, DEVICES_READY).filter(|_| guest.reports(DEVICES_READY))?;
    let reason = conditions::reason(failed).filter(|reason| reason.uses().contains(DEVICES_READY))?;
    (failed.status == "False").then(|| Problem::new(reason, failed.message.clone()))
}

/// What is not as it should be although the guest runs.
fn beside_guest(reconciled: &Reconciled<'_>, guest: &ReportedGuest<'_>) -> Option<Problem> {
    device_problem(guest).or_else(|| refused_change(guest)).or_else(|| helper(reconciled))
}

/// A change of the running VM that QEMU refused, as the runner reports it.
fn refused_change(guest: &ReportedGuest<'_>) -> Option<Problem> {
    let refused = conditions::find(guest.conditions, CHANGES_APPLIED).filter(|_| guest.reports(CHANGES_APPLIED))?;
    (refused.status == "False").then(|| Problem::new(Reason::ChangeFailed, refused.message.clone()))
}

/// Another Pod can write to the disks of the VM, whoever made it. The manager does not delete it.
fn written_by_two(own: &Object, second: &Object) -> Problem {
    let message = format!(
        "{} mounts a claim of this VM beside the VM's own Pod {}, and two must not write to one disk: delete the one that should not run, or mount \
         the claim readOnly in it",
        second.key, own.key.name
    );
    Problem::new(Reason::ClaimInUse, message)
}

/// Until when a Pod that is being deleted has time to end, and how to end it before.
fn time_limit(vm: &VirtualMachine, plan: &Plan, pod: &Object) -> String {
    let Some(end) = pod.deleting else { return String::new() };
    let limit = format!(", until {} at most", whole_seconds(end));
    if plan.force_stop.pod_uid.as_ref() == Some(&pod.uid) {
        return limit;
    }
    limit + &format!("; to end it now: {}={}", annotate(vm, FORCE_STOP_ANNOTATION), pod.uid)
}

/// The guest in a Pod that is being deleted has ended, so only other containers keep the Pod. To force the stop would change nothing.
fn beside(guest: &ReportedGuest<'_>, pod: &Object) -> Option<String> {
    let end = pod.deleting.filter(|_| guest.has_ended())?;
    let names =
        pod.spec["containers"].as_array().into_iter().flatten().filter_map(|container| container["name"].as_str());
    let others: Vec<_> =
        names.filter(|name| *name != pod.runner_container_name() && ![AGENT_NAME, PASST_NAME].contains(name)).collect();
    let (cause, remedy) = match others.as_slice() {
        [] => (format!("waiting until its Pod {} is gone", pod.key.name), ""),
        [name] => (
            format!("waiting for the container {name} of its Pod {}", pod.key.name),
            "; it should end when it gets SIGTERM",
        ),
        names => (
            format!("waiting for the containers {} of its Pod {}", names.join(", "), pod.key.name),
            "; each should end when it gets SIGTERM",
        ),
    };
    Some(format!("the guest does not run any more; {cause}, until {} at most{remedy}", whole_seconds(end)))
}

/// The command that sets an annotation of the VM, without its value.
fn annotate(vm: &VirtualMachine, annotation: &str) -> String {
    let (namespace, name) = (vm.namespace().unwrap_or_default(), vm.name_any());
    format!("kubectl -n {namespace} annotate --overwrite vm {name} {annotation}")
}

/// What holds up the VM. The condition ObjectsReady has the other waits.
fn waits<'a>(reconciled: &Reconciled<'a>) -> impl Iterator<Item = &'a Wait> {
    let rendered = reconciled.rendered.unwrap_or_default();
    reconciled.plan.waits.iter().filter(move |wait| !is_beside(wait.key(), rendered))
}

/// An object with a needed name belongs to somebody else.
pub(super) fn name_taken(key: &ObjectKey) -> Problem {
    let message = format!("{key} exists and does not belong to this VM: delete or rename one of the two");
    Problem::new(Reason::NameTaken, message)
}

/// The VM runs.
fn running(power: &Power) -> String {
    match &power.until.in_force {
        Some(it) => format!("the VM runs until {}, as its annotation wants it", whole_seconds(it.until.0)),
        None => "the VM runs, as its spec wants it".into(),
    }
}

/// The VM is down, and no Pod is left.
fn stopped(power: &Power) -> Readiness {
    if let Some(halted) = power.halted.as_ref().filter(|halted| !halted.released) {
        let (reason, cause) = if halted.by == Halted::PANIC {
            (
                Reason::StoppedAfterPanic,
                "the guest has panicked or has not fed its watchdog, and onPanic or watchdog stops it then",
            )
        } else {
            (Reason::GuestShutdown, "the guest has shut itself down, and guestShutdownStops is set")
        };
        let message = format!(
            "{cause}; to start it, set state to Stopped and then to Running, or give the annotation {RESTARTED_ANNOTATION} a new value"
        );
        Readiness::Ready(reason, message)
    } else {
        let message = match &power.until.in_force {
            Some(it) => format!("the VM is down until {}, as its annotation wants it", whole_seconds(it.until.0)),
            None => "the VM is down, as its spec wants it".into(),
        };
        Readiness::Ready(Reason::StoppedAsRequested, message)
    }
}

fn waiting_for_previous(previous: &Object) -> Problem {
    Problem::new(Reason::Stopping, format!("waiting until {} of a deleted VM with this name has ended", previous.key))
}

/// The VM should run, and its Pod is being deleted.
fn replacing(reconciled: &Reconciled<'_>, guest: &ReportedGuest<'_>, pod: &Object) -> Problem {
    stuck(reconciled, Some(pod)).unwrap_or_else(|| {
        let message = beside(guest, pod).unwrap_or_else(|| {
            let limit = time_limit(reconciled.vm, reconciled.plan, pod);
            format!("waiting until the old Pod is gone before a new one is created{}{limit}", disruption(pod))
        });
        Problem::new(Reason::Restarting, message)
    })
}

/// What a Pod without a problem waits for.
fn on_its_way(pod: &Object) -> String {
    let Some(status) = working(pod) else { return "waiting for the runner to report that the guest runs".into() };
    let since = status["state"]["running"]["startedAt"].as_str().map(|time| format!(", since {time}"));
    format!(
        "waiting for the container {}, which works before the guest starts{}",
        string(&status["name"]),
        since.unwrap_or_default()
    )
}

/// The VM should run and has a Pod, but no guest runs.
fn starting(reconciled: &Reconciled<'_>, pod: &Object) -> Readiness {
    let Reconciled { vm, observed, plan, rendered: _, outcome: _, source: _ } = *reconciled;
    if let Some(problem) = stuck(reconciled, Some(pod)) {
        return problem.into();
    }
    let problem = problem_of_pod(vm, pod, observed.now).or_else(|| helper(reconciled));
    let problem = problem.unwrap_or_else(|| Problem::new(Reason::Starting, on_its_way(pod)));
    let mut more = String::new();
    if let Some(claim) = kept_for(plan, pod) {
        more += &format!("; the Pod is kept, because {}", goes_with_last_pod(&format!("claim {}", claim.name)));
    }
    if let Some(retry) = plan.retry.as_ref().filter(|retry| retry.pod_uid == pod.uid) {
        more += &next_pod(retry);
    }
    if let Some(change) = plan.pending.first() {
        let others = match plan.pending.len() - 1 {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let how = match late_at(pod).filter(|late| *late > observed.now) {
            // A Pod that creates no container till then is made again with its changes.
            Some(late) => {
                let late = whole_seconds(late);
                format!("if no container starts, the manager does that at {late}")
            }
            None => format!("{}=\"$(date -Is)\"", annotate(vm, RESTARTED_ANNOTATION)),
        };
        more += &format!("; these changes need a restart: {}{others}: {how}", change.path);
    }
    Readiness::Not { problem, more }
}

/// The claim for which a Pod that has ended is kept: it is being deleted, and exists only as long as a Pod mounts it.
fn kept_for<'a>(plan: &'a Plan, pod: &Object) -> Option<&'a ObjectKey> {
    let claims = plan.waits.iter().filter(|wait| matches!(wait, Wait::Gone(_))).map(Wait::key);
    let mut mounted = claims.filter(|key| key.is_claim() && pod.mounted_claims().any(|(claim, _)| claim == key.name));
    mounted.next().filter(|_| pod.has_ended())
}

/// The VM should run and has no Pod.
fn waiting_for_pod(reconciled: &Reconciled<'_>) -> Problem {
    if reconciled.vm.metadata.deletion_timestamp.is_some() {
        return Problem::new(Reason::BeingDeleted, "the VM is being deleted, so nothing is started for it");
    }
    // What nobody but a person ends comes first.
    let mut others = waits(reconciled).filter(|wait| !is_about_helper(reconciled, wait));
    match (reconciled.rendered, others.next()) {
        (Err(error), _) => not_rendered(reconciled, error),
        (Ok(_), None) if let Some(problem) = helper(reconciled) => problem,
        (Ok(_), Some(Wait::ClaimInUse(pod))) => Problem::new(
            Reason::ClaimInUse,
            format!("{pod} mounts a claim of this VM, and two must not write to it: waiting until that Pod is gone"),
        ),
        (Ok(_), Some(Wait::ClaimForeign(claim, why))) => Problem::new(why.reason(), format!("{claim} {why}")),
        (Ok(_), Some(Wait::ClaimMissing(claim))) => Problem::new(
            Reason::ClaimMissing,
            format!("{claim} with the VM's data does not exist any more: the condition StorageReady says what to do"),
        ),
        (Ok(_), Some(wait)) => {
            Problem::new(Reason::WaitingForDeletion, format!("waiting until {} is gone", wait.key()))
        }
        (Ok(_), None) => Problem::new(Reason::Starting, "waiting for the Pod to start"),
    }
}

/// Whether a plan waits for a Pod that helps the guest.
fn is_about_helper(reconciled: &Reconciled<'_>, wait: &Wait) -> bool {
    match wait {
        Wait::HelperNotReady(_) => true,
        Wait::Gone(key) | Wait::Overdue(key) | Wait::NotRemoved(key) | Wait::Retry(key) => {
            reconciled.observed.get(key).is_some_and(|pod| pod.is_helper())
        }
        Wait::NotOurs(_) | Wait::ClaimInUse(_) | Wait::ClaimForeign(..) | Wait::ClaimMissing(_) => false,
    }
}

/// A Pod that helps the guest, and for which the plan waits. The message names it.
fn helper(reconciled: &Reconciled<'_>) -> Option<Problem> {
    let Reconciled { vm, observed, plan, rendered: _, outcome: _, source: _ } = *reconciled;
    let wait = plan.waits.iter().find(|wait| is_about_helper(reconciled, wait))?;
    let (key, pod) = (wait.key(), observed.get(wait.key()).map(AsRef::as_ref));
    if let Some(problem) = stuck(reconciled, pod) {
        return Some(problem);
    }
    if let Wait::Gone(_) = wait {
        let reason = if plan.power.wanted == WantedPower::Up { Reason::WaitingForDeletion } else { Reason::Stopping };
        return Some(Problem::new(reason, format!("waiting until {key} is gone")));
    }
    if let Some(claim) = pod.and_then(|pod| claims::that_goes_with_pod(vm, observed, pod)) {
        let message = format!("{key} is not made anew, because {}", goes_with_last_pod(&claim.key.to_string()));
        return Some(Problem::new(Reason::HelperNotReady, message));
    }
    let Some(why) = pod.and_then(|pod| problem_of_helper(vm, pod)) else {
        return Some(Problem::new(Reason::Starting, format!("waiting until {key} is ready")));
    };
    let retry = plan.retry.as_ref().filter(|retry| pod.is_some_and(|pod| pod.uid == retry.pod_uid));
    let message = format!("{key}: {why}{}", retry.map(next_pod).unwrap_or_default());
    Some(Problem::new(Reason::HelperNotReady, message))
}

/// How the message ends about a Pod that has ended: when it is made again.
fn next_pod(retry: &Retry) -> String {
    format!("; try {} is at {}", retry.count.saturating_add(1), whole_seconds(retry.next.0))
}

/// Why a Pod is kept, and what a person can do.
fn goes_with_last_pod(claim: &str) -> String {
    format!("{claim} is being deleted and goes with its last Pod: copy its data first, then delete the Pod")
}

/// Whether the plan waits until a Pod is gone that has helped the guest.
pub(super) fn is_ending_helper(reconciled: &Reconciled<'_>) -> bool {
    let mut deletions = reconciled.plan.waits.iter().filter(|wait| super::is_deletion(wait));
    deletions.any(|wait| is_about_helper(reconciled, wait))
}

/// Why a helper is not ready, in words that stay as long as the cause does.
fn problem_of_helper(vm: &VirtualMachine, pod: &Object) -> Option<String> {
    let of_pod = unschedulable(vm, pod).or_else(|| ended_pod(pod)).map(|problem| problem.message);
    of_pod.or_else(|| {
        pod.container_statuses().find_map(|status| {
            let name = string(&status["name"]);
            if let Some(ended) = failed_end(status) {
                return Some(end_of_container(&name, ended));
            }
            let waiting = &status["state"]["waiting"];
            match waiting["reason"].as_str()? {
                "ContainerCreating" | "PodInitializing" => None,
                "ErrImagePull" | "ImagePullBackOff" | "ErrImageNeverPull" => {
                    Some(format!("{name}: the node can't get the image {}", string(&status["image"])))
                }
                _ => Some(waiting_words(&name, waiting)),
            }
        })
    })
}

/// A Pod that should be gone, or whose node does not answer. The message says what a person can do.
fn stuck(reconciled: &Reconciled<'_>, pod: Option<&Object>) -> Option<Problem> {
    let pod = pod?;
    let Reconciled { vm: _, observed: _, plan, rendered: _, outcome, source: _ } = *reconciled;
    let (name, node) = (&pod.key.name, pod.node_name().unwrap_or("?"));
    let end = pod.deleting.map(whole_seconds).unwrap_or_default();
    if plan.waits.contains(&Wait::NotRemoved(pod.key.clone())) {
        let message = format!(
            "Pod {name} should have gone at {end}; nothing runs in it any more, but something keeps it: see its metadata.finalizers"
        );
        return Some(Problem::new(Reason::PodNotRemoved, message));
    }
    let is_overdue = plan.waits.contains(&Wait::Overdue(pod.key.clone()));
    if !is_lost(pod) && (!is_overdue || outcome.node != NodeState::NotAnswering) {
        return is_overdue.then(|| Problem::new(Reason::PodNotEnded, not_ended(name, node, &end, outcome.node)));
    }
    let cause = if is_overdue {
        format!("Pod {name} should have ended at {end}, but node {node} does not answer")
    } else {
        format!("node {node}, on which Pod {name} runs, does not answer")
    };
    let message = format!(
        "{cause}; the guest may still run there, so nothing is started elsewhere. If the node is really down, tell the cluster: \
         kubectl taint node {node} node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
    );
    Some(Problem::new(Reason::NodeNotResponding, message))
}

/// The Pod should have ended, and nothing says that its node is down.
fn not_ended(pod: &str, node: &str, end: &str, state: NodeState) -> String {
    let cause = match state {
        NodeState::Answering => format!(
            "node {node} answers and has not ended it yet: the guest may still be powering down, because a kubelet keeps the grace \
             period with which a Pod was first deleted"
        ),
        NodeState::Removed => format!("node {node} does not exist any more: the cluster will remove the Pod"),
        NodeState::NotKnown | NodeState::NotAnswering => format!(
            "node {node} has not reported that, and the manager can't find out whether the node answers: see kubectl get node {node}"
        ),
    };
    format!("Pod {pod} should have ended at {end}; {cause}")
}

/// Why the cluster removes a Pod (<https://kubernetes.io/docs/concepts/workloads/pods/disruptions/#pod-disruption-conditions>).
fn disruption(pod: &Object) -> String {
    let disruption = pod.condition("DisruptionTarget", "True");
    disruption.map(|item| format!(" ({}: {})", string(&item["reason"]), string(&item["message"]))).unwrap_or_default()
}

/// Why a Pod does not run its guest: by its conditions, its phase, its containers, and the runner's report, in this order.
fn problem_of_pod(vm: &VirtualMachine, pod: &Object, now: Timestamp) -> Option<Problem> {
    unschedulable(vm, pod)
        .or_else(|| ended_pod(pod))
        .or_else(|| pod.container_statuses().find_map(|status| problem_of_container(vm, pod, status)))
        .or_else(|| pause_after_shutdown(pod))
        .or_else(|| reported(vm, pod))
        .or_else(|| start_delayed(vm, pod, now))
}

fn unschedulable(vm: &VirtualMachine, pod: &Object) -> Option<Problem> {
    let condition = pod.condition("PodScheduled", "False")?;
    Some(Problem::new(Reason::Unschedulable, string(&condition["message"]) + &device_hint(vm, pod)))
}

/// What a VM that demands KVM may lack on every node. The scheduler only names the resource. Extended resources have a domain in their
/// names (<https://kubernetes.io/docs/tasks/configure-pod-container/extended-resource/>).
fn device_hint(vm: &VirtualMachine, pod: &Object) -> String {
    let limits = pod.runner_container().and_then(|container| container["resources"]["limits"].as_object());
    let devices: Vec<&str> =
        limits.into_iter().flatten().map(|(name, _)| name.as_str()).filter(|name| name.contains('/')).collect();
    if vm.spec.vm.accelerator != Accelerator::Kvm || devices.is_empty() {
        return String::new();
    }
    format!(
        "; with accelerator kvm the Pod needs {}, which a device plugin such as deploy/node-devices gives where KVM works; with auto the \
         VM can do without",
        devices.join(" and ")
    )
}

fn ended_pod(pod: &Object) -> Option<Problem> {
    match pod.phase()? {
        "Succeeded" => Some(Problem::new(Reason::PodSucceeded, "its containers have ended")),
        "Failed" => Some(Problem::new(Reason::PodFailed, failure_of_pod(pod))),
        _ => None,
    }
}

fn problem_of_container(vm: &VirtualMachine, pod: &Object, status: &Value) -> Option<Problem> {
    let name = string(&status["name"]);
    if let Some(ended) = failed_end(status) {
        let next = next_try(status, ended).map(|(count, next)| format!("; try {count} is at about {next}"));
        let message = end_of_container(&name, ended) + &next.unwrap_or_default();
        let is_added = !is_runners(pod, status) && ![AGENT_NAME, PASST_NAME].contains(&name.as_str());
        let reason = if is_added { Reason::ContainerFailed } else { Reason::RunnerFailed };
        return Some(Problem::new(reason, message));
    }
    let waiting = &status["state"]["waiting"];
    let described = || waiting_words(&name, waiting);
    match waiting["reason"].as_str()? {
        "ContainerCreating" | "PodInitializing" => None,
        "CrashLoopBackOff" if is_runners(pod, status) && is_paused_after_shutdown(status) => None,
        // The kubelet alternates between the error and a message that only says that it waits. Keep the error.
        "ImagePullBackOff" if let Some(known) = known_problem(vm, Reason::ImagePullFailed) => Some(known),
        "InvalidImageName" => Some(Problem::new(Reason::InvalidImageName, described())),
        "ErrImagePull" | "ImagePullBackOff" | "ErrImageNeverPull" => {
            Some(Problem::new(Reason::ImagePullFailed, described()))
        }
        _ => Some(Problem::new(Reason::ContainerWaiting, described())),
    }
}

/// The guest has shut down, and the kubelet pauses before it starts the runner again.
fn pause_after_shutdown(pod: &Object) -> Option<Problem> {
    let message = "the guest has shut down; its node starts it again after a pause, which grows up to 5 min";
    runner_statuses(pod).any(is_paused_after_shutdown).then(|| Problem::new(Reason::Starting, message))
}

fn is_runners(pod: &Object, status: &Value) -> bool {
    status["name"] == pod.runner_container_name()
}

/// Whether the runner ended without an error and waits for its restart. The kubelet calls each such pause CrashLoopBackOff
/// (<https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/#restart-policy>).
fn is_paused_after_shutdown(status: &Value) -> bool {
    let is_paused = status["state"]["waiting"]["reason"] == "CrashLoopBackOff";
    let has_succeeded = end_of(status).is_some_and(|ended| ended["exitCode"] == 0);
    is_paused && has_succeeded
}

/// The runner's report that QEMU failed, or that the guest is paused.
fn reported(vm: &VirtualMachine, pod: &Object) -> Option<Problem> {
    let running = conditions::find(current_conditions(vm), RUNNING)?;
    let is_report = is_said_by_runner(vm, RUNNING) && is_report_of(vm, pod);
    let reason = match conditions::reason(running)? {
        Reason::QemuFailed => Reason::RunnerFailed,
        reason @ (Reason::Paused | Reason::GuestPanicked) => reason,
        _ => return None,
    };
    (is_report && running.status == "False").then(|| Problem::new(reason, running.message.clone()))
}

/// The Pod has a node, and its containers are not created. Only the kubelet's events say why.
fn start_delayed(vm: &VirtualMachine, pod: &Object, now: Timestamp) -> Option<Problem> {
    let (name, node) = (&pod.key.name, pod.node_name().unwrap_or("?"));
    let has_passed = |time: &Timestamp| *time <= now;
    let has_reported = is_said_by_runner(vm, RUNNING) && is_report_of(vm, pod);
    let message = if untaken_at(pod).as_ref().is_some_and(has_passed) && !has_reported {
        format!("node {node} has not taken Pod {name} yet: kubectl get node {node} shows whether it exists and answers")
    } else if late_at(pod).as_ref().is_some_and(has_passed) {
        format!(
            "the containers of Pod {name} are not created yet: the node still fetches an image, or a Secret, a ConfigMap or a volume is \
             missing (kubectl describe pod {name}); the node goes on trying"
        )
    } else {
        return None;
    };
    Some(Problem::new(Reason::StartDelayed, message))
}

/// The number and the time of the next try of a container that waits for it. The kubelet's pause is 10 s before the second restart, and
/// doubles up to 5 min (<https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/#restart-policy>).
fn next_try(status: &Value, ended: &Value) -> Option<(u64, String)> {
    status["state"]["waiting"]["reason"].as_str().filter(|reason| *reason == "CrashLoopBackOff")?;
    let end: Timestamp = ended["finishedAt"].as_str()?.parse().ok()?;
    let restarts = status["restartCount"].as_u64()?;
    let pause = FIRST_PAUSE.saturating_mul(1 << restarts.saturating_sub(1).min(10)).min(LONGEST_PAUSE);
    Some((restarts.saturating_add(2), whole_seconds(end.checked_add(pause).ok()?)))
}

/// The last end of a container, if it is one with an error.
fn failed_end(status: &Value) -> Option<&Value> {
    end_of(status).filter(|ended| ended["exitCode"] != 0)
}

/// Why a container waits, in the kubelet's words.
fn waiting_words(name: &str, waiting: &Value) -> String {
    format!("{name}: {}: {}", string(&waiting["reason"]), string(&waiting["message"]))
}

/// How a container ended, for people. The message is the container's own, or the end of its log.
fn end_of_container(name: &str, terminated: &Value) -> String {
    let (reason, message) = (string(&terminated["reason"]), printable(&string(&terminated["message"])));
    // These reasons say no more than the exit code.
    let reason = Some(reason).filter(|reason| !["", "Error", "Completed"].contains(&reason.as_str()));
    let reason = reason.map(|reason| format!(" ({reason})")).unwrap_or_default();
    // Programs that try again say the same each time.
    let mut lines: Vec<&str> = message.trim().lines().collect();
    lines.dedup();
    let message = Some(lines.join("\n")).filter(|message| !message.is_empty()).map(|message| format!(": {message}"));
    format!("{name} ended with exit code {}{reason}{}", terminated["exitCode"], message.unwrap_or_default())
}

/// Why a Pod has failed: the reason and message of the cluster, or how its containers ended.
fn failure_of_pod(pod: &Object) -> String {
    let given: Vec<&str> = ["/reason", "/message"].iter().filter_map(|field| pod.status_str(field)).collect();
    if !given.is_empty() {
        return given.join(": ");
    }
    let ends = pod.container_statuses().filter_map(|status| Some((string(&status["name"]), end_of(status)?)));
    let ends = ends.filter(|(_, terminated)| terminated["exitCode"] != 0);
    let ends: Vec<String> = ends.map(|(name, terminated)| end_of_container(&name, terminated)).collect();
    if ends.is_empty() { "its containers have ended".into() } else { ends.join("; ") }
}

/// The problem that the status has, if it has that reason.
fn known_problem(vm: &VirtualMachine, reason: Reason) -> Option<Problem> {
    vm.status.as_ref()?.problem.clone().filter(|problem| problem.reason == reason)
}
