//! The stage of the scheduler: why no node takes a Pod.

use std::collections::BTreeMap;

use k8s_openapi::{api::core::v1::Node, jiff::SignedDuration};
use kube::ResourceExt;
use serde_json::{Value, json};

use super::{
    Cause, Facts, Finding, instant, neighbours, of_condition, owner_of,
    pod::not_ready,
    taint::{NOT_READY, OF_CONDITIONS, is_cordoned, untolerated},
    terms::NodeWish,
    time, volume,
};
use crate::{
    api::{GROUP, Quantity, Reason},
    observed::Object,
};

/// How long a scheduler has to say something about a Pod.
const PATIENCE: SignedDuration = SignedDuration::from_secs(10);

/// The scheduler of Pods that name none.
const DEFAULT_SCHEDULER: &str = "default-scheduler";

/// The Pod has a node.
pub(super) fn scheduler(facts: &Facts) -> Option<Finding> {
    let pod = facts.pod().filter(|pod| pod.node_name().is_none() && pod.deleting.is_none() && facts.is_wanted_up());
    let Some(pod) = pod else {
        let (_, ready) =
            facts.not_ready().filter(|(reason, _)| *reason == Reason::Unschedulable && facts.pod.is_none())?;
        return Some(of_condition(facts, Cause::Unschedulable, ready));
    };
    let name = &pod.key.name;
    let describe = format!("kubectl {} describe pod {name}", facts.on_command_line());
    // The condition is not taken back when the scheduler goes on to wait for a volume.
    let awaited = volume::awaited(facts, pod);
    if let Some(found) = awaited.and_then(|claim| volume::late(facts, claim)) {
        return Some(found);
    }
    let Some(condition) = pod.condition("PodScheduled", "False") else {
        if awaited.is_some() {
            return None;
        }
        // What keeps the scheduler from looking at it: only the event of another controller says so.
        let said = facts.events_of(&pod.uid).into_iter().find(|event| event.type_.as_deref() == Some("Warning"));
        if let Some(event) = said {
            let text = format!("Pod {name} can't be scheduled: {}", event.message.as_deref().unwrap_or_default());
            return Some(Finding::new(Cause::Unschedulable, text, describe).since(time(event)));
        }
        let wanted = pod.spec_str("/schedulerName").unwrap_or(DEFAULT_SCHEDULER);
        // The default one may have much to do.
        let patience = if wanted == DEFAULT_SCHEDULER { PATIENCE + PATIENCE + PATIENCE } else { PATIENCE };
        let is_late = pod.created.is_some_and(|created| facts.now.duration_since(created) > patience);
        return is_late.then(|| {
            let text = format!("no scheduler has looked at Pod {name}: nothing serves schedulerName {wanted}");
            let todo = format!("correct schedulerName in the template of the Pod, or start the scheduler {wanted}");
            Finding::new(Cause::SchedulerMissing, text, todo).at("Pod: spec.schedulerName").since(pod.created)
        });
    };
    let since = instant(&condition["lastTransitionTime"]);
    let message = condition["message"].as_str().unwrap_or_default();
    if condition["reason"] == "SchedulingGated" {
        let gates = pod.spec["schedulingGates"].as_array().into_iter().flatten();
        let gates: Vec<&str> = gates.filter_map(|gate| gate["name"].as_str()).collect();
        let text = format!("the scheduling gates {} hold Pod {name}", gates.join(", "));
        let todo = "let the program to which the gate belongs remove it";
        return Some(Finding::new(Cause::SchedulingGated, text, todo).at("Pod: spec.schedulingGates").since(since));
    }
    let found = facts.nodes.as_ref().and_then(|nodes| on_no_node(facts, pod, nodes, message));
    let found = found.or_else(|| neighbours::in_the_way(facts, pod, message));
    let found = found.unwrap_or_else(|| unschedulable(name, message, describe));
    Some(found.since(since))
}

/// What to do where no node offers what KVM needs.
const FOR_KVM: &str =
    "install the device plugin (deploy/node-devices) on nodes with KVM, or set spec.vm.accelerator to auto";

/// The scheduler's own words.
fn unschedulable(pod: &str, message: &str, describe: String) -> Finding {
    let short = neighbours::said(message);
    let hints = [
        (
            "free ports",
            "another Pod of the node has that port: stop it, or take another port in the VM or its template",
        ),
        ("Insufficient vmoperator.jdrupes.org/", FOR_KVM),
        ("Insufficient", "free that on a node (stop a VM), make the VM smaller, or add a node: kubectl describe nodes"),
        ("anti-affinity", "correct spec.affinity or the template, or move the other Pod, or add a node"),
        ("affinity", "correct spec.affinity or the template, or give a node the labels that it wants"),
        ("topology spread", "correct topologySpreadConstraints in the template, or label the nodes"),
        ("available persistent volumes", "add a node in the topology of the storage class, or take another class"),
    ];
    let hint = hints.iter().find(|(words, _)| short.contains(words)).map(|(_, hint)| format!("{hint}; {describe}"));
    Finding::new(Cause::Unschedulable, format!("no node takes Pod {pod}: {short}"), hint.unwrap_or(describe))
}

/// Why no node takes a Pod, if that shows in the nodes themselves. What the scheduler considers first is looked at first.
fn on_no_node(facts: &Facts, pod: &Object, nodes: &[Node], message: &str) -> Option<Finding> {
    if nodes.is_empty() {
        return Some(Finding::new(Cause::NoNodes, "the cluster has no node", "add a node: kubectl get nodes"));
    }
    let wanted = NodeWish::by(pod);
    let left: Vec<&Node> = nodes.iter().filter(|node| wanted.fits(node)).collect();
    if left.is_empty() {
        return Some(wanted.lacking(facts, nodes));
    }
    if left.iter().all(|node| is_cordoned(node)) {
        return Some(cordoned(&left));
    }
    let closed = |node: &Node| {
        if is_cordoned(node) { Some(cordoned(&[node])) } else { tainted(pod, node) }
    };
    let uncordoned: Vec<&Node> = left.iter().copied().filter(|node| !is_cordoned(node)).collect();
    let free: Vec<&Node> = uncordoned.iter().copied().filter(|node| untolerated(pod, node).is_none()).collect();
    if free.is_empty() {
        return uncordoned.first().and_then(|node| tainted(pod, node));
    }
    let Some(lacking) = lack(pod, &free) else {
        let in_the_way = neighbours::in_the_way(facts, pod, message);
        return in_the_way.or_else(|| volume::elsewhere(facts, pod, nodes, &free));
    };
    // To open a node that would do is easier than to get a larger one.
    let fitting = left.iter().find(|node| lack(pod, &[**node]).is_none());
    if let Some(found) = fitting.and_then(|node| closed(node)) {
        let text = format!("{}, and no open node has enough {} for Pod {}", found.text, lacking.resource, pod.key.name);
        return Some(Finding { text, ..found });
    }
    Some(too_large(facts, pod, lack(pod, &left).unwrap_or(lacking)))
}

/// Nodes on which `kubectl cordon` was used.
fn cordoned(nodes: &[&Node]) -> Finding {
    let names = neighbours::listed(nodes.iter().map(|node| node.name_any()));
    let who = nodes.first().and_then(|node| owner_of(node.managed_fields(), "/f:spec/f:unschedulable"));
    let first: Vec<String> = nodes.iter().take(neighbours::MOST).map(|node| node.name_any()).collect();
    let (node, is) = if nodes.len() == 1 { ("node", "is") } else { ("nodes", "are") };
    let todo = format!("kubectl uncordon {}", first.join(" "));
    Finding::new(Cause::Cordoned, format!("{node} {names} {is} cordoned"), todo).by(who).at("Node: spec.unschedulable")
}

/// A node with a taint that the Pod does not tolerate.
fn tainted(pod: &Object, node: &Node) -> Option<Finding> {
    let (name, taint) = (node.name_any(), untolerated(pod, node)?);
    if NOT_READY.contains(&taint.key.as_str()) {
        return Some(not_ready(&name, node));
    }
    if let Some((_, condition, what, todo)) = OF_CONDITIONS.iter().find(|(key, ..)| *key == taint.key) {
        let text = format!("node {name} {what} ({condition}), so it takes no Pod");
        let found = Finding::new(Cause::Tainted, text, format!("{todo}: kubectl describe node {name}"));
        return Some(found.at("Node: status.conditions"));
    }
    let value = taint.value.as_ref().map(|value| format!("={value}")).unwrap_or_default();
    let told = format!("{}{value}:{}", taint.key, taint.effect);
    let text = format!("node {name} has the taint {told}, which Pod {} does not tolerate", pod.key.name);
    let todo = format!(
        "kubectl taint node {name} {}:{}-, or a toleration in the template of the Pod",
        taint.key, taint.effect
    );
    Some(Finding::new(Cause::Tainted, text, todo).at("Node: spec.taints"))
}

/// A resource of which some nodes have less than a Pod requests.
struct Lack {
    resource: String,
    wanted: f64,
    /// How much the largest of them has.
    most: Option<f64>,
}

/// What a Pod requests and none of these nodes has, even if nothing else ran there.
fn lack(pod: &Object, nodes: &[&Node]) -> Option<Lack> {
    requests(pod).into_iter().find_map(|(resource, wanted)| {
        let has = |node: &&Node| {
            let amount_of_node = node.status.as_ref()?.allocatable.as_ref()?.get(&resource)?;
            amount(&resource, &json!(amount_of_node.0))
        };
        let most =
            nodes.iter().filter_map(has).fold(None, |most: Option<f64>, it| Some(most.map_or(it, |most| most.max(it))));
        // A node without a device does not name it. Every node names what it has of the rest, unless it could not be read.
        let is_lacking = if is_device(&resource) {
            most.unwrap_or_default() < wanted
        } else {
            most.is_some_and(|most| most < wanted)
        };
        is_lacking.then_some(Lack { resource, wanted, most })
    })
}

/// Devices have a domain in their names (<https://kubernetes.io/docs/tasks/configure-pod-container/extended-resource/>).
fn is_device(resource: &str) -> bool {
    resource.contains('/')
}

/// A Pod that is for no node of the cluster.
fn too_large(facts: &Facts, pod: &Object, lack: Lack) -> Finding {
    let Lack { resource, wanted, most } = lack;
    let name = &pod.key.name;
    let resources = json!(facts.vm.spec.resources);
    if is_device(&resource) {
        let text = match most.filter(|most| *most > 0.0) {
            Some(most) => format!("Pod {name} needs {wanted} of {resource}, and no node offers more than {most}"),
            None => format!("no node offers {resource}, which Pod {name} needs"),
        };
        if resource.split_once('/').is_some_and(|(domain, _)| domain == GROUP) {
            return Finding::new(Cause::DeviceMissing, text, FOR_KVM).at("spec.vm.accelerator");
        }
        let is_in_spec = ["limits", "requests"].iter().any(|list| resources[*list].get(&resource).is_some());
        let field = if is_in_spec { "spec.resources" } else { "Pod: resources" };
        let todo = "install the device plugin that offers it, or correct spec.resources or spec.templateValues, from which the Pod has it";
        return Finding::new(Cause::DeviceMissing, text, todo).at(field);
    }
    let told = |amount: f64| {
        if resource == "cpu" { format!("{amount}") } else { format!("{} Mi", (amount / 1_048_576.0).floor()) }
    };
    let field = if resource == "cpu" { "spec.vm.currentCpus" } else { "spec.vm.currentRam" };
    let field = if facts.vm.spec.resources.is_some() { "spec.resources" } else { field };
    let text = format!(
        "Pod {name} requests {} of {resource}, and the largest node has {}",
        told(wanted),
        told(most.unwrap_or_default())
    );
    Finding::new(Cause::TooLarge, text, "make the VM smaller, or add a larger node").at(field)
}

/// What the containers of a Pod request together. Sidecars count, other init containers need less than the rest.
fn requests(pod: &Object) -> BTreeMap<String, f64> {
    let mut sum = BTreeMap::new();
    let all = ["containers", "initContainers"].into_iter().filter_map(|list| Some((list, pod.spec[list].as_array()?)));
    for container in all.flat_map(|(list, items)| {
        items.iter().filter(move |it| list == "containers" || it["restartPolicy"] == "Always")
    }) {
        let resources = &container["resources"];
        let mut wanted: BTreeMap<&String, &Value> = BTreeMap::new();
        for list in ["limits", "requests"] {
            wanted.extend(resources[list].as_object().into_iter().flatten());
        }
        for (resource, value) in wanted {
            *sum.entry(resource.clone()).or_default() += amount(resource, value).unwrap_or_default();
        }
    }
    sum
}

/// A quantity as a number: CPUs, bytes, or pieces.
fn amount(resource: &str, value: &Value) -> Option<f64> {
    let milli = value.as_str().and_then(|text| text.strip_suffix('m'));
    match milli {
        Some(text) => text.parse::<f64>().ok().map(|milli| milli / 1000.0),
        None if resource == "cpu" => value.as_f64().or_else(|| value.as_str()?.parse().ok()),
        #[allow(clippy::cast_precision_loss, reason = "a size is compared and printed in MiB")]
        None => Quantity::bytes_of(value).map(|bytes| bytes as f64),
    }
}
