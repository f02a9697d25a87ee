//! The condition Ready: whether the VM is as its spec wants it, and if not, why.

use serde_json::Value;

use super::{Pods, Problem, Reconciled, current_conditions, guest::Guest, guest::is_lost, not_rendered, string};
use crate::{
    api::{
        Reason, VirtualMachine,
        conditions::{self, NewCondition, READY, RUNNING},
        status::whole_seconds,
    },
    object::{CONTAINER_NAME, RESTARTED_ANNOTATION},
    observed::Object,
    ownership::owns_condition,
    plan::{Plan, Wait},
    power::{Power, Wanted, is_report_of},
};

/// Derives the condition: the first problem that blocks the plan, else by the wanted power and the Pod.
pub(super) fn ready(reconciled: &Reconciled<'_>, guest: &Guest<'_>, pods: Pods<'_>) -> NewCondition {
    let Reconciled { vm, observed: _, plan, rendered: _, outcome, source: _ } = *reconciled;
    if let Some(failure) = &outcome.failure {
        return not_ready(failure.clone());
    }
    if let Some(problem) = name_taken(plan) {
        return not_ready(problem);
    }
    let is_stopping = plan.power.wanted != Wanted::Up && pods.own.or(pods.previous).is_some();
    if let Some(invalid) = vm.spec.invalid.as_ref().filter(|_| !is_stopping) {
        return not_ready(Problem::new(Reason::InvalidSpec, &invalid.message));
    }
    match (plan.power.wanted, pods.own) {
        (Wanted::Up, Some(pod)) if pod.deleting.is_some() => not_ready(replacing(plan, pod)),
        (Wanted::Up, Some(_)) if guest.is_up => ready_as(Reason::Running, "the VM runs, as its spec wants it"),
        (Wanted::Up, Some(pod)) => not_ready(starting(reconciled, pod)),
        (Wanted::Up, None) => not_ready(stuck(plan, pods.previous).unwrap_or_else(|| waiting_for_pod(reconciled))),
        (Wanted::Halting, pod) => not_ready(stuck(plan, pod.or(pods.previous)).unwrap_or_else(|| {
            Problem::new(Reason::Stopping, "the guest has shut itself down; the manager deletes its Pod next")
        })),
        (Wanted::Down, Some(pod)) => not_ready(
            stuck(plan, Some(pod))
                .unwrap_or_else(|| Problem::new(Reason::Stopping, "waiting until the guest has powered down")),
        ),
        (Wanted::Down, None) => match pods.previous {
            Some(previous) => not_ready(stuck(plan, Some(previous)).unwrap_or_else(|| waiting_for_previous(previous))),
            None => stopped(&plan.power),
        },
    }
}

fn not_ready(Problem { reason, message }: Problem) -> NewCondition {
    NewCondition { type_: READY, status: false, reason, message }
}

fn ready_as(reason: Reason, message: &str) -> NewCondition {
    NewCondition { type_: READY, status: true, reason, message: message.into() }
}

fn name_taken(plan: &Plan) -> Option<Problem> {
    let key = plan.waits.iter().find_map(|wait| match wait {
        Wait::NotOurs(key) => Some(key),
        Wait::Gone(_)
        | Wait::NodeNotResponding(_)
        | Wait::NotRemoved(_)
        | Wait::Retry(_)
        | Wait::ClaimInUse(_)
        | Wait::ClaimMissing(_) => None,
    })?;
    let message = format!("{key} exists and does not belong to this VM: delete or rename one of the two");
    Some(Problem::new(Reason::NameTaken, message))
}

/// The VM is down, and no Pod is left.
fn stopped(power: &Power) -> NewCondition {
    if power.halted.as_ref().is_some_and(|halted| !halted.released) {
        let message = format!(
            "the guest has shut itself down, and guestShutdownStops is set; to start it, set state to Stopped and then to Running, \
             or give the annotation {RESTARTED_ANNOTATION} a new value"
        );
        ready_as(Reason::GuestShutdown, &message)
    } else {
        ready_as(Reason::StoppedAsRequested, "the VM is down, as its spec wants it")
    }
}

fn waiting_for_previous(previous: &Object) -> Problem {
    Problem::new(Reason::Stopping, format!("waiting until {} of a deleted VM with this name has ended", previous.key))
}

/// The VM should run, and its Pod is being deleted.
fn replacing(plan: &Plan, pod: &Object) -> Problem {
    stuck(plan, Some(pod)).unwrap_or_else(|| {
        let message = format!("waiting until the old Pod is gone before a new one is created{}", disruption(pod));
        Problem::new(Reason::Restarting, message)
    })
}

/// The VM should run and has a Pod, but no guest runs.
fn starting(reconciled: &Reconciled<'_>, pod: &Object) -> Problem {
    let Reconciled { vm, observed: _, plan, rendered: _, outcome: _, source: _ } = *reconciled;
    if let Some(problem) = stuck(plan, Some(pod)) {
        return problem;
    }
    let mut problem = problem_of_pod(vm, pod)
        .unwrap_or_else(|| Problem::new(Reason::Starting, "waiting for the runner to report that the guest runs"));
    if let Some(retry) = plan.retry.as_ref().filter(|retry| retry.pod_uid == pod.uid) {
        let next = whole_seconds(retry.next.0);
        problem.message += &format!("; try {} is at {next}", retry.count.saturating_add(1));
    }
    problem
}

/// The VM should run and has no Pod.
fn waiting_for_pod(reconciled: &Reconciled<'_>) -> Problem {
    match (reconciled.rendered, reconciled.plan.waits.first()) {
        (Err(error), _) => not_rendered(reconciled.vm, error),
        (Ok(_), Some(Wait::ClaimInUse(pod))) => Problem::new(
            Reason::ClaimInUse,
            format!("{pod} mounts a claim of this VM, and two must not write to it: waiting until that Pod is gone"),
        ),
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

/// A Pod that should be gone, or whose node does not answer. The message says what a person can do.
fn stuck(plan: &Plan, pod: Option<&Object>) -> Option<Problem> {
    let pod = pod?;
    let (name, node) = (&pod.key.name, pod.node_name().unwrap_or("?"));
    let end = || pod.deleting.map(whole_seconds).unwrap_or_default();
    if plan.waits.contains(&Wait::NotRemoved(pod.key.clone())) {
        let message = format!(
            "Pod {name} should have gone at {}; nothing runs in it any more, but something keeps it: see its metadata.finalizers",
            end()
        );
        return Some(Problem::new(Reason::PodNotRemoved, message));
    }
    let cause = if plan.waits.contains(&Wait::NodeNotResponding(pod.key.clone())) {
        format!("Pod {name} should have ended at {}, but node {node} has not reported that", end())
    } else if is_lost(pod) {
        format!("node {node}, on which Pod {name} runs, does not answer")
    } else {
        return None;
    };
    let message = format!(
        "{cause}; the guest may still run there, so nothing is started elsewhere. If the node is really down, tell the cluster: \
         kubectl taint node {node} node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
    );
    Some(Problem::new(Reason::NodeNotResponding, message))
}

/// Why the cluster removes a Pod (<https://kubernetes.io/docs/concepts/workloads/pods/disruptions/#pod-disruption-conditions>).
fn disruption(pod: &Object) -> String {
    let disruption = pod.condition("DisruptionTarget", "True");
    disruption.map(|item| format!(" ({}: {})", string(&item["reason"]), string(&item["message"]))).unwrap_or_default()
}

/// Why a Pod does not run its guest: by its conditions, its phase, its containers, and the runner's report, in this order.
fn problem_of_pod(vm: &VirtualMachine, pod: &Object) -> Option<Problem> {
    unschedulable(pod)
        .or_else(|| ended_pod(pod))
        .or_else(|| pod.container_statuses().find_map(|status| problem_of_container(vm, status)))
        .or_else(|| pause_after_shutdown(pod))
        .or_else(|| qemu_failed(vm, pod))
}

fn unschedulable(pod: &Object) -> Option<Problem> {
    let condition = pod.condition("PodScheduled", "False")?;
    Some(Problem::new(Reason::Unschedulable, string(&condition["message"])))
}

fn ended_pod(pod: &Object) -> Option<Problem> {
    match pod.phase()? {
        "Succeeded" => Some(Problem::new(Reason::PodSucceeded, "its containers have ended")),
        "Failed" => Some(Problem::new(Reason::PodFailed, failure_of_pod(pod))),
        _ => None,
    }
}

fn problem_of_container(vm: &VirtualMachine, status: &Value) -> Option<Problem> {
    let name = string(&status["name"]);
    if let Some(ended) = terminated(status).filter(|ended| ended["exitCode"] != 0) {
        return Some(Problem::new(Reason::RunnerFailed, end_of_container(&name, ended)));
    }
    let waiting = &status["state"]["waiting"];
    let described = |reason: &str| format!("{name}: {reason}: {}", string(&waiting["message"]));
    match waiting["reason"].as_str()? {
        "ContainerCreating" | "PodInitializing" => None,
        "CrashLoopBackOff" if is_paused_after_shutdown(status) => None,
        // The kubelet alternates between the error and a message that only says that it waits. Keep the error.
        "ImagePullBackOff" if let Some(known) = current_message(vm, Reason::ImagePullFailed) => {
            Some(Problem::new(Reason::ImagePullFailed, known))
        }
        reason @ ("ErrImagePull" | "ImagePullBackOff" | "InvalidImageName" | "ErrImageNeverPull") => {
            Some(Problem::new(Reason::ImagePullFailed, described(reason)))
        }
        reason => Some(Problem::new(Reason::ContainerWaiting, described(reason))),
    }
}

/// The guest has shut down, and the kubelet pauses before it starts the runner again.
fn pause_after_shutdown(pod: &Object) -> Option<Problem> {
    let message = "the guest has shut down; its node starts it again after a pause, which grows up to 5 min";
    pod.container_statuses().any(is_paused_after_shutdown).then(|| Problem::new(Reason::Starting, message))
}

/// Whether the runner ended without an error and waits for its restart. The kubelet calls each such pause CrashLoopBackOff
/// (<https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/#restart-policy>).
fn is_paused_after_shutdown(status: &Value) -> bool {
    let is_paused = status["state"]["waiting"]["reason"] == "CrashLoopBackOff";
    let has_succeeded = terminated(status).is_some_and(|ended| ended["exitCode"] == 0);
    status["name"] == CONTAINER_NAME && is_paused && has_succeeded
}

/// The runner's report that QEMU failed.
fn qemu_failed(vm: &VirtualMachine, pod: &Object) -> Option<Problem> {
    let running = conditions::find(current_conditions(vm), RUNNING)?;
    let is_report = !owns_condition(vm, RUNNING) && is_report_of(vm, pod);
    let has_failed = running.status == "False" && conditions::reason(running) == Some(Reason::QemuFailed);
    (is_report && has_failed).then(|| Problem::new(Reason::RunnerFailed, running.message.clone()))
}

/// How a container ended, this time or the last time.
fn terminated(status: &Value) -> Option<&Value> {
    let states = [&status["state"]["terminated"], &status["lastState"]["terminated"]];
    states.into_iter().find(|state| state.is_object())
}

/// How a container ended, for people. The message is the container's own, or the end of its log.
fn end_of_container(name: &str, terminated: &Value) -> String {
    let (reason, message) = (string(&terminated["reason"]), string(&terminated["message"]));
    // These reasons say no more than the exit code.
    let reason = Some(reason).filter(|reason| !["", "Error", "Completed"].contains(&reason.as_str()));
    let reason = reason.map(|reason| format!(" ({reason})")).unwrap_or_default();
    let message = Some(message.trim()).filter(|message| !message.is_empty()).map(|message| format!(": {message}"));
    format!("{name} ended with exit code {}{reason}{}", terminated["exitCode"], message.unwrap_or_default())
}

/// Why a Pod has failed: the reason and message of the cluster, or how its containers ended.
fn failure_of_pod(pod: &Object) -> String {
    let given: Vec<&str> = ["/reason", "/message"].iter().filter_map(|field| pod.status_str(field)).collect();
    if !given.is_empty() {
        return given.join(": ");
    }
    let ends = pod.container_statuses().filter_map(|status| Some((string(&status["name"]), terminated(status)?)));
    let ends = ends.filter(|(_, terminated)| terminated["exitCode"] != 0);
    let ends: Vec<String> = ends.map(|(name, terminated)| end_of_container(&name, terminated)).collect();
    if ends.is_empty() { "its containers have ended".into() } else { ends.join("; ") }
}

/// The message of the current condition Ready, if it has that reason.
fn current_message(vm: &VirtualMachine, reason: Reason) -> Option<String> {
    let ready = conditions::find(current_conditions(vm), READY)?;
    (conditions::reason(ready) == Some(reason)).then(|| ready.message.clone())
}
