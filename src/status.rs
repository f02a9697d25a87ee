//! status: what is observed and planned becomes what the manager says about a machine.
//!
//! | | Ready (the state is the wanted one) | Running (power) | `ready` (the guest is up) |
//! |---|---|---|---|
//! | stopped, as wanted | True, StoppedAsRequested | False | false |
//! | starting | False, Starting or the cause | False | false |
//! | up, as wanted | True, Running | True | true |
//! | up, should stop | False, Stopping | True | true until the guest is down |
//! | down, should run | False, the cause | False | false |
//!
//! The runner writes `Running`, `Booted` and what it measures; where there is no Pod, nobody else can, so then it is the
//! manager who says that nothing runs.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::ResourceExt;
use serde_json::{Map, Value, json};

use crate::{
    api::{
        VirtualMachine,
        conditions::{self, BOOTED, NewCondition, READY, RESTART_REQUIRED, RUNNING, TEMPLATES_VALID},
    },
    observed::{Object, Observed, Part},
    plan::{Plan, Wait, should_run},
    render::TemplateError,
};

/// The field manager of the manager's part of the status.
pub const FIELD_MANAGER: &str = "vm-operator-status";

/// Derives the manager's part of a machine's status.
///
/// `failure` is what the API server said against an action, if it did.
pub fn status(
    vm: &VirtualMachine,
    observed: &Observed,
    plan: &Plan,
    templates: Result<(), &TemplateError>,
    failure: Option<&str>,
) -> Value {
    let name = vm.name_any();
    let current = vm.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    let pod =
        observed.objects.iter().find(|object| object.key.is_pod() && object.key.name == name && owned(object, vm));
    let up = pod.is_some() && conditions::is_true(current, RUNNING);
    let run = should_run(vm);
    let ready = ready(run, up, pod.map(AsRef::as_ref), plan, templates, failure);
    let phase = match (run, up, pod) {
        (_, true, Some(pod)) if run && pod.deleting.is_none() => "Running",
        (false, _, None) => "Stopped",
        (false, _, Some(_)) => "Stopping",
        (true, _, Some(pod)) if pod.deleting.is_some() => "Stopping",
        (true, _, Some(pod)) if pod.text(Part::Status, "/phase") == Some("Failed") => "Failed",
        (true, ..) => "Starting",
    };

    let mut new = vec![templates_valid(templates), ready];
    if !plan.outdated.is_empty() {
        let objects: Vec<String> = plan.outdated.iter().map(ToString::to_string).collect();
        new.push(NewCondition {
            type_: RESTART_REQUIRED,
            status: true,
            reason: "Changed".into(),
            message: format!("the next start makes {} anew", objects.join(", ")),
        });
    }
    // Until the runner has reported, or after it has gone, nobody but us can say that nothing runs.
    for (type_, message) in [(RUNNING, "no guest is running"), (BOOTED, "no guest is running")] {
        let reported = conditions::find(current, type_).is_some_and(|_| !ours(vm, type_));
        if pod.is_none() || !reported {
            new.push(NewCondition { type_, status: false, reason: phase.to_owned(), message: message.into() });
        }
    }
    new.sort_by_key(|condition| condition.type_);
    let conditions = conditions::with_times(new, current, vm.metadata.generation, observed.now);

    let mut status = Map::new();
    status.insert("observedGeneration".into(), json!(vm.metadata.generation.unwrap_or_default()));
    status.insert("phase".into(), json!(phase));
    status.insert("created".into(), json!(pod.is_some()));
    status.insert("ready".into(), json!(up));
    status.insert("power".into(), json!(vm.spec.vm.state));
    status.insert("conditions".into(), conditions_json(&conditions));
    if pod.is_none() {
        status.insert("cpus".into(), json!(0));
        status.insert("ram".into(), json!("0"));
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

/// Whether the status that the API server has says something else than `wanted` in what the manager writes.
pub fn differs(vm: &VirtualMachine, wanted: &Value) -> bool {
    let current = json!(vm.status);
    !holds(&current, wanted) || fields(vm).is_some_and(|owned| owns_more(owned, wanted))
}

/// The fields of the status that the manager applied.
fn fields(vm: &VirtualMachine) -> Option<&Value> {
    vm.managed_fields()
        .iter()
        .find(|entry| entry.manager.as_deref() == Some(FIELD_MANAGER))
        .and_then(|entry| entry.fields_v1.as_ref())
        .map(|fields| &fields.0["f:status"])
}

/// Whether the manager, not the runner, wrote the condition last.
fn ours(vm: &VirtualMachine, type_: &str) -> bool {
    let key = format!("k:{}", json!({ "type": type_ }));
    fields(vm).is_some_and(|fields| fields["f:conditions"].get(&key).is_some_and(|item| item.get("f:status").is_some()))
}

fn owned(object: &Object, vm: &VirtualMachine) -> bool {
    object.belongs_to(vm.metadata.uid.as_deref().unwrap_or_default())
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

/// Times with whole seconds, as the API server keeps them: anything finer would differ for ever.
fn conditions_json(conditions: &[Condition]) -> Value {
    let mut list = json!(conditions);
    for (item, condition) in list.as_array_mut().into_iter().flatten().zip(conditions) {
        item["lastTransitionTime"] = json!(condition.last_transition_time.0.strftime("%Y-%m-%dT%H:%M:%SZ").to_string());
    }
    list
}

fn templates_valid(templates: Result<(), &TemplateError>) -> NewCondition {
    match templates {
        Ok(()) => {
            NewCondition { type_: TEMPLATES_VALID, status: true, reason: "Rendered".into(), message: String::new() }
        }
        Err(error) => NewCondition {
            type_: TEMPLATES_VALID,
            status: false,
            reason: "TemplateError".into(),
            message: error.to_string(),
        },
    }
}

fn ready(
    run: bool,
    up: bool,
    pod: Option<&Object>,
    plan: &Plan,
    templates: Result<(), &TemplateError>,
    failure: Option<&str>,
) -> NewCondition {
    let (status, reason, message) = match (run, pod) {
        _ if failure.is_some() => (false, "ApplyFailed", failure.unwrap_or_default().to_owned()),
        (false, None) => (true, "StoppedAsRequested", "the machine is down, as the spec says".into()),
        (false, Some(_)) => (false, "Stopping", "waiting for the guest to power down".into()),
        (true, Some(pod)) if pod.deleting.is_some() => {
            (false, "Restarting", "waiting for the old Pod to be gone before a new one is made".into())
        }
        (true, Some(_)) if up => (true, "Running", "the machine runs, as the spec says".into()),
        (true, Some(pod)) => cause(pod).map_or_else(
            || (false, "Starting", "waiting for the runner to report that the guest runs".into()),
            |(reason, message)| (false, reason, message),
        ),
        (true, None) => match (templates, plan.waits.first()) {
            (Err(error), _) => (false, "TemplateError", error.to_string()),
            (Ok(()), Some(Wait::Gone(key))) => (false, "WaitingForDeletion", format!("waiting for {key} to be gone")),
            (Ok(()), Some(Wait::NotOurs(key))) => {
                (false, "NameTaken", format!("{key} exists and is not this machine's: delete or rename one of the two"))
            }
            (Ok(()), Some(Wait::Restart(key))) => (false, "Restarting", format!("{key} ended and is made again soon")),
            (Ok(()), None) => (false, "Starting", "waiting for the Pod to start".into()),
        },
    };
    NewCondition { type_: READY, status, reason: reason.into(), message }
}

/// Why a Pod that is there does not run its guest: what its conditions and its containers say.
fn cause(pod: &Object) -> Option<(&'static str, String)> {
    let scheduled = pod.status["conditions"]
        .as_array()
        .into_iter()
        .flatten()
        .find(|condition| condition["type"] == "PodScheduled" && condition["status"] == "False");
    if let Some(condition) = scheduled {
        return Some(("Unschedulable", text(&condition["message"])));
    }
    if matches!(pod.text(Part::Status, "/phase"), Some("Failed")) {
        let reason = pod.text(Part::Status, "/reason").unwrap_or("PodFailed");
        return Some(("PodFailed", format!("{reason}: {}", pod.text(Part::Status, "/message").unwrap_or_default())));
    }
    let containers =
        ["initContainerStatuses", "containerStatuses"].into_iter().filter_map(|list| pod.status[list].as_array());
    for container in containers.flatten() {
        let name = text(&container["name"]);
        let last = &container["lastState"]["terminated"];
        let ended = Some(&container["state"]["terminated"]).filter(|state| state.is_object()).unwrap_or(last);
        if ended.is_object() && ended["exitCode"] != 0 {
            let words = text(&ended["message"]);
            return Some((
                "RunnerFailed",
                format!("{name} ended with exit code {}: {}", ended["exitCode"], words.trim()),
            ));
        }
        let waiting = &container["state"]["waiting"];
        match waiting["reason"].as_str() {
            None | Some("ContainerCreating" | "PodInitializing") => {}
            Some(reason @ ("ErrImagePull" | "ImagePullBackOff" | "InvalidImageName" | "ErrImageNeverPull")) => {
                return Some(("ImagePullFailed", format!("{name}: {reason}: {}", text(&waiting["message"]))));
            }
            Some(reason) => {
                return Some(("ContainerWaiting", format!("{name}: {reason}: {}", text(&waiting["message"]))));
            }
        }
    }
    None
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests;
