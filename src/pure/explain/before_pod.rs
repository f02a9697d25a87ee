//! The stages before a Pod: the manager, the templates, the API server, the claims.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::{
    api::{
        apps::v1::Deployment,
        coordination::v1::Lease,
        core::v1::{Event, LimitRange, LimitRangeItem},
        storage::v1::StorageClass,
    },
    apimachinery::pkg::{
        api::resource::Quantity,
        apis::meta::v1::{Condition, Time},
    },
    jiff::{SignedDuration, Timestamp},
};
use kube::ResourceExt;
use serde_json::Value;

use super::{Cause, Facts, Finding, of_condition, owner_of, pod, time, volume};
use crate::{
    api::{
        Reason,
        conditions::{READY, STORAGE_READY, TEMPLATES_VALID},
    },
    object::{CONTAINER_NAME, REPLACE_CLAIM_ANNOTATION},
    observed::Object,
    render::context::IMAGE_REPOSITORY_CLAIM,
};

/// How old a manager's Lease may be. A leader renews it every 4 s; the clocks of the cluster's computers may differ.
const LEASE_AGE: SignedDuration = SignedDuration::from_secs(40);
/// How old the event of a refused status may be: the manager tries again after a minute at most, and counts equal events a while later.
const LAST_TRY: SignedDuration = SignedDuration::from_mins(10);
/// How long a manager has to take a new spec.
const PATIENCE: SignedDuration = SignedDuration::from_secs(10);
/// The finalizers of Kubernetes' own garbage collector, which removes them when the objects of the VM are gone.
const OF_COLLECTOR: [&str; 2] = ["foregroundDeletion", "orphan"];
/// How old the last try of a controller that makes Pods may be.
const MAKERS_PAUSE: SignedDuration = SignedDuration::from_mins(20);
/// The annotation of the default class (<https://kubernetes.io/docs/concepts/storage/storage-classes/#default-storageclass>).
const DEFAULT_CLASS: &str = "storageclass.kubernetes.io/is-default-class";

fn is_renewed(lease: &Lease, now: Timestamp) -> bool {
    let Some(spec) = &lease.spec else { return false };
    let is_held = spec.holder_identity.as_deref().is_some_and(|holder| !holder.is_empty());
    is_held && spec.renew_time.as_ref().is_some_and(|time| now.duration_since(time.0) < LEASE_AGE)
}

/// Whether it is known that no manager works, in words.
pub(super) fn idle_manager(facts: &Facts) -> Option<String> {
    let leases = facts.leases.as_ref()?;
    (!leases.iter().any(|lease| is_renewed(lease, facts.now))).then(|| "no manager renews its Lease".to_owned())
}

/// What keeps a VM that is deleted, or whose namespace is: nothing else matters then.
pub(super) fn ending(facts: &Facts) -> Option<Finding> {
    let vm = &facts.vm;
    let blocking: Vec<&str> =
        vm.finalizers().iter().map(String::as_str).filter(|finalizer| !OF_COLLECTOR.contains(finalizer)).collect();
    // Whoever has a finalizer needs a moment.
    let since = vm.metadata.deletion_timestamp.as_ref();
    let since = since.filter(|since| facts.now.duration_since(since.0) > PATIENCE);
    if let Some(time) = since.filter(|_| !blocking.is_empty()) {
        let guest = if facts.is_up() { ", and its guest runs on" } else { "" };
        let text = format!("the finalizers {} keep it{guest}", blocking.join(", "));
        let todo = "let the programs to which these belong remove them";
        return Some(Finding::new(Cause::DeletionBlocked, text, todo).at("metadata.finalizers").since(Some(time.0)));
    }
    let time = facts.namespace.as_ref()?.metadata.deletion_timestamp.as_ref()?;
    let namespace = vm.namespace().unwrap_or_default();
    facts.is_wanted_up().then(|| {
        let text = format!("the namespace {namespace} is being deleted, so nothing can be created in it");
        let todo =
            format!("create the VM in another namespace, or see what keeps it: kubectl describe namespace {namespace}");
        Finding::new(Cause::NamespaceTerminating, text, todo).since(Some(time.0))
    })
}

/// The manager has taken the newest spec, and has nothing to do.
pub(super) fn manager(facts: &Facts) -> Option<Finding> {
    // While no manager works, what it has said of a VM without a Pod may be of the past.
    let lacks_pod = facts.is_wanted_up() && facts.pod == Some(None);
    if facts.is_observed() && !lacks_pod {
        return None;
    }
    let changed = changed(facts);
    if changed.is_some_and(|changed| facts.now.duration_since(changed) < PATIENCE) {
        return None;
    }
    let namespace = facts.vm.namespace().unwrap_or_default();
    let untaken = if facts.is_observed() {
        "nobody makes its Pod".to_owned()
    } else {
        format!("generation {} of the spec is not taken", facts.vm.metadata.generation.unwrap_or_default())
    };
    let mut renewed = facts.leases.iter().flatten().filter(|lease| is_renewed(lease, facts.now));
    // A manager of the VM's own namespace is the one that should take it: one elsewhere has its own VMs.
    let of_own = |it: Option<String>| it.as_deref() == Some(namespace.as_str());
    let own_lease = facts.leases.iter().flatten().find(|lease| of_own(lease.namespace()));
    let own_deployment = facts.deployments.iter().flatten().find(|deployment| of_own(deployment.namespace()));
    let has_own = own_lease.is_some() || own_deployment.is_some();
    let working = renewed.find(|lease| !has_own || of_own(lease.namespace()));
    if facts.is_observed() && idle_manager(facts).is_none() {
        // Somebody has deleted the Pod a moment ago, and the manager makes it again.
        return None;
    }
    // The Lease of a manager that has just ended is still fresh.
    let ended = working.and_then(|lease| {
        let home = lease.namespace();
        let mut deployments = facts.deployments.iter().flatten().filter(|it| it.namespace() == home);
        deployments.find(|deployment| lacks_pods(deployment))
    });
    if let Some(deployment) = ended {
        return Some(of_deployment(facts, deployment, &untaken));
    }
    if let Some(finding) = status_refused(facts).filter(|_| working.is_some()) {
        return Some(finding);
    }
    if let Some(lease) = working {
        let home = lease.namespace().unwrap_or_default();
        if home == namespace {
            let text = format!(
                "the manager in this namespace works, and {untaken}: it lacks a right here, manages other namespaces, or is busy"
            );
            let todo = format!(
                "see its log, which names a right that is missing: kubectl -n {home} logs deployment/vm-operator; the namespaces that it manages are in \
                 its key namespace (ConfigMap vm-operator) or its option --namespace"
            );
            return Some(Finding::new(Cause::NotManaged, text, todo).since(changed));
        }
        let text = format!(
            "the manager in the namespace {home} works, and {untaken}: it does not manage the namespace {namespace}, lacks rights there, or is busy"
        );
        let todo = format!(
            "add {namespace} to the key namespace of ConfigMap vm-operator in {home}, and restart the manager; if it is there, see its log, which names a right that is missing"
        );
        return Some(Finding::new(Cause::NotManaged, text, todo).since(changed));
    }
    if let Some(own) = own_deployment {
        return Some(of_deployment(facts, own, &untaken));
    }
    if own_lease.is_some() {
        return Some(silent(own_lease, &untaken, changed));
    }
    match facts.deployments.as_deref() {
        Some([]) if facts.leases.as_ref().is_some_and(Vec::is_empty) => {
            let text = format!("the cluster has no manager, so {untaken}");
            Some(
                Finding::new(Cause::ManagerMissing, text, "install it: kubectl apply --server-side -f install.yaml")
                    .since(changed),
            )
        }
        Some([first, ..]) => Some(of_deployment(facts, first, &untaken)),
        _ => Some(silent(facts.leases.iter().flatten(), &untaken, changed)),
    }
}

/// The manager has tried to write the status a moment ago, and only its event can say why that failed.
fn status_refused(facts: &Facts) -> Option<Finding> {
    let of_status = |event: &&&Event| event.reason.as_deref() == Some(Reason::StatusRefused.as_str());
    let events = facts.events_of(facts.vm.metadata.uid.as_deref()?);
    let event = events.iter().find(of_status)?;
    let is_new = time(event).is_some_and(|time| facts.now.duration_since(time) < LAST_TRY);
    let text = format!(
        "the API server refuses the VM's status from the manager: {}",
        event.message.as_deref().unwrap_or_default().trim_start_matches("write the status: ")
    );
    let todo = "let the manager patch vms/status: its role, and what that webhook or policy asks for; Ready says nothing until then";
    is_new.then(|| Finding::new(Cause::StatusRefused, text, todo).at("status").since(changed(facts)))
}

/// Nobody renews these Leases.
fn silent<'a>(leases: impl IntoIterator<Item = &'a Lease>, untaken: &str, changed: Option<Timestamp>) -> Finding {
    let text = format!("no manager renews its Lease, so {untaken}");
    let last = leases.into_iter().filter_map(|lease| lease.spec.as_ref()?.renew_time.as_ref());
    let since = last.map(|time| time.0).max().or(changed);
    let todo = "start the manager, or see its log: kubectl get lease -A --field-selector metadata.name=vm-operator";
    Finding::new(Cause::ManagerSilent, text, todo).since(since)
}

/// Whether no Pod of a Deployment is ready.
pub fn lacks_pods(deployment: &Deployment) -> bool {
    deployment.status.as_ref().and_then(|status| status.available_replicas).unwrap_or_default() == 0
}

/// A manager that does not work, by its Deployment.
fn of_deployment(facts: &Facts, deployment: &Deployment, untaken: &str) -> Finding {
    let (home, name) = (deployment.namespace().unwrap_or_default(), deployment.name_any());
    let title = format!("Deployment {home}/{name}");
    let status = deployment.status.as_ref();
    if deployment.spec.as_ref().and_then(|spec| spec.replicas) == Some(0) {
        let who = owner_of(deployment.managed_fields(), "/f:spec/f:replicas");
        let text = format!("{title} of the manager wants no Pod, so {untaken}");
        let todo = format!("kubectl -n {home} scale deployment {name} --replicas=1");
        return Finding::new(Cause::ManagerStopped, text, todo).by(who).at("spec.replicas");
    }
    if lacks_pods(deployment) {
        let mut conditions = status.and_then(|status| status.conditions.as_ref()).into_iter().flatten();
        let bad = conditions.rfind(|it| it.status == "False" || it.type_ == "ReplicaFailure");
        let mut pods = facts.manager_pods.iter().filter(|pod| pod.namespace() == deployment.namespace());
        let why = pods.find_map(pod::failure_of_program).or_else(|| bad.and_then(|it| it.message.clone()));
        let why = why.map(|why| format!(" ({why})")).unwrap_or_default();
        let since = bad.and_then(|it| it.last_transition_time.as_ref()).map(|time| time.0);
        let text = format!("{title} of the manager has no Pod that is ready{why}, so {untaken}");
        let todo = format!("kubectl -n {home} describe pods -l app.kubernetes.io/component=manager");
        return Finding::new(Cause::ManagerUnavailable, text, todo).since(since);
    }
    let held = facts.leases.iter().flatten().filter(|lease| lease.namespace().as_ref() == Some(&home));
    let held = held.filter_map(|lease| lease.spec.as_ref()?.holder_identity.as_deref().filter(|it| !it.is_empty()));
    if let Some(holder) = held.into_iter().next() {
        let text = format!("{holder} holds the Lease of {title} and does not renew it, so {untaken}");
        let todo = format!(
            "see whether that is a Pod that works: kubectl -n {home} logs deployment/{name}; if there is none of that name: kubectl -n {home} delete \
             lease vm-operator"
        );
        return Finding::new(Cause::ManagerSilent, text, todo);
    }
    let text = format!("the manager of {title} does not renew its Lease, so {untaken}");
    Finding::new(Cause::ManagerSilent, text, format!("kubectl -n {home} logs deployment/{name}"))
}

/// When somebody other than the programs changed the VM last.
fn changed(facts: &Facts) -> Option<Timestamp> {
    let vm = &facts.vm;
    let of_spec =
        vm.managed_fields().iter().filter(|entry| entry.subresource.as_deref().unwrap_or_default().is_empty());
    let last = of_spec.filter_map(|entry| entry.time.as_ref()).map(|time| time.0).max();
    last.or_else(|| vm.metadata.creation_timestamp.as_ref().map(|time| time.0))
}

/// The templates render the newest spec.
pub(super) fn template(facts: &Facts) -> Option<Finding> {
    let cause = |reason| match reason {
        Reason::TemplateError => Some(Cause::TemplateError),
        Reason::InvalidSpec => Some(Cause::InvalidSpec),
        Reason::NotAllowed => Some(Cause::NotAllowed),
        _ => None,
    };
    let valid = facts.condition(TEMPLATES_VALID).filter(|it| it.status == "False" && facts.is_observed());
    let found = valid.and_then(|it| Some((Reason::parse(&it.reason)?, it))).or_else(|| facts.not_ready());
    let (reason, condition) = found?;
    // A VM that is down as wanted stays so, whatever its templates are.
    let matters = facts.is_wanted_up() || (facts.not_ready().is_some() && facts.pod != Some(None));
    Some(of_condition(facts, cause(reason).filter(|_| matters)?, condition))
}

/// The API server accepts the objects.
pub(super) fn server(facts: &Facts) -> Option<Finding> {
    if let Some(found) = refused_to_maker(facts) {
        return Some(found);
    }
    let (reason, ready) = facts.not_ready()?;
    let cause = match reason {
        Reason::NameTaken | Reason::ClaimTaken => Cause::NameTaken,
        Reason::WatchFailed => Cause::WatchFailed,
        Reason::SecretRefused => Cause::SecretRefused,
        Reason::MountMissing => Cause::MountMissing,
        Reason::ApplyFailed => return Some(refusal(facts, ready)),
        _ => return None,
    };
    Some(of_condition(facts, cause, ready))
}

/// A controller that templates put between the VM and its Pod, such as a StatefulSet, may not create the Pod: its event says why.
fn refused_to_maker(facts: &Facts) -> Option<Finding> {
    if facts.pod != Some(None) || !facts.is_wanted_up() {
        return None;
    }
    let of_maker = |event: &&Event| {
        let kind = event.involved_object.kind.as_deref().unwrap_or_default();
        event.reason.as_deref() == Some("FailedCreate") && ["StatefulSet", "ReplicaSet", "Job"].contains(&kind)
    };
    let event = facts.events.iter().filter(of_maker).max_by_key(|event| time(event))?;
    // One that is older has healed: a StatefulSet tries again after 1,000 s at most.
    time(event).filter(|last| facts.now.duration_since(*last) < MAKERS_PAUSE)?;
    let begun = event.first_timestamp.as_ref().map(|it| it.0).or_else(|| time(event))?;
    let of_event = Condition {
        type_: READY.into(),
        status: "False".into(),
        reason: Reason::ApplyFailed.to_string(),
        message: event.message.clone().unwrap_or_default(),
        last_transition_time: Time(begun),
        observed_generation: None,
    };
    Some(refusal(facts, &of_event))
}

/// What to set for a quota that asks for requests or limits: `must specify limits.cpu for: agent,vm-runner; limits.memory for: sidecar`. The
/// containers of the built-in templates and sets have them where `vm-runner` has; those of others say themselves what they need.
fn unspecified(message: &str) -> String {
    let said = message.split_once("must specify ").map_or("", |(_, rest)| rest);
    let parts: Vec<(&str, &str)> = said.split("; ").filter_map(|part| part.split_once(" for: ")).collect();
    let ours = |name: &str| [CONTAINER_NAME, "agent", "passt"].contains(&name) || name.starts_with("import");
    let of = |wanted: bool| {
        let containers = move |list: &'_ str| list.trim().split(',').any(|name| ours(name) == wanted);
        let found: Vec<&str> = parts.iter().filter(|(_, list)| containers(list)).map(|(what, _)| *what).collect();
        found.join(", ")
    };
    let others: BTreeSet<&str> =
        parts.iter().flat_map(|(_, list)| list.trim().split(',')).filter(|name| !ours(name)).collect();
    let spec = match of(true) {
        missing if missing.is_empty() && !others.is_empty() => None,
        missing if missing.is_empty() => Some("set spec.resources of the VM".to_owned()),
        missing => Some(format!("set {missing} in spec.resources of the VM, from which its other containers follow")),
    };
    let template = (!others.is_empty()).then(|| {
        let names = others.into_iter().collect::<Vec<_>>().join(", ");
        format!("set {} of the container {names} in the template, or where else it comes from", of(false))
    });
    spec.into_iter().chain(template).collect::<Vec<_>>().join("; ")
}

/// Who refused a write. The API has no field for that: the answer of the API server names who it was, in words of its admission plugins.
fn refusal(facts: &Facts, ready: &Condition) -> Finding {
    let message = ready.message.as_str();
    let after = |words: &str| message.split_once(words).map(|(_, rest)| rest);
    let quoted = |words: &str| after(words).and_then(|rest| rest.split(['"', '\'']).next()).map(str::to_owned);
    let finding = |cause, todo: String| Finding { what_to_do: todo, ..of_condition(facts, cause, ready) };
    let place = facts.on_command_line();
    if let Some(rest) = after("exceeded quota: ") {
        let name = rest.split(',').next().unwrap_or_default();
        let used = facts.quotas.iter().flatten().find(|quota| quota.name_any() == name).and_then(|quota| {
            let hard = quota.spec.as_ref()?.hard.as_ref()?;
            Some(hard.iter().map(|(what, most)| format!("{what} {}", most.0)).collect::<Vec<_>>().join(", "))
        });
        let most = used.map(|used| format!(" (at most {used})")).unwrap_or_default();
        let todo = format!("free some of it, or raise it{most}: kubectl {place} describe quota {name}");
        return finding(Cause::QuotaExceeded, todo).at(format!("ResourceQuota {name}"));
    }
    if message.contains("failed quota: ") {
        let name = after("failed quota: ").and_then(|rest| rest.split(':').next()).unwrap_or_default();
        let todo = unspecified(message);
        let todo = format!("{todo}, or a LimitRange with defaults: kubectl {place} describe quota {name}");
        return finding(Cause::QuotaExceeded, todo).at(format!("ResourceQuota {name}"));
    }
    if message.contains("violates PodSecurity") {
        let todo = "let the namespace admit the Pod (label pod-security.kubernetes.io/enforce), or change the VM: docs/node-devices.md has the table";
        return finding(Cause::PodSecurity, todo.into());
    }
    if let Some(name) = quoted("failed calling webhook \"") {
        let todo = "let the program behind it run, or remove its configuration".to_owned();
        return finding(Cause::WebhookUnavailable, todo).at(format!("webhook {name}"));
    }
    if let Some(name) = quoted("admission webhook \"") {
        let todo = "do what it asks for, or talk to whoever runs it".to_owned();
        return finding(Cause::WebhookRefused, todo).at(format!("webhook {name}"));
    }
    if let Some(name) = quoted("ValidatingAdmissionPolicy '") {
        let todo = format!("do what it asks for: kubectl describe validatingadmissionpolicy {name}");
        return finding(Cause::PolicyRefused, todo).at(format!("ValidatingAdmissionPolicy {name}"));
    }
    if let Some(Bound { of, resource, kind }) = Bound::of(message) {
        let has = |limit: &&LimitRange| {
            let mut items = limit.spec.iter().flat_map(|spec| &spec.limits);
            items
                .any(|item| item.type_ == kind && of(item).as_ref().is_some_and(|bounds| bounds.contains_key(resource)))
        };
        let found = facts.limits.iter().flatten().find(has).map(ResourceExt::name_any);
        let found_name = found.unwrap_or_else(|| "of the namespace".into());
        let what = if kind == "PersistentVolumeClaim" { "the disk's size" } else { "spec.resources of the VM" };
        let todo = format!("set {what} within it, or change it: kubectl {place} describe limitrange");
        return finding(Cause::LimitExceeded, todo).at(format!("LimitRange {found_name}"));
    }
    // A LimitRange gives a container without limits its default one, which may be less than the container requests.
    if let Some((_, rest)) =
        message.split_once("must be less than or equal to ").filter(|(_, rest)| rest.contains(" limit of "))
    {
        let resource = rest.split(' ').next().unwrap_or_default();
        let gives = |limit: &&LimitRange| {
            let mut items = limit.spec.iter().flat_map(|spec| &spec.limits);
            items.any(|item| item.default.as_ref().is_some_and(|default| default.contains_key(resource)))
        };
        if let Some(found) = facts.limits.iter().flatten().find(gives).map(ResourceExt::name_any) {
            let todo = format!(
                "set limits in spec.resources of the VM, or change its default: kubectl {place} describe limitrange {found}"
            );
            return finding(Cause::LimitExceeded, todo).at(format!("LimitRange {found}"));
        }
    }
    let name = facts.vm.name_any();
    if ["field not declared in schema", " is invalid: "].iter().any(|words| message.contains(words)) {
        let set = facts.vm.spec.templates.as_ref().and_then(|templates| templates.set.as_deref());
        let set = set.map(|set| format!(" of the set {set}")).unwrap_or_default();
        let todo = format!(
            "correct that field in the template{set}, or the value that it has it from: kubectl vm diff {name} {place}"
        );
        return finding(Cause::ApplyFailed, todo);
    }
    for kind in ["RuntimeClass", "PriorityClass", "service account"] {
        if message.contains(kind) && message.contains("not found") || message.contains(&format!("no {kind} with name"))
        {
            return finding(Cause::ApplyFailed, format!("create that {kind}, or correct the template of the Pod"));
        }
    }
    of_condition(facts, Cause::ApplyFailed, ready)
}

/// The claims have their volumes. While a guest runs, they have.
pub(super) fn claims(facts: &Facts) -> Option<Finding> {
    if let Some((reason @ (Reason::ClaimMissing | Reason::ClaimReplaced | Reason::ClaimInUse), ready)) =
        facts.not_ready()
    {
        let cause = if reason == Reason::ClaimInUse { Cause::ClaimInUse } else { Cause::ClaimMissing };
        return Some(of_condition(facts, cause, ready));
    }
    let has_node = facts.pod().is_some_and(|pod| pod.node_name().is_some());
    if !facts.is_wanted_up() || has_node {
        return None;
    }
    let own = facts.claims.iter().flatten().find_map(|claim| of_claim(facts, claim));
    own.or_else(|| {
        let lost = facts.condition(STORAGE_READY).filter(|it| it.reason == Reason::ClaimMissing.as_str())?;
        Some(of_condition(facts, Cause::ClaimMissing, lost))
    })
    .or_else(|| {
        let name = facts.absent_claims.first()?;
        let text = format!("claim {name}, which the Pod mounts, does not exist");
        let todo = if name == IMAGE_REPOSITORY_CLAIM {
            "create it, for CD images (deploy/image-repository-claim.yaml has one)"
        } else {
            "create it, or correct the template of the Pod"
        };
        Some(Finding::new(Cause::ClaimAbsent, text, todo).at("Pod: spec.volumes"))
    })
}

fn of_claim(facts: &Facts, claim: &Object) -> Option<Finding> {
    let (name, place) = (&claim.key.name, facts.on_command_line());
    let describe = format!("kubectl {place} describe pvc {name}");
    if claim.phase() == Some("Lost") {
        let text = format!("claim {name} has lost its volume {}", claim.spec_str("/volumeName").unwrap_or_default());
        return Some(Finding::new(
            Cause::ClaimLost,
            text,
            format!("restore the volume, or the claim from a backup: {describe}"),
        ));
    }
    if let Some(time) = claim.deleting {
        let text = format!("claim {name} is being deleted, so no new Pod gets it");
        let todo = format!("nothing takes that back: copy its data while a Pod still has it, or let it go; {describe}");
        return Some(Finding::new(Cause::ClaimDeleting, text, todo).since(Some(time)));
    }
    if claim.phase() == Some("Bound") {
        return None;
    }
    if let Some(volume) = claim.spec_str("/volumeName").filter(|volume| !volume.is_empty()) {
        return not_the_volume(facts, claim, volume);
    }
    let is_of_runner = name.ends_with("-runner-data");
    let disk = if is_of_runner { "runnerDataPvc in the manager's configuration" } else { "the disk" };
    let field = format!("claim {name}: spec.storageClassName");
    let class_name = claim.spec_str("/storageClassName").filter(|class| !class.is_empty());
    let class = |wanted: &str| facts.classes.iter().flatten().find(|class| class.name_any() == wanted);
    match (class_name, &facts.classes) {
        (Some(wanted), Some(classes)) if class(wanted).is_none() => {
            let known: Vec<String> = classes.iter().map(ResourceExt::name_any).collect();
            let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
            let text =
                format!("claim {name} wants the storage class {wanted}, which does not exist (there are: {known})");
            let (vm, uid) = (facts.vm.name_any(), &claim.uid);
            let todo = format!(
                "create the class, or correct {disk} and have the claim, which is empty, made again: kubectl {place} annotate --overwrite vm {vm} \
                 {REPLACE_CLAIM_ANNOTATION}={uid} && kubectl {place} delete pvc {name}"
            );
            return Some(Finding::new(Cause::StorageClassMissing, text, todo).at(field).since(claim.created));
        }
        (None, Some(classes)) if claim.spec["storageClassName"].is_null() && !classes.iter().any(is_default) => {
            let text = format!("claim {name} names no storage class, and the cluster has no default one");
            let todo = format!("make a class the default, or name one in {disk}");
            return Some(Finding::new(Cause::NoDefaultClass, text, todo).at(field).since(claim.created));
        }
        _ => {}
    }
    // Only the provisioner's event says why it can't make a volume.
    let events = facts.events_of(&claim.uid);
    let failed = events.iter().find(|event| {
        ["ProvisioningFailed", "ProvisioningSucceeded"].contains(&event.reason.as_deref().unwrap_or_default())
    });
    if let Some(event) = failed.filter(|event| event.reason.as_deref() == Some("ProvisioningFailed")) {
        let text = format!("claim {name} gets no volume: {}", event.message.as_deref().unwrap_or_default());
        return Some(Finding::new(Cause::ProvisioningFailed, text, describe).since(time(event)));
    }
    let waits = class_name
        .and_then(class)
        .is_some_and(|class| class.volume_binding_mode.as_deref() == Some("WaitForFirstConsumer"));
    let is_late =
        claim.created.is_some_and(|created| facts.now.duration_since(created) > PATIENCE + PATIENCE + PATIENCE);
    (!waits && is_late && facts.classes.is_some()).then(|| {
        let size = claim.spec.pointer("/resources/requests/storage").and_then(Value::as_str).unwrap_or("its size");
        let who = volume::provisioner_of(facts, claim);
        let text = format!("claim {name} of {size} waits for a volume from {who}");
        let todo = if class_name.is_some() {
            format!("see whether that provisioner runs, and what it says: {describe}")
        } else {
            format!(
                "create a PersistentVolume without a class that is as large, or name a class in the disk: {describe}"
            )
        };
        Finding::new(Cause::ClaimUnbound, text, todo).at(field).since(claim.created)
    })
}

/// A claim wants a certain volume, and does not have it.
fn not_the_volume(facts: &Facts, claim: &Object, volume: &str) -> Option<Finding> {
    let name = &claim.key.name;
    let field = format!("claim {name}: spec.volumeName");
    let events = facts.events_of(&claim.uid);
    let refused = events
        .iter()
        .find(|event| ["FailedBinding", "VolumeMismatch"].contains(&event.reason.as_deref().unwrap_or_default()));
    let why = match refused.and_then(|event| event.message.as_deref()) {
        Some(message) => format!(": {message}"),
        // It may be bound in the next second.
        None if claim.created.is_some_and(|created| facts.now.duration_since(created) < PATIENCE) => return None,
        None => ": it does not exist, or is not free".into(),
    };
    let text = format!("claim {name} wants the volume {volume}, and does not get it{why}");
    let todo = format!("correct volumeName in the disk, or make that volume available: kubectl get pv {volume}");
    Some(Finding::new(Cause::ClaimUnbound, text, todo).at(field).since(claim.created))
}

fn is_default(class: &StorageClass) -> bool {
    class.annotations().get(DEFAULT_CLASS).is_some_and(|value| value == "true")
}

/// The part of a LimitRange that refuses an object. The API server's message names no LimitRange:
/// `maximum cpu usage per Container is 1, but request is 2`, `memory max limit to request ratio per Pod is 2, but provided ratio is 8`.
struct Bound<'a> {
    of: fn(&LimitRangeItem) -> &Option<BTreeMap<String, Quantity>>,
    resource: &'a str,
    /// `Container`, `Pod` or `PersistentVolumeClaim`.
    kind: &'a str,
}

impl<'a> Bound<'a> {
    fn of(message: &'a str) -> Option<Self> {
        let first = |rest: &'a str| rest.split([' ', ',']).next().unwrap_or_default();
        if let Some((before, rest)) = message.split_once(" max limit to request ratio per ") {
            let resource = before.rsplit([' ', '[']).next().unwrap_or_default();
            return Some(Self { of: |item| &item.max_limit_request_ratio, resource, kind: first(rest) });
        }
        let (before, rest) = message.split_once(" usage per ")?;
        let mut words = before.rsplit([' ', '[']);
        let (resource, bound) = (words.next()?, words.next()?);
        let of: fn(&LimitRangeItem) -> &Option<BTreeMap<String, Quantity>> = match bound {
            "maximum" => |item| &item.max,
            "minimum" => |item| &item.min,
            _ => return None,
        };
        Some(Self { of, resource, kind: first(rest) })
    }
}
