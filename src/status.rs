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
use serde_json::{Map, Value, json};

use crate::{
    api::{
        APP_NAME, ObjectKind, PowerState, VirtualMachine,
        conditions::{
            self, BOOTED, CONSOLE_CONNECTED, NewCondition, POWER_UNMANAGED, READY, RESTART_REQUIRED, RUNNING,
            TEMPLATES_VALID, USER_LOGGED_IN, VMOP_AGENT_CONNECTED,
        },
    },
    observed::{Object, Observed, Part, is_same_resource},
    plan::{self, Plan, Wait},
    power::{Power, RESTARTED_ANNOTATION, Wanted, is_report_of},
    render::{MAXIMUM_OBJECTS, ObjectKey, Rendered, TemplateError, TemplateSet, check},
};

pub mod events;
pub mod storage;

/// The field manager of the manager's part of the status.
pub const FIELD_MANAGER: &str = "vm-operator-status";

/// How the execution of a plan ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// What the API server said against an action, if that will stay so until something changes.
    pub failure: Option<Failure>,
    /// What it said against changes of claims, which the machine can do without.
    pub refusals: Vec<(ObjectKey, String)>,
    /// Kinds of objects that the machine's status names and that could not be looked for.
    pub unseen: Vec<TypeMeta>,
}

/// Why an action failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The reason of the condition Ready: `ApplyFailed`, `NameTaken` where an object is somebody else's, or `WatchFailed`.
    pub reason: &'static str,
    /// For a person.
    pub message: String,
}

/// Where a machine's templates come from.
#[derive(Clone, Copy, Debug, Default)]
pub struct Source<'a> {
    /// The set that is in force for it.
    pub set: Option<&'a TemplateSet>,
    /// Why a newer version of the set is not.
    pub refused: Option<&'a TemplateError>,
}

/// The Pods that a machine may be in.
#[derive(Clone, Copy)]
struct Pods<'a> {
    /// The machine's.
    own: Option<&'a Object>,
    /// Where it has none: that of an earlier machine of its name, which must end first.
    former: Option<&'a Object>,
}

/// Derives the manager's part of a machine's status.
pub fn status(
    vm: &VirtualMachine,
    observed: &Observed,
    plan: &Plan,
    rendered: Result<&[Rendered], &TemplateError>,
    outcome: &Outcome,
    source: Source<'_>,
) -> Value {
    let current = vm.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    let pod = plan::pod(vm, observed).map(AsRef::as_ref);
    // Where there is no Pod, or its runner has not reported yet, nobody but us can say that nothing runs.
    let was_killed = pod.is_some_and(|pod| was_killed(pod, current));
    let reported = |type_| {
        let is_over = |condition: &Condition| was_killed && condition.status == "True";
        conditions::find(current, type_).is_some_and(|condition| !ours(vm, type_) && !is_over(condition))
            && pod.is_some_and(|pod| is_report_of(vm, pod))
    };
    let is_over = pod.is_some_and(|pod| plan::has_ended(pod) || is_down(pod));
    let up = reported(RUNNING) && conditions::is_true(current, RUNNING) && !is_over && !pod.is_some_and(is_lost);
    let pods = Pods { own: pod, former: former(vm, observed, plan).filter(|_| pod.is_none()) };
    let phase = phase(plan.power.wanted, up, pods.own.or(pods.former));

    let mut new = vec![templates_valid(rendered, source.refused), ready(vm, up, pods, plan, rendered, outcome)];
    // The runner lists what QEMU takes at its start only.
    let theirs = vm.status.iter().flat_map(|status| &status.pending_changes);
    let theirs = theirs.filter(|change| reported(RUNNING) && !change.path.starts_with(plan::pending::PREFIX));
    let paths: Vec<&str> = plan.pending.iter().chain(theirs).map(|change| change.path.as_str()).collect();
    if !paths.is_empty() {
        new.push(NewCondition {
            type_: RESTART_REQUIRED,
            status: true,
            reason: "Changed".into(),
            message: format!("the next start brings: {}", paths.join(", ")),
        });
    }
    if plan.power.unmanaged {
        new.push(NewCondition {
            type_: POWER_UNMANAGED,
            status: true,
            reason: "StateNotSet".into(),
            message: "nobody sets spec.vm.state any more, so the machine stays up; to stop it, set state to Running and then \
                      to Stopped"
                .into(),
        });
    }
    new.extend(rendered.ok().and_then(|rendered| storage::storage(vm, observed, rendered, &outcome.refusals)));
    // Of what the runner has said of the guest nothing holds any more once it is gone.
    let of_guest = [VMOP_AGENT_CONNECTED, USER_LOGGED_IN, CONSOLE_CONNECTED];
    let of_guest = of_guest.into_iter().filter(|type_| conditions::find(current, type_).is_some());
    let unknown = [RUNNING, BOOTED].into_iter().filter(|type_| !reported(type_));
    // A runner that is older than these conditions says nothing of them.
    for type_ in unknown.chain(of_guest.filter(|_| !reported(RUNNING))) {
        let message = "no guest is running".into();
        new.push(NewCondition { type_, status: false, reason: phase.to_owned(), message });
    }
    new.sort_by_key(|condition| condition.type_);
    let conditions = conditions::with_times(new, current, vm.metadata.generation, observed.now);

    let mut status = Map::new();
    status.insert("observedGeneration".into(), json!(vm.metadata.generation.unwrap_or_default()));
    status.insert("phase".into(), json!(phase));
    status.insert("created".into(), json!(pod.is_some()));
    status.insert("ready".into(), json!(up));
    let power = if plan.power.wanted == Wanted::Up { PowerState::Running } else { PowerState::Stopped };
    status.insert("power".into(), json!(power));
    status.insert("conditions".into(), with_whole_seconds(json!(conditions), &conditions));
    if let (Ok(_), Some(set)) = (rendered, source.set) {
        let mut templates = json!({ "version": set.version() });
        if let Some(name) = vm.template_set() {
            templates["set"] = json!(name);
        }
        status.insert("templates".into(), templates);
    }
    let kinds = object_kinds(vm, observed, rendered.unwrap_or_default(), &outcome.unseen);
    if !kinds.is_empty() {
        status.insert("objectKinds".into(), json!(kinds));
    }
    if let Some(halted) = &plan.power.halted {
        let mut halted_json = json!(halted);
        halted_json["time"] = json!(whole_seconds(halted.time.0));
        status.insert("halted".into(), halted_json);
    }
    if let Some(retry) = &plan.retry {
        let mut retry_json = json!(retry);
        retry_json["next"] = json!(whole_seconds(retry.next.0));
        status.insert("retry".into(), retry_json);
    }
    if !plan.pending.is_empty() {
        status.insert("pendingChanges".into(), json!(plan.pending));
    }
    if !reported(RUNNING) {
        status.insert("cpus".into(), json!(0));
        status.insert("ram".into(), json!("0"));
        let said = vm.status.as_ref();
        for (field, said) in [
            ("consoleClient", said.is_some_and(|status| status.console_client.is_some())),
            ("loggedInUser", said.is_some_and(|status| status.logged_in_user.is_some())),
        ] {
            if said {
                // Another manager's field cannot be removed, but said otherwise.
                status.insert(field.into(), json!(""));
            }
        }
    }
    if let Some(pod) = pod {
        if let Some(node) = pod.text(Part::Spec, "/nodeName") {
            status.insert("nodeName".into(), json!(node));
        }
        let addresses: Vec<Value> = pod.status["podIPs"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|address| Some(json!({ "type": "PodIP", "address": address["ip"].as_str()? })))
            .collect();
        if !addresses.is_empty() {
            status.insert("addresses".into(), json!(addresses));
        }
    }
    Value::Object(status)
}

/// The kinds of the machine's objects, but for those that are looked for in any case.
fn object_kinds(
    vm: &VirtualMachine,
    observed: &Observed,
    rendered: &[Rendered],
    unseen: &[TypeMeta],
) -> BTreeSet<ObjectKind> {
    let uid = vm.uid().unwrap_or_default();
    let there = observed.objects.iter().filter(|object| object.was_made_for(&uid)).map(|object| object.key.types());
    let left = there.filter(|kind| !is_looked_for(kind, rendered)).chain(unseen.iter().cloned());
    let made = rendered.iter().map(|object| object.key.types()).filter(|kind| !is_looked_for(kind, &[]));
    left.chain(made).map(ObjectKind::from).collect()
}

/// The kinds that the machine's status names, where objects may be that earlier templates have made: but for those that are looked
/// for because of what is rendered.
///
/// A status can be written by others, too. So what no API server can have is left out, because a kind becomes a part of a URL.
pub fn noted(vm: &VirtualMachine, rendered: &[Rendered]) -> Vec<TypeMeta> {
    let is_label =
        |label: &str| !label.is_empty() && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
    let is_name = |name: &str| name.split('.').all(is_label);
    let is_kind = |kind: &TypeMeta| {
        let version = kind
            .api_version
            .split_once('/')
            .map_or(kind.api_version.as_str(), |(group, version)| if is_name(group) { version } else { "" });
        is_label(version) && is_label(&kind.kind)
    };
    let kinds = vm.status.iter().flat_map(|status| &status.object_kinds).take(MAXIMUM_OBJECTS).cloned();
    kinds.map(TypeMeta::from).filter(|kind| is_kind(kind) && !is_looked_for(kind, rendered)).collect()
}

/// Whether objects of that kind are looked for because all machines have or had some, or because they are rendered.
fn is_looked_for(kind: &TypeMeta, rendered: &[Rendered]) -> bool {
    let builtin = check::builtin_kinds();
    builtin.contains(kind)
        || builtin.iter().any(|it| is_same_resource(it, kind))
        || rendered.iter().any(|object| is_same_resource(&object.key.types(), kind))
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

fn phase(wanted: Wanted, up: bool, pod: Option<&Object>) -> &'static str {
    match (wanted, pod) {
        (Wanted::Up, Some(pod)) if pod.deleting.is_some() => "Stopping",
        (Wanted::Up, Some(_)) if up => "Running",
        (Wanted::Up, Some(pod)) if is_lost(pod) => "Unknown",
        (Wanted::Up, Some(pod)) if pod.text(Part::Status, "/phase") == Some("Failed") => "Failed",
        (Wanted::Up, _) => "Starting",
        (Wanted::Down | Wanted::Halting, None) => "Stopped",
        (Wanted::Down | Wanted::Halting, Some(_)) => "Stopping",
    }
}

/// Whether the status that the API server has says something else than `wanted` in what the manager writes.
pub fn differs(vm: &VirtualMachine, wanted: &Value) -> bool {
    let current = json!(vm.status);
    !holds(&current, wanted) || fields(vm).is_some_and(|owned| owns_more(owned, wanted))
}

/// Whether the runner's container does not run. One that was killed could not report that.
fn is_down(pod: &Object) -> bool {
    let containers = pod.status["containerStatuses"].as_array().into_iter().flatten();
    let state = |container: &Value, state: &str| !container["state"][state].is_null();
    containers
        .filter(|container| container["name"] == APP_NAME)
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
        || containers.filter(|container| container["name"] == APP_NAME).filter_map(ended).any(|end| since < end)
}

/// Whether the Pod's node does not answer, so that nobody knows whether the guest runs. The node controller then says that the Pod
/// is not ready and leaves alone what the kubelet has said last of its containers
/// (<https://kubernetes.io/docs/concepts/architecture/nodes/#node-controller>); the kubelet itself says both or neither, but for
/// a readiness gate.
fn is_lost(pod: &Object) -> bool {
    pod.condition("ContainersReady", "True").is_some()
        && pod.condition("Ready", "False").is_some_and(|ready| ready["reason"] != "ReadinessGatesNotReady")
}

/// The fields of the status that the manager applied.
fn fields(vm: &VirtualMachine) -> Option<&Value> {
    vm.managed_fields()
        .iter()
        .find(|entry| entry.manager.as_deref() == Some(FIELD_MANAGER))
        .and_then(|entry| entry.fields_v1.as_ref())
        .map(|fields| &fields.0["f:status"])
}

/// Whether the manager, not the runner, wrote the condition last. What both say alike is of both
/// (<https://kubernetes.io/docs/reference/using-api/server-side-apply/#conflicts>), but nobody else has our message.
pub fn ours(vm: &VirtualMachine, type_: &str) -> bool {
    let key = format!("k:{}", json!({ "type": type_ }));
    let item = fields(vm).and_then(|fields| fields["f:conditions"].get(&key));
    item.is_some_and(|item| ["f:status", "f:message"].iter().all(|field| item.get(field).is_some()))
}

/// `wanted` is contained in `current`; list items with a `type` or an `address` are found by it.
fn holds(current: &Value, wanted: &Value) -> bool {
    match (current, wanted) {
        (Value::Object(current), Value::Object(wanted)) => {
            wanted.iter().all(|(name, wanted)| current.get(name).is_some_and(|current| holds(current, wanted)))
        }
        (Value::Array(current), Value::Array(wanted)) => {
            wanted.iter().all(|wanted| current.iter().any(|current| holds(current, wanted)))
        }
        (current, wanted) => current == wanted,
    }
}

/// `owned`, a field set, has a field that `wanted` has not: it must be given up.
fn owns_more(owned: &Value, wanted: &Value) -> bool {
    owned.as_object().into_iter().flatten().any(|(field, below)| match (field.split_once(':'), wanted) {
        (Some(("f", name)), wanted) => wanted.get(name).is_none_or(|wanted| owns_more(below, wanted)),
        (Some(("k", key)), Value::Array(items)) => {
            let key: Value = serde_json::from_str(key).unwrap_or_default();
            items.iter().find(|item| holds(item, &key)).is_none_or(|item| owns_more(below, item))
        }
        _ => false,
    })
}

/// A time with whole seconds, as the API server keeps it: anything finer would differ for ever.
pub fn whole_seconds(time: Timestamp) -> String {
    time.strftime("%FT%TZ").to_string()
}

fn with_whole_seconds(mut list: Value, conditions: &[Condition]) -> Value {
    for (item, condition) in list.as_array_mut().into_iter().flatten().zip(conditions) {
        item["lastTransitionTime"] = json!(whole_seconds(condition.last_transition_time.0));
    }
    list
}

fn templates_valid(rendered: Result<&[Rendered], &TemplateError>, refused: Option<&TemplateError>) -> NewCondition {
    let (status, reason, message) = match (rendered, refused) {
        (Err(error), _) => (false, "TemplateError", error.to_string()),
        (Ok(_), Some(error)) => (true, "NewerRefused", format!("newer templates are not used: {error}")),
        (Ok(_), None) => (true, "Rendered", String::new()),
    };
    NewCondition { type_: TEMPLATES_VALID, status, reason: reason.into(), message }
}

fn ready(
    vm: &VirtualMachine,
    up: bool,
    Pods { own: pod, former }: Pods<'_>,
    plan: &Plan,
    rendered: Result<&[Rendered], &TemplateError>,
    outcome: &Outcome,
) -> NewCondition {
    let taken = plan.waits.iter().find_map(|wait| match wait {
        Wait::NotOurs(key) => Some(key),
        _ => None,
    });
    let (status, reason, message) = match (plan.power.wanted, pod) {
        _ if let Some(failure) = &outcome.failure => (false, failure.reason, failure.message.clone()),
        _ if let Some(key) = taken => {
            (false, "NameTaken", format!("{key} exists and is not this machine's: delete or rename one of the two"))
        }
        (_, None) if let Some((reason, message)) = unanswered(plan, former) => (false, reason, message),
        (Wanted::Down, None) if let Some(former) = former => {
            (false, "Stopping", format!("waiting for {} of an earlier machine of this name to end", former.key))
        }
        (Wanted::Down, None) => stopped(&plan.power),
        (Wanted::Down | Wanted::Halting, pod) => match unanswered(plan, pod) {
            Some((reason, message)) => (false, reason, message),
            None if plan.power.wanted == Wanted::Halting => {
                (false, "Stopping", "the guest has shut itself down; its Pod goes next".into())
            }
            None => (false, "Stopping", "waiting for the guest to power down".into()),
        },
        (Wanted::Up, Some(pod)) if pod.deleting.is_some() => match unanswered(plan, Some(pod)) {
            Some((reason, message)) => (false, reason, message),
            None => (
                false,
                "Restarting",
                format!("waiting for the old Pod to be gone before a new one is made{}", disruption(pod)),
            ),
        },
        (Wanted::Up, Some(_)) if up => (true, "Running", "the machine runs, as the spec says".into()),
        (Wanted::Up, Some(_)) if let Some((reason, message)) = unanswered(plan, pod) => (false, reason, message),
        (Wanted::Up, Some(pod)) => {
            let (reason, message) = cause(vm, pod)
                .unwrap_or_else(|| ("Starting", "waiting for the runner to report that the guest runs".into()));
            let retry = plan.retry.as_ref().filter(|retry| retry.pod_uid == pod.uid);
            let retry = retry
                .map(|retry| format!("; try {} is at {}", retry.count.saturating_add(1), whole_seconds(retry.next.0)));
            (false, reason, message + &retry.unwrap_or_default())
        }
        (Wanted::Up, None) => match (rendered, plan.waits.first()) {
            (Err(error), _) => (false, "TemplateError", error.to_string()),
            (
                Ok(_),
                Some(Wait::Gone(key) | Wait::Overdue(key) | Wait::Kept(key) | Wait::NotOurs(key) | Wait::Retry(key)),
            ) => (false, "WaitingForDeletion", format!("waiting for {key} to be gone")),
            (Ok(_), None) => (false, "Starting", "waiting for the Pod to start".into()),
        },
    };
    NewCondition { type_: READY, status, reason: reason.into(), message }
}

fn stopped(power: &Power) -> (bool, &'static str, String) {
    if power.halted.as_ref().is_some_and(|halted| !halted.released) {
        let message = format!(
            "the guest shut itself down and guestShutdownStops is set; to start it, set state to Stopped and then to Running, \
             or give the annotation {RESTARTED_ANNOTATION} a new value"
        );
        (true, "GuestShutdown", message)
    } else {
        (true, "StoppedAsRequested", "the machine is down, as the spec says".into())
    }
}

/// A Pod whose node does not answer, or that should be gone: a reason and what to do.
fn unanswered(plan: &Plan, pod: Option<&Object>) -> Option<(&'static str, String)> {
    let pod = pod?;
    let (name, node) = (&pod.key.name, pod.text(Part::Spec, "/nodeName").unwrap_or("?"));
    let since = || pod.deleting.map(whole_seconds).unwrap_or_default();
    if plan.waits.contains(&Wait::Kept(pod.key.clone())) {
        let message = format!(
            "Pod {name} should have gone at {}; nothing runs in it any more, but something keeps it: see its metadata.finalizers",
            since()
        );
        return Some(("PodNotRemoved", message));
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
    Some(("NodeNotResponding", message))
}

/// Why a Pod is going, if the cluster removes it.
fn disruption(pod: &Object) -> String {
    let disruption = pod.condition("DisruptionTarget", "True");
    disruption.map(|item| format!(" ({}: {})", text(&item["reason"]), text(&item["message"]))).unwrap_or_default()
}

/// Why a Pod that is there does not run its guest: what its conditions and its containers say.
fn cause(vm: &VirtualMachine, pod: &Object) -> Option<(&'static str, String)> {
    if let Some(condition) = pod.condition("PodScheduled", "False") {
        return Some(("Unschedulable", text(&condition["message"])));
    }
    match pod.text(Part::Status, "/phase") {
        Some("Succeeded") => return Some(("PodSucceeded", "its containers have ended".into())),
        Some("Failed") => return Some(("PodFailed", failed(pod))),
        _ => {}
    }
    let mut shut_down = None;
    for container in pod.containers() {
        let name = text(&container["name"]);
        let ended = ended(container);
        if let Some(ended) = ended.filter(|ended| ended["exitCode"] != 0) {
            return Some(("RunnerFailed", end_of(&name, ended)));
        }
        let waiting = &container["state"]["waiting"];
        match waiting["reason"].as_str() {
            None | Some("ContainerCreating" | "PodInitializing") => {}
            // The kubelet's word for each pause before a container is started again
            // (<https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/#restart-policy>).
            Some("CrashLoopBackOff") if ended.is_some() && name == APP_NAME => {
                let message =
                    "the guest has shut down; its node starts it again after a pause, which grows up to 5 min";
                shut_down = Some(("Starting", message.to_owned()));
            }
            // The kubelet says why, and then, in turns, only that it waits.
            Some("ImagePullBackOff") if let Some(said) = said_before(vm, "ImagePullFailed") => {
                return Some(("ImagePullFailed", said));
            }
            Some(reason @ ("ErrImagePull" | "ImagePullBackOff" | "InvalidImageName" | "ErrImageNeverPull")) => {
                return Some(("ImagePullFailed", format!("{name}: {reason}: {}", text(&waiting["message"]))));
            }
            Some(reason) => {
                return Some(("ContainerWaiting", format!("{name}: {reason}: {}", text(&waiting["message"]))));
            }
        }
    }
    if shut_down.is_some() {
        return shut_down;
    }
    let current = vm.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    let running = conditions::find(current, RUNNING).filter(|_| !ours(vm, RUNNING) && is_report_of(vm, pod))?;
    (running.status == "False" && running.reason == "QemuFailed").then(|| ("RunnerFailed", running.message.clone()))
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
fn said_before(vm: &VirtualMachine, reason: &str) -> Option<String> {
    let ready = conditions::find(&vm.status.as_ref()?.conditions, READY)?;
    (ready.reason == reason).then(|| ready.message.clone())
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests;
