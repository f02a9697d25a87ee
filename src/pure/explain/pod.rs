//! The stages of a Pod on a node: the kubelet, QEMU.

use k8s_openapi::{
    api::core::v1::{Event, Node, Pod},
    jiff::SignedDuration,
};
use kube::ResourceExt;
use serde_json::Value;

use super::{Cause, Facts, Finding, instant, of_condition, owner_of, time, upload};
use crate::{
    api::{OnPanic, Reason, WatchdogAction, conditions},
    object::{AGENT_NAME, PASST_NAME},
    observed::{Object, end_of},
    runner_config::faults::fault,
};

/// How long a runner may take until its first report.
const REPORTED: SignedDuration = SignedDuration::from_mins(1);

/// The node runs the Pod's containers.
pub(super) fn kubelet(facts: &Facts) -> Option<Finding> {
    if let Some((reason, ready)) = facts.not_ready() {
        let cause = match reason {
            Reason::NodeNotResponding => Some(Cause::NodeNotResponding),
            Reason::PodNotEnded => Some(Cause::PodNotEnded),
            Reason::PodNotRemoved => Some(Cause::PodNotRemoved),
            _ => None,
        };
        if let Some(cause) = cause {
            return Some(of_condition(facts, cause, ready));
        }
    }
    let pod = facts.pod().filter(|pod| pod.deleting.is_none() && facts.is_wanted_up())?;
    let node = pod.node_name()?;
    let name = &pod.key.name;
    let describe = format!("kubectl {} describe pod {name}", facts.on_command_line());
    let is_running = pod.phase() == Some("Running");
    if let Some(nodes) = &facts.nodes {
        match nodes.iter().find(|found| found.name_any() == node) {
            None => {
                let who = owner_of(facts.vm.managed_fields(), "/f:spec/f:nodeName");
                let field = if facts.vm.spec.node_name.is_some() { "spec.nodeName" } else { "Pod: spec.nodeName" };
                let text = format!("Pod {name} is for node {node}, which does not exist");
                return Some(
                    Finding::new(Cause::NodeMissing, text, "name another node (kubectl get nodes), or none")
                        .by(who)
                        .at(field)
                        .since(pod.created),
                );
            }
            Some(found) => {
                let ready = found
                    .status
                    .iter()
                    .flat_map(|status| status.conditions.iter().flatten())
                    .find(|it| it.type_ == "Ready");
                if ready.is_some_and(|ready| ready.status == "Unknown" || (ready.status == "False" && !is_running)) {
                    return Some(not_ready(node, found));
                }
            }
        }
    }
    if let Some(found) = ended(facts, pod, &describe) {
        return Some(found);
    }
    if let Some(found) = pod.container_statuses().find_map(|status| waiting(facts, pod, status, &describe)) {
        return Some(found);
    }
    if let Some(found) = upload::missing(facts, pod) {
        return Some(found);
    }
    if let Some(found) = ended_by_kubelet(facts, pod, node) {
        return Some(found);
    }
    // Why containers are not created is only in the kubelet's events.
    let is_created = pod.container_statuses().next().is_some() && !pod.container_statuses().any(is_being_created);
    if is_running || (is_created && pod.phase() != Some("Pending")) {
        return None;
    }
    let cause = |reason: &str| match reason {
        "FailedMount" => Some((Cause::MountFailed, "a volume can't be mounted")),
        "FailedAttachVolume" => Some((Cause::AttachFailed, "a volume can't be attached")),
        "FailedCreatePodSandBox" => {
            Some((Cause::SandboxFailed, "the Pod's sandbox (its network, or its RuntimeClass) can't be made"))
        }
        _ => None,
    };
    let events = facts.events_of(&pod.uid);
    // Images are pulled when the volumes and the network are there, so that has healed an earlier failure.
    let has_healed =
        |event: &&&Event| matches!(event.reason.as_deref(), Some("Pulling" | "Pulled" | "Created" | "Started"));
    let mut since_then = events.iter().take_while(|event| !has_healed(event));
    if let Some((event, (cause, what))) = since_then.find_map(|event| Some((event, cause(event.reason.as_deref()?)?))) {
        let message = event.message.as_deref().unwrap_or_default();
        let lacking = lacking_key(pod, message).map(|words| format!(" ({words})")).unwrap_or_default();
        let text = format!("node {node}: {what}: {message}{lacking}");
        return Some(
            Finding::new(cause, text, describe)
                .since(event.first_timestamp.as_ref().map(|it| it.0).or_else(|| time(event))),
        );
    }
    let (_, ready) = facts.not_ready().filter(|(reason, _)| *reason == Reason::StartDelayed)?;
    Some(of_condition(facts, Cause::StartDelayed, ready))
}

/// A container that the kubelet itself has ended, and begins again: a probe or a hook of it fails. Only the kubelet's event says so: the guest
/// has shut down in order.
fn ended_by_kubelet(facts: &Facts, pod: &Object, node: &str) -> Option<Finding> {
    if facts.is_up() {
        return None;
    }
    facts.events_of(&pod.uid).into_iter().find_map(|event| {
        let message = event.message.as_deref().unwrap_or_default();
        let path = event.involved_object.field_path.as_deref()?;
        let (what, why) = match event.reason.as_deref()? {
            "FailedPostStartHook" => ("hook postStart", message),
            // A probe may fail some times before that.
            "Killing" => {
                let kinds =
                    [("liveness probe", "Liveness probe failed: "), ("startup probe", "Startup probe failed: ")];
                let (what, words) = kinds.into_iter().find(|(what, _)| message.contains(&format!("failed {what}")))?;
                let said = facts.events_of(&pod.uid).into_iter().find_map(|other| {
                    let is_of_it = other.involved_object.field_path.as_deref() == Some(path);
                    other.message.as_deref()?.strip_prefix(words).filter(|_| is_of_it)
                });
                (what, said.unwrap_or_default())
            }
            _ => return None,
        };
        let container = path.split_once('{')?.1.trim_end_matches('}');
        let status = pod.container_statuses().find(|status| status["name"] == container)?;
        let run = end_of(status)?;
        // What it said of a run before the last one is no cause of this one's end.
        let is_of_run = time(event)? >= instant(&run["startedAt"])?;
        let text = format!("node {node} ends the container {container}, because its {what} fails: {why}");
        let todo = "correct it in the template of the Pod, or give it more time";
        let field = format!("Pod: spec.containers[{container}]");
        let since = event.first_timestamp.as_ref().map(|it| it.0).or_else(|| time(event));
        is_of_run.then(|| Finding::new(Cause::ProbeFailed, text.trim_end_matches(": "), todo).at(field).since(since))
    })
}

/// A node that is not ready.
pub(super) fn not_ready(name: &str, node: &Node) -> Finding {
    let conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let ready = conditions.into_iter().find(|it| it.type_ == "Ready");
    let since = ready.and_then(|ready| ready.last_transition_time.as_ref()).map(|it| it.0);
    let message = ready.and_then(|ready| ready.message.clone()).unwrap_or_default();
    let (cause, what) = match ready.map(|ready| ready.status.as_str()) {
        Some("Unknown") => (Cause::NodeNotResponding, "does not answer"),
        _ => (Cause::NodeNotReady, "is not ready"),
    };
    let text = format!("node {name} {what}: {message}");
    Finding::new(cause, text.trim_end_matches(": "), format!("kubectl describe node {name}"))
        .at("Node: status")
        .since(since)
}

/// A Pod that has ended as a whole.
fn ended(facts: &Facts, pod: &Object, describe: &str) -> Option<Finding> {
    let name = &pod.key.name;
    let (reason, message) =
        (pod.status_str("/reason").unwrap_or_default(), pod.status_str("/message").unwrap_or_default());
    let told = if reason.is_empty() { String::new() } else { format!(": {reason}: {message}") };
    match pod.phase()? {
        "Failed" if reason == "Evicted" => {
            let text = format!("node {} has evicted Pod {name}: {message}", pod.node_name().unwrap_or("?"));
            let is_kept = keeps_a_claim(facts, pod);
            let todo = match (message.contains(" limit"), is_kept) {
                (true, false) => {
                    "raise that limit in spec.resources or in the template; the manager makes the Pod again"
                }
                (true, true) => "raise that limit in spec.resources or in the template",
                (false, false) => {
                    "the manager makes the Pod again; free what the node lacks, or request more in spec.resources"
                }
                (false, true) => "free what the node lacks, or request more in spec.resources",
            };
            Some(Finding::new(Cause::Evicted, text, todo))
        }
        // How its containers ended the manager has in words.
        "Failed"
            if told.is_empty()
                && let Some((Reason::PodFailed, ready)) = facts.not_ready() =>
        {
            Some(Finding { what_to_do: describe.to_owned(), ..of_condition(facts, Cause::PodFailed, ready) })
        }
        "Failed" => Some(Finding::new(Cause::PodFailed, format!("Pod {name} failed{told}"), describe)),
        "Succeeded" => {
            Some(Finding::new(Cause::PodSucceeded, format!("the containers of Pod {name} have ended{told}"), describe))
        }
        _ => None,
    }
}

/// Whether a claim that the Pod mounts is being deleted: the Pod is kept, because the claim goes with its last Pod.
fn keeps_a_claim(facts: &Facts, pod: &Object) -> bool {
    let is_mounted = |claim: &&Object| pod.mounted_claims().any(|(name, _)| name == claim.key.name);
    facts.claims.iter().flatten().filter(is_mounted).any(|claim| claim.deleting.is_some())
}

/// Which Secret or ConfigMap lacks a key that the Pod mounts: the kubelet's message names the key alone.
fn lacking_key(pod: &Object, message: &str) -> Option<String> {
    let (kind, key) = [("Secret", "non-existent secret key: "), ("ConfigMap", "non-existent config key: ")]
        .into_iter()
        .find_map(|(kind, words)| Some((kind, message.split_once(words)?.1.trim())))?;
    let has_key =
        |source: &Value| source["items"].as_array().is_some_and(|items| items.iter().any(|it| it["key"] == key));
    let volumes = pod.spec["volumes"].as_array().into_iter().flatten();
    let mut names = volumes.flat_map(|volume| {
        let projected = volume["projected"]["sources"].as_array().into_iter().flatten();
        let projected = projected.map(|source| if kind == "Secret" { &source["secret"] } else { &source["configMap"] });
        let own = if kind == "Secret" { &volume["secret"] } else { &volume["configMap"] };
        let all: Vec<&Value> = projected.chain([own]).filter(|source| has_key(source)).collect();
        all.into_iter().filter_map(|source| source["name"].as_str().or_else(|| source["secretName"].as_str()))
    });
    names.next().map(|name| format!("{kind} {name} has no key {key}"))
}

fn is_being_created(status: &Value) -> bool {
    let reason = status["state"]["waiting"]["reason"].as_str();
    reason.is_some_and(|reason| ["ContainerCreating", "PodInitializing"].contains(&reason))
}

/// The seccomp profile of a container, if the node must have it in a file.
fn localhost_profile<'a>(pod: &'a Object, container: &str) -> Option<&'a str> {
    let of_container = &pod.container(container)?["securityContext"];
    let found = [of_container, &pod.spec["securityContext"]].into_iter();
    found.filter_map(|context| context["seccompProfile"]["localhostProfile"].as_str()).next()
}

/// A container that the node can't start.
fn waiting(facts: &Facts, pod: &Object, status: &Value, describe: &str) -> Option<Finding> {
    let waiting = &status["state"]["waiting"];
    let reason = waiting["reason"].as_str().filter(|_| !is_being_created(status))?;
    let (container, image) =
        (status["name"].as_str().unwrap_or_default(), status["image"].as_str().unwrap_or_default());
    let since = pod.condition("PodScheduled", "True").and_then(|it| instant(&it["lastTransitionTime"]));
    let message = waiting["message"].as_str().unwrap_or_default();
    let who = || facts.vm.spec.image.as_ref().and_then(|_| owner_of(facts.vm.managed_fields(), "/f:spec/f:image"));
    let field =
        if facts.vm.spec.image.is_some() { "spec.image" } else { "runnerImage of the configuration, or a template" };
    // The agent has the runner's image.
    let image_of = |name: &str| pod.container(name).and_then(|it| it["image"].as_str());
    let is_runners = container == pod.runner_container_name()
        || container == AGENT_NAME && image_of(container) == image_of(pod.runner_container_name());
    let field = if is_runners { field.to_owned() } else { format!("container {container}") };
    let found = match reason {
        "InvalidImageName" => {
            Finding::new(Cause::InvalidImageName, format!("the image name {image} is invalid"), "correct the name")
                .by(who())
                .at(field)
        }
        "ErrImagePull" | "ImagePullBackOff" | "ErrImageNeverPull" => {
            // In a pause the kubelet says only that it waits; its event has the registry's words.
            let event = facts.events_of(&pod.uid).into_iter().find(|event| {
                event.reason.as_deref() == Some("Failed")
                    && event.message.as_deref().is_some_and(|message| message.contains(image))
            });
            let why = event.and_then(|event| event.message.as_deref());
            // Without it what the kubelet said before the pause is in the manager's words.
            if reason == "ImagePullBackOff"
                && why.is_none()
                && let Some((Reason::ImagePullFailed, ready)) = facts.not_ready()
                && facts.problem().is_some_and(|problem| problem.what_to_do.is_some())
            {
                return Some(of_condition(facts, Cause::ImagePullFailed, ready));
            }
            let why = why.unwrap_or(message);
            let text = format!("node {} can't get the image {image}: {why}", pod.node_name().unwrap_or("?"));
            Finding::new(
                Cause::ImagePullFailed,
                text,
                "correct the image, or let the node pull it (registry, pull secret, tag)",
            )
            .by(who())
            .at(field)
        }
        "CreateContainerConfigError" => {
            let is_missing = ["not found", "couldn't find key"].iter().any(|words| message.contains(words));
            let todo = if is_missing { "create what is missing" } else { "correct it in the template of the Pod" };
            Finding::new(
                Cause::ContainerConfig,
                format!("container {container}: {message}"),
                format!("{todo}; the node tries again by itself"),
            )
            .at(format!("container {container}"))
        }
        // It has run: QEMU's stage looks at its end.
        "CrashLoopBackOff" => return None,
        reason => {
            let profile = localhost_profile(pod, container).filter(|profile| message.contains(profile));
            let todo = profile.map_or_else(
                || describe.to_owned(),
                |profile| {
                    let node = pod.node_name().unwrap_or("?");
                    match container {
                        PASST_NAME => format!(
                            "install deploy/node-devices, which brings the seccomp profile {profile} to node {node}, or set \
                             passt.seccompProfile in the manager's configuration: docs/node-devices.md"
                        ),
                        _ => format!("bring the seccomp profile {profile} to node {node}, or correct it in the template of the Pod"),
                    }
                },
            );
            Finding::new(Cause::ContainerWaiting, format!("container {container}: {reason}: {message}"), todo)
        }
    };
    Some(found.since(since))
}

/// A container beside a guest that runs, which has ended with an error, or does so again and again, in words.
pub(super) fn crashing(facts: &Facts, pod: &Object, status: &Value) -> Option<String> {
    let is_waiting = status["state"]["waiting"]["reason"] == "CrashLoopBackOff";
    let container = status["name"].as_str()?;
    let ended = end_of(status).filter(|ended| ended["exitCode"] != 0)?;
    let has_ended = status["state"]["terminated"].is_object();
    let last = ended["message"].as_str().unwrap_or_default().trim().lines().last().unwrap_or_default();
    let last = if last.is_empty() { String::new() } else { format!(": {last}") };
    let (place, name) = (facts.on_command_line(), &pod.key.name);
    let (ends, previous) = if is_waiting { ("ends again and again,", " --previous") } else { ("has ended", "") };
    (is_waiting || has_ended).then(|| {
        format!(
            "the container {container} of the Pod {ends} with exit code {}{last}: kubectl {place} logs {name} -c {container}{previous}",
            ended["exitCode"]
        )
    })
}

/// Why a container of a manager's Pod does not run, in words.
pub(super) fn failure_of_program(pod: &Pod) -> Option<String> {
    let status = pod.status.as_ref()?;
    let all = status.init_container_statuses.iter().chain(&status.container_statuses).flatten();
    let of_container = all.into_iter().find_map(|container| {
        let name = &container.name;
        let waiting = container.state.as_ref().and_then(|state| state.waiting.as_ref());
        let ended =
            [&container.state, &container.last_state].into_iter().flatten().find_map(|it| it.terminated.as_ref());
        if let Some(ended) = ended.filter(|ended| ended.exit_code != 0) {
            let reason = ended.reason.as_deref().filter(|reason| *reason != "Error");
            let reason = reason.map(|reason| format!(" ({reason})")).unwrap_or_default();
            let message = ended.message.as_deref().unwrap_or_default().trim();
            let last = message.lines().last().map(|last| format!(": {last}")).unwrap_or_default();
            return Some(format!("its container {name} ended with exit code {}{reason}{last}", ended.exit_code));
        }
        let waiting = waiting?;
        let reason = waiting.reason.as_deref().filter(|it| !["ContainerCreating", "PodInitializing"].contains(it))?;
        let message = waiting.message.as_deref().unwrap_or_default();
        Some(format!("its container {name}: {reason}: {message}"))
    });
    // A Pod without a node has no containers.
    of_container.or_else(|| {
        let unscheduled =
            status.conditions.iter().flatten().find(|it| it.type_ == "PodScheduled" && it.status == "False");
        unscheduled?.message.clone()
    })
}

/// QEMU runs the guest as the spec wants it.
pub(super) fn qemu(facts: &Facts) -> Option<Finding> {
    if let Some(pod) = facts.pod().filter(|_| facts.is_wanted_up() && !facts.is_up()) {
        let reason = facts.not_ready().map(|(reason, _)| reason);
        let found = pod.container_statuses().find_map(|status| Some((status, killed(pod, status, reason)?)));
        if let Some((status, ended)) = found {
            return Some(out_of_memory(facts, pod, status, ended));
        }
    }
    let (reason, ready) = facts.not_ready()?;
    let name = facts.vm.name_any();
    let place = facts.on_command_line();
    if let Some(found) =
        facts.pod().filter(|_| reason == Reason::Starting && facts.is_wanted_up()).and_then(|pod| silent(facts, pod))
    {
        return Some(found);
    }
    let cause = match reason {
        Reason::RunnerFailed => {
            let found = of_condition(facts, Cause::RunnerFailed, ready);
            let fault = fault(&found.text);
            let todo = fault.map_or("mend what it names", |fault| fault.what_to_do);
            let todo = format!("{todo}; all that it says: kubectl vm logs {name} {place}");
            let field = fault.and_then(|fault| fault.field).map(str::to_owned);
            return Some(Finding { what_to_do: todo, field, ..found });
        }
        Reason::ContainerFailed => {
            let found = of_condition(facts, Cause::ContainerFailed, ready);
            let Some(container) = facts.pod().and_then(|pod| failing(pod)) else { return Some(found) };
            let todo = format!(
                "mend that in the template of the Pod, or in spec.templateValues; all that it says: kubectl {place} logs {name} -c {container}"
            );
            return Some(Finding { what_to_do: todo, ..found }.at(format!("container {container}")));
        }
        Reason::StorageFull => Cause::StorageFull,
        Reason::StorageFailed => Cause::StorageFailed,
        Reason::TpmLost => Cause::TpmLost,
        Reason::NetworkLost => Cause::NetworkLost,
        Reason::ChangeFailed => Cause::ChangeFailed,
        Reason::GuestPanicked => {
            let machine = &facts.vm.spec.vm;
            let is_reset = machine.on_panic == Some(OnPanic::Restart)
                || machine.watchdog.is_some_and(|watchdog| watchdog.action == WatchdogAction::Reset);
            let todo = if is_reset {
                "wait until the runner resets it, or look at its console".to_owned()
            } else {
                format!("kubectl vm reset {name} {place}")
            };
            let found = Finding::new(Cause::GuestPanicked, ready.message.clone(), todo).at("spec.vm.onPanic");
            return Some(found.since(facts.condition(conditions::RUNNING).map(|it| it.last_transition_time.0)));
        }
        Reason::Paused => {
            let since = facts.condition(conditions::RUNNING).map(|running| running.last_transition_time.0);
            let pod = facts.pod().map_or(name.as_str(), |pod| pod.key.name.as_str());
            let todo = format!("kubectl {place} exec {pod} -c vm-runner -- vm-runner ctl resume");
            let text = "somebody has paused the guest, and spec.vm.paused does not want that";
            return Some(Finding::new(Cause::PausedByHand, text, todo).since(since));
        }
        _ => return None,
    };
    Some(of_condition(facts, cause, ready))
}

/// A runner that has run for a while, and whose agent has reported nothing of it.
fn silent(facts: &Facts, pod: &Object) -> Option<Finding> {
    // The runner of the VM-Operator in Java does not say which Pod it is in.
    if pod.has_legacy_runner() {
        return None;
    }
    let runner = pod.container_statuses().find(|status| status["name"] == pod.runner_container_name())?;
    let since = instant(&runner["state"]["running"]["startedAt"])?;
    let status = facts.vm.status.as_ref();
    let has_reported = status.is_some_and(|status| status.pod_uid.as_deref() == Some(pod.uid.as_str()));
    let (name, place) = (&pod.key.name, facts.on_command_line());
    (!has_reported && facts.now.duration_since(since) > REPORTED).then(|| {
        let text = format!("Pod {name} runs, and its runner has reported nothing");
        let todo = format!(
            "see its agent, which says what it waits for, or which right its account lacks (the RoleBinding vm-runner-report): kubectl {place} logs \
             {name} -c {AGENT_NAME}"
        );
        Finding::new(Cause::RunnerSilent, text, todo).since(Some(since))
    })
}

/// The first container of a Pod that has ended with an error.
fn failing(pod: &Object) -> Option<&str> {
    let ended = |status: &&Value| end_of(status).is_some_and(|end| end["exitCode"] != 0);
    pod.container_statuses().find(ended)?["name"].as_str()
}

/// How a container ended that was killed for its memory, if that is why no guest runs. One that runs again is to blame only if Ready says
/// that it fails.
fn killed<'a>(pod: &Object, status: &'a Value, reason: Option<Reason>) -> Option<&'a Value> {
    let state = &status["state"];
    let of_memory = |ended: &&Value| ended["reason"] == "OOMKilled";
    if state["terminated"].is_object() {
        return Some(&state["terminated"]).filter(of_memory);
    }
    let name = status["name"].as_str().unwrap_or_default();
    let of_runner = name == pod.runner_container_name() || name == AGENT_NAME;
    let blamed = if of_runner { Reason::RunnerFailed } else { Reason::ContainerFailed };
    let fails = state["running"].is_null() || reason == Some(blamed);
    Some(&status["lastState"]["terminated"]).filter(|ended| fails && of_memory(ended))
}

/// A container that was killed for its memory.
fn out_of_memory(facts: &Facts, pod: &Object, status: &Value, ended: &Value) -> Finding {
    let container = status["name"].as_str().unwrap_or_default();
    let limit = pod.container(container);
    let limit = limit.and_then(|it| it["resources"]["limits"]["memory"].as_str());
    let limit = limit.map(|limit| format!(" of {limit}")).unwrap_or_default();
    let text = format!(
        "container {container} was killed because it used more memory than its limit{limit}, or than the node has"
    );
    let of_vm = facts
        .vm
        .spec
        .resources
        .as_ref()
        .is_some_and(|it| it.limits.as_ref().is_some_and(|it| it.contains_key("memory")));
    let (field, todo) = if container == pod.runner_container_name() && of_vm {
        let todo = "raise the memory in spec.resources above currentRam (QEMU itself needs some), or remove the limit";
        ("spec.resources.limits.memory".to_owned(), todo)
    } else {
        (format!("Pod: resources of the container {container}"), "raise its limit in the template of the Pod")
    };
    Finding::new(Cause::OutOfMemory, text, todo).at(field).since(instant(&ended["finishedAt"]))
}
