//! Why a VM is not as its spec wants it: from the facts of the cluster to the first stage that fails.
//!
//! ```text
//!  Git ─▶ manager ─▶ template ─▶ API server ─▶ claims ─▶ scheduler ─▶ kubelet ─▶ QEMU ─▶ guest
//! ```
//!
//! The cause is in the first stage whose result is missing. What fails later is a consequence, and what failed earlier and has healed is no
//! cause: a stage looks at how things are, and at events only of objects that still are as the event says (by their UID). The first and the last
//! stage have no causes: they only say how the VM came here, and how far its guest is.
//!
//! Where the manager has found the cause by itself (the condition Ready), its reason decides, and its message is the text. What is beyond the VM's own
//! objects is looked up: by the manager for the message of Ready ([`surroundings`]), and by `kubectl vm explain`. The words of other programs
//! decide only where the API has nothing else: the answer of a refused write, and events of the kubelet.

use std::{fmt, sync::Arc};

use k8s_openapi::{
    api::{
        apps::v1::Deployment,
        coordination::v1::Lease,
        core::v1::{Event, LimitRange, Namespace, Node, PersistentVolume, Pod, ResourceQuota},
        storage::v1::StorageClass,
    },
    apimachinery::pkg::apis::meta::v1::{Condition, ManagedFieldsEntry},
    jiff::Timestamp,
};
use kube::ResourceExt;
use serde::Serialize;
use serde_json::Value;

use self::neighbours::Neighbours;
pub use self::{
    before_pod::lacks_pods,
    cause::{Cause, Stage},
};
use crate::{
    api::{
        PowerState, Problem, Reason, VirtualMachine,
        conditions::{self, POWER_UNMANAGED, READY, RESTART_REQUIRED, STORAGE_READY, TEMPLATES_VALID},
        reasons::Effect,
        status::{StateOverride, whole_seconds},
    },
    object::STATE_UNTIL_ANNOTATION,
    observed::Object,
    ownership,
};

mod before_pod;
mod cause;
pub mod git;
mod guest;
pub mod neighbours;
pub mod page;
mod pod;
mod scheduler;
pub mod surroundings;
mod taint;
mod terms;
#[cfg(test)]
mod tests;
pub mod upload;
mod volume;

/// What is known of a VM and of what it depends on. `None` of a list: it could not be read.
#[derive(Clone, Debug)]
pub struct Facts {
    /// The VM as the API server has it.
    pub vm: VirtualMachine,
    /// Its Pod. `None`: it could not be read. `Some(None)`: there is none.
    pub pod: Option<Option<Object>>,
    /// The VM's claims.
    pub claims: Option<Vec<Object>>,
    /// Claims that a Pod without a node mounts, and that do not exist.
    pub absent_claims: Vec<String>,
    /// The volumes of the claims, if the Pod has no node.
    pub volumes: Option<Vec<PersistentVolume>>,
    /// The GitOps object that applies the VM, and its content, if there is one and it could be read.
    pub git: Option<(git::GitApplier, Option<Value>)>,
    /// All storage classes.
    pub classes: Option<Vec<StorageClass>>,
    /// The events about the VM, its Pod, and its claims without a volume.
    pub events: Vec<Event>,
    /// All nodes, or that of the Pod.
    pub nodes: Option<Arc<[Node]>>,
    /// The Pods that have a node, if the scheduler's words are about them. `None`: they were not read.
    pub neighbours: Option<Neighbours>,
    /// The limits of the namespace.
    pub limits: Option<Vec<LimitRange>>,
    /// The quotas of the namespace.
    pub quotas: Option<Vec<ResourceQuota>>,
    /// The namespace.
    pub namespace: Option<Namespace>,
    /// The Deployments of managers.
    pub deployments: Option<Vec<Deployment>>,
    /// The Pods of managers whose Deployment has none that is ready, as far as they may be read.
    pub manager_pods: Vec<Pod>,
    /// The Leases of managers.
    pub leases: Option<Vec<Lease>>,
    /// What could not be read, in words, a line each.
    pub unread: Vec<String>,
    /// The time.
    pub now: Timestamp,
}

/// A cause with its circumstances.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Finding {
    /// The cause.
    pub cause: Cause,
    /// The stage that fails.
    pub stage: Stage,
    /// What is wrong, with the names of the objects.
    pub text: String,
    /// The field manager that set the field that is to blame, if it is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub who: Option<String>,
    /// The field, or the object with the field.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub field: Option<String>,
    /// Since when it is so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<String>,
    /// What a person can do.
    pub what_to_do: String,
}

impl Finding {
    pub(crate) fn new(cause: Cause, text: impl Into<String>, what_to_do: impl Into<String>) -> Self {
        Self {
            cause,
            stage: cause.stage(),
            text: text.into(),
            who: None,
            field: None,
            since: None,
            what_to_do: what_to_do.into(),
        }
    }

    pub(crate) fn since(self, since: Option<Timestamp>) -> Self {
        Self { since: since.map(whole_seconds), ..self }
    }

    pub(crate) fn at(self, field: impl Into<String>) -> Self {
        Self { field: Some(field.into()), ..self }
    }

    pub(crate) fn by(self, who: Option<String>) -> Self {
        Self { who, ..self }
    }

    /// What is wrong, in one line.
    pub fn line(&self) -> String {
        self.text.lines().collect::<Vec<_>>().join(" ")
    }
}

/// A stage in the chain.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Link {
    /// The stage.
    pub stage: Stage,
    /// How it is: `ok`, `failed`, `waits`, or `-` for one that was not reached.
    pub state: &'static str,
    /// What is known of it.
    pub text: String,
}

/// What is to be said of a VM.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Explanation {
    /// All of it in one line.
    pub line: String,
    /// Why the VM is not as its spec wants it; `None` if it is, or is on its way.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cause: Option<Finding>,
    /// The stages.
    pub chain: Vec<Link>,
    /// What is worth knowing, and is not the cause.
    pub also: Vec<String>,
    /// What could not be read.
    pub unread: Vec<String>,
}

impl Facts {
    /// A VM and its Pod, with nothing of what they depend on.
    #[must_use]
    pub fn new(vm: VirtualMachine, pod: Option<Option<Object>>, now: Timestamp) -> Self {
        Self {
            vm,
            pod,
            claims: None,
            absent_claims: Vec::new(),
            volumes: None,
            git: None,
            classes: None,
            events: Vec::new(),
            nodes: None,
            neighbours: None,
            limits: None,
            quotas: None,
            namespace: None,
            deployments: None,
            manager_pods: Vec::new(),
            leases: None,
            unread: Vec::new(),
            now,
        }
    }

    /// Whether the VM is to be down and has no Pod, whatever else is wrong.
    fn is_down(&self) -> bool {
        !self.is_wanted_up() && self.pod == Some(None) && self.vm.metadata.deletion_timestamp.is_none()
    }

    /// The VM's Pod, if it is known.
    pub(crate) fn pod(&self) -> Option<&Object> {
        self.pod.as_ref()?.as_ref()
    }

    /// The condition of the VM.
    pub(crate) fn condition(&self, type_: &str) -> Option<&Condition> {
        conditions::find(&self.vm.status.as_ref()?.conditions, type_)
    }

    /// Whether the status is about the newest spec.
    pub(crate) fn is_observed(&self) -> bool {
        let status = self.vm.status.as_ref();
        status.is_some_and(|status| {
            status.observed_generation.is_some_and(|seen| Some(seen) == self.vm.metadata.generation)
        })
    }

    /// The condition Ready and its reason, if it is not True and about the newest spec.
    pub(crate) fn not_ready(&self) -> Option<(Reason, &Condition)> {
        let ready = self.condition(READY).filter(|ready| ready.status != "True" && self.is_observed())?;
        Some((conditions::reason(ready)?, ready))
    }

    /// What the manager says of a VM that is not Ready, in parts.
    pub(crate) fn problem(&self) -> Option<&Problem> {
        let problem = self.vm.status.as_ref()?.problem.as_ref()?;
        self.not_ready().filter(|(reason, _)| *reason == problem.reason).map(|_| problem)
    }

    /// Whether the VM should have a guest.
    pub(crate) fn is_wanted_up(&self) -> bool {
        let status = self.vm.status.as_ref();
        let is_halted = status.and_then(|status| status.halted.as_ref()).is_some_and(|halted| !halted.released);
        let is_unmanaged = self.condition(POWER_UNMANAGED).is_some_and(|it| it.status == "True");
        let state = self.overriding().map_or(self.vm.spec.vm.state, |it| it.state);
        let is_running = state == PowerState::Running;
        self.vm.metadata.deletion_timestamp.is_none() && !is_halted && (is_running || is_unmanaged)
    }

    /// The power state that outranks the spec's for some time.
    pub(crate) fn overriding(&self) -> Option<&StateOverride> {
        self.vm.status.as_ref()?.state_override.as_ref()
    }

    /// Whether the guest runs, as its runner has reported. Without a Pod it does not.
    fn is_up(&self) -> bool {
        self.pod != Some(None) && self.vm.status.as_ref().is_some_and(|status| status.ready == Some(true))
    }

    /// The events about the object of that UID, the newest first.
    pub(crate) fn events_of<'a>(&'a self, uid: &'a str) -> Vec<&'a Event> {
        let is_about = |event: &&Event| event.involved_object.uid.as_deref() == Some(uid);
        let mut events: Vec<&Event> = self.events.iter().filter(is_about).collect();
        events.sort_by_key(|event| std::cmp::Reverse(time(event)));
        events
    }

    /// The option of commands that names the VM's namespace.
    pub(crate) fn on_command_line(&self) -> String {
        format!("-n {}", self.vm.namespace().unwrap_or_default())
    }
}

/// When an event was seen last.
pub fn time(event: &Event) -> Option<Timestamp> {
    let series = event.series.as_ref().and_then(|series| series.last_observed_time.as_ref()).map(|time| time.0);
    let last = event.last_timestamp.as_ref().map(|time| time.0);
    series.or(last).or_else(|| event.event_time.as_ref().map(|time| time.0))
}

/// A time in an object's content.
fn instant(value: &Value) -> Option<Timestamp> {
    value.as_str()?.parse().ok()
}

/// Who owns a field of an object, by its path in a field set such as `/f:spec/f:replicas`. The last one of several.
pub(crate) fn owner_of(entries: &[ManagedFieldsEntry], path: &str) -> Option<String> {
    let owns =
        |entry: &&ManagedFieldsEntry| entry.fields_v1.as_ref().is_some_and(|fields| fields.0.pointer(path).is_some());
    entries
        .iter()
        .filter(owns)
        .max_by_key(|entry| entry.time.as_ref().map(|time| time.0))?
        .manager
        .clone()
        .filter(|manager| manager != UNNAMED)
}

/// The API server's name for a field manager of which it knows nothing.
const UNNAMED: &str = "unknown";

impl fmt::Display for Explanation {
    /// The line, the chain with a line for each stage, and what else there is to say.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.line)?;
        for Link { stage, state, text } in &self.chain {
            writeln!(f, "{}", format!("  {:<11} {state:<7} {text}", stage.title()).trim_end())?;
        }
        self.also.iter().try_for_each(|line| writeln!(f, "also: {line}"))?;
        self.unread.iter().try_for_each(|line| writeln!(f, "not known: {line}"))
    }
}

/// Explains a VM.
pub fn explain(facts: &Facts) -> Explanation {
    let name = facts.vm.name_any();
    let cause = first_cause(facts);
    let (head, rest) = match (&cause, facts.condition(READY)) {
        (Some(finding), _) => (wrong(facts), told(finding)),
        (None, Some(ready)) if (ready.status == "True" || facts.is_down()) && facts.is_observed() => {
            (as_wanted(facts), who_sets_state(facts))
        }
        (None, Some(ready)) if facts.is_observed() => (on_its_way(facts), format!(": {}", ready.message)),
        (None, _) => {
            let generation = facts.vm.metadata.generation.unwrap_or_default();
            ("waits", format!(": the manager has not taken generation {generation} of the spec yet"))
        }
    };
    Explanation {
        line: format!("{name} {head}{rest}"),
        chain: chain(facts, cause.as_ref()),
        cause,
        also: also(facts),
        unread: facts.unread.clone(),
    }
}

/// The first stage that fails.
fn first_cause(facts: &Facts) -> Option<Finding> {
    let stages: [fn(&Facts) -> Option<Finding>; 8] = [
        before_pod::ending,
        before_pod::manager,
        before_pod::template,
        before_pod::server,
        before_pod::claims,
        scheduler::scheduler,
        pod::kubelet,
        pod::qemu,
    ];
    stages.iter().find_map(|stage| stage(facts)).or_else(|| reported(facts))
}

/// What only the manager has found.
fn reported(facts: &Facts) -> Option<Finding> {
    let (reason, ready) = facts.not_ready().filter(|(reason, _)| reason.effect() == Effect::Warning)?;
    let known = Cause::ALL.iter().copied().find(|cause| cause.as_str() == reason.as_str());
    if facts.is_down() && known.is_some_and(|cause| cause.stage() == Stage::Template) {
        return None;
    }
    Some(of_condition(facts, known.unwrap_or(Cause::ApplyFailed), ready))
}

fn see(facts: &Facts) -> String {
    format!("kubectl {} describe vm {}", facts.on_command_line(), facts.vm.name_any())
}

/// A finding of the manager or the runner, with its own words. They say what to do where that is not obvious.
pub(crate) fn of_condition(facts: &Facts, cause: Cause, condition: &Condition) -> Finding {
    let problem = facts.problem().filter(|_| condition.type_ == READY);
    let message = problem.map_or(&condition.message, |problem| &problem.message);
    let see = see(facts);
    let todo = match cause {
        _ if let Some(todo) = problem.and_then(|problem| problem.what_to_do.clone()) => todo,
        Cause::TemplateError => "mend the template, or the value that it stumbles over".into(),
        Cause::InvalidSpec => "correct that field of the VM".into(),
        Cause::NotAllowed => "take that out of the VM, or ask an administrator to add it to the list".into(),
        Cause::NameTaken => "rename the VM, or delete the other object if nobody needs it".into(),
        Cause::StorageFull => "make space, or let the storage grow; the guest then goes on by itself".into(),
        Cause::NetworkLost | Cause::TpmLost => {
            format!("kubectl vm restart {} {}", facts.vm.name_any(), facts.on_command_line())
        }
        _ => see,
    };
    Finding::new(cause, message, todo).since(Some(since(facts, condition)))
}

/// Since when the condition has its reason. Its own time is that of its status, which stays when one cause follows another; then the manager records an
/// event with the new reason.
fn since(facts: &Facts, condition: &Condition) -> Timestamp {
    let uid = facts.vm.uid().unwrap_or_default();
    let recorded = facts.events_of(&uid).into_iter().find(|event| event.reason.as_ref() == Some(&condition.reason));
    let began = recorded.and_then(|event| {
        let first = event.event_time.as_ref().map(|time| time.0);
        first.or_else(|| event.first_timestamp.as_ref().map(|time| time.0)).or_else(|| time(event))
    });
    let changed = condition.last_transition_time.0;
    began.map_or(changed, |began| began.max(changed))
}

/// How a VM is that has a cause.
fn wrong(facts: &Facts) -> &'static str {
    if facts.vm.metadata.deletion_timestamp.is_some() {
        "is not deleted yet"
    } else if !facts.is_wanted_up() {
        "does not stop"
    } else if facts.is_up() {
        "runs, but not as its spec wants it"
    } else {
        "does not run"
    }
}

/// How a VM is that is as wanted.
fn as_wanted(facts: &Facts) -> &'static str {
    let is_overridden = facts.overriding().is_some();
    if facts.vm.metadata.deletion_timestamp.is_some() {
        return "is being deleted";
    }
    match facts.condition(READY).and_then(conditions::reason) {
        Some(Reason::GuestShutdown) => "is stopped, because its guest shut itself down, and guestShutdownStops is set",
        Some(Reason::StoppedAfterPanic) => "is stopped, because its guest panicked or did not feed its watchdog",
        Some(Reason::StoppedAsRequested) if is_overridden => "is stopped for some time",
        _ if is_overridden && facts.is_wanted_up() => "runs for some time",
        Some(Reason::StoppedAsRequested) => "is stopped, as its spec wants it",
        Some(Reason::Paused) => "is paused, as its spec wants it",
        _ if !facts.is_wanted_up() => "is stopped, as its spec wants it",
        _ => "runs, as its spec wants it",
    }
}

fn on_its_way(facts: &Facts) -> &'static str {
    if facts.vm.metadata.deletion_timestamp.is_some() {
        "is being deleted"
    } else if let Some(reason @ (Reason::Pausing | Reason::Resuming)) =
        facts.condition(READY).and_then(conditions::reason)
    {
        if reason == Reason::Pausing { "is being paused" } else { "is being resumed" }
    } else if facts.is_wanted_up() {
        "is starting"
    } else {
        "is stopping"
    }
}

/// Who wants a VM to be stopped.
fn who_sets_state(facts: &Facts) -> String {
    if let Some(StateOverride { state: _, until }) = facts.overriding() {
        return format!(" (until {}, by the annotation {STATE_UNTIL_ANNOTATION})", whole_seconds(until.0));
    }
    if facts.is_wanted_up() || facts.vm.spec.vm.state == PowerState::Running {
        return String::new();
    }
    let (fields, path) = (facts.vm.managed_fields(), "/f:spec/f:vm/f:state");
    // A person's patch takes the field from a client-side apply, which the annotation of that apply does not tell.
    let owns = |manager: &String| {
        let mut owners = fields.iter().filter_map(|entry| owner_of(std::slice::from_ref(entry), path));
        owners.any(|owner| owner == *manager)
    };
    let who = ownership::applier(&facts.vm, "state").map(|applier| applier.manager).filter(owns);
    let who = who.or_else(|| owner_of(fields, path));
    who.map(|who| format!(" (spec.vm.state: Stopped, set by {who})")).unwrap_or_default()
}

/// `: TEXT (WHO, FIELD, since TIME) -> WHAT TO DO`.
fn told(finding: &Finding) -> String {
    let who = finding.who.as_ref().map(|who| format!("set by {who}"));
    let since = finding.since.as_ref().map(|since| format!("since {since}"));
    let details: Vec<String> = [who, finding.field.clone(), since].into_iter().flatten().collect();
    let details = if details.is_empty() { String::new() } else { format!(" ({})", details.join(", ")) };
    format!(": {}{details} -> {}", finding.line(), finding.what_to_do)
}

fn chain(facts: &Facts, cause: Option<&Finding>) -> Vec<Link> {
    let is_up = facts.is_up();
    let reached = facts.pod().map(|pod| if pod.node_name().is_some() { Stage::Kubelet } else { Stage::Scheduler });
    let reached = reached.unwrap_or(if facts.is_observed() { Stage::Server } else { Stage::Manager });
    let link = |stage: Stage| {
        let (state, text) = match cause {
            Some(finding) if finding.stage == stage => ("failed", finding.text.clone()),
            Some(finding) if stage > finding.stage && !is_up => ("-", "not reached, or a consequence".to_owned()),
            Some(_) => ("ok", state_of(facts, stage)),
            None if is_up || stage < reached || !facts.is_wanted_up() => ("ok", state_of(facts, stage)),
            None if stage == reached => ("waits", state_of(facts, stage)),
            None => ("-", "not reached yet".to_owned()),
        };
        Link { stage, state, text }
    };
    let ends = |stage: Stage| match stage {
        Stage::Git => facts.git.as_ref().map(|(source, object)| git_link(source, object.as_ref())),
        Stage::Guest if cause.is_none() && !facts.is_wanted_up() => {
            Some(Link { stage, state: "-", text: "no guest runs".into() })
        }
        Stage::Guest if is_up => {
            let (state, text) = guest::state(facts);
            Some(Link { stage, state, text })
        }
        _ => Some(link(stage)),
    };
    Stage::ALL.into_iter().filter_map(ends).collect()
}

/// What applies the VM. A VM that nothing applies has no such line.
fn git_link(source: &git::GitApplier, object: Option<&Value>) -> Link {
    let (state, text) = match object.and_then(|object| source.obstacle(object)) {
        Some(obstacle) => ("waits", format!("{source} applies it, and {}", obstacle.what)),
        None => ("ok", format!("{source} applies it")),
    };
    Link { stage: Stage::Git, state, text }
}

/// What is known of a stage that does not fail.
fn state_of(facts: &Facts, stage: Stage) -> String {
    let status = facts.vm.status.as_ref();
    match stage {
        Stage::Manager => match status.and_then(|status| status.observed_generation) {
            Some(seen) => format!("generation {seen} of the spec is taken"),
            None => "the spec is not taken yet".into(),
        },
        Stage::Template => status
            .and_then(|status| status.templates.as_ref())
            .and_then(|from| from.version.as_ref())
            .map(|version| format!("rendered with version {version} of the templates"))
            .unwrap_or_default(),
        Stage::Server => match &facts.pod {
            Some(Some(pod)) => format!("Pod {} exists{}", pod.key.name, made_by(pod)),
            Some(None) => "there is no Pod".into(),
            None => "it is not known whether there is a Pod".into(),
        },
        Stage::Claims => facts.condition(STORAGE_READY).map(|it| it.reason.clone()).unwrap_or_default(),
        Stage::Scheduler | Stage::Kubelet => match facts.pod().and_then(Object::node_name) {
            Some(node) if stage == Stage::Scheduler => format!("on node {node}"),
            Some(_) => facts.pod().and_then(Object::phase).unwrap_or_default().into(),
            None => "no node".into(),
        },
        Stage::Qemu => status.and_then(|status| status.phase.clone()).unwrap_or_default(),
        // These have lines of their own.
        Stage::Git | Stage::Guest => String::new(),
    }
}

/// `, made by StatefulSet apple` for the Pod of a former release.
fn made_by(pod: &Object) -> String {
    pod.maker.as_ref().map(|maker| format!(", made by {}", maker.key)).unwrap_or_default()
}

/// What is no cause.
fn also(facts: &Facts) -> Vec<String> {
    let mut also = Vec::new();
    let mut add = |type_: &str, status: &str, what: &str| {
        if let Some(found) = facts.condition(type_).filter(|it| it.status == status && !it.message.is_empty()) {
            also.push(format!("{what}{}", found.message));
        }
    };
    add(RESTART_REQUIRED, "True", "");
    add(TEMPLATES_VALID, "True", "");
    if facts.is_down() {
        add(TEMPLATES_VALID, "False", "it could not be started: ");
    }
    add(POWER_UNMANAGED, "True", "");
    add(conditions::STATE_OVERRIDDEN, "True", "");
    add(conditions::STATE_OVERRIDDEN, "False", "");
    add(STORAGE_READY, "False", "storage: ");
    add(conditions::OBJECTS_READY, "False", "an object beside the Pod: ");
    if let Some((source, Some(object))) = &facts.git
        && let Some(git::Obstacle { what, what_to_do }) = source.obstacle(object)
    {
        also.push(format!(
            "{source}, which applies this VM, {what}: changes in Git have no effect until it goes on: {what_to_do}"
        ));
    }
    if let Some(pod) = facts.pod().filter(|pod| pod.maker.is_some() && facts.is_up()) {
        let (name, place) = (facts.vm.name_any(), facts.on_command_line());
        also.push(format!(
            "Pod {}{}, still runs the VM: its next start is in a Pod of the manager: kubectl vm restart {name} {place}",
            pod.key.name,
            made_by(pod)
        ));
    }
    if let Some(pod) = facts.pod().filter(|_| facts.is_up()) {
        also.extend(pod.container_statuses().filter_map(|status| pod::crashing(facts, pod, status)));
    }
    if let Some(word) = before_pod::idle_manager(facts).filter(|_| facts.is_observed()) {
        also.push(format!("{word}: changes of the VM have no effect until one works"));
    }
    also
}
